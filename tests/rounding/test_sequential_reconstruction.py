"""Sequential reconstruction: better than the nearest values, exact on the device, and noted where it cannot be done."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import chipfit
from chipfit import Settings
from chipfit.errors import ConfigError, DataError, PlanError
from chipfit.passes.rewriting import Readers
from chipfit.plan.record import Plan
from chipfit.rounding import sequential_reconstruction
from chipfit.rounding.compare import Reference
from chipfit.rounding.methods.gptq import with_weighted_ranges
from chipfit.rounding.methods.nearest import Nearest
from chipfit.rounding.moments import Moments
from chipfit.rounding.sequential_reconstruction import GptqSettings, SequentialReconstruction, why_not_fitted
from tests.build import NEAREST, graph_of, grid, mlp, model_of, plan_of, quantized, randn, stored

GPTQ, NO_GUARD = Settings(rounding="gptq"), Settings(rounding="gptq", rounding_guard=False)


def bits(weights, activations=8, **layers):
    return {"*": {"bits": weights, "activation_bits": activations}, **layers}


def net(transposed: bool = True):
    torch.manual_seed(0)
    layers = {"stem": nn.Conv2d(3, 8, 3, padding=1), "body": nn.Conv2d(8, 8, 3, padding=1)}
    layers |= {"depth": nn.Conv2d(8, 8, 3, stride=2, groups=8)}
    layers |= {"up": nn.ConvTranspose2d(8, 8, 3, 2) if transposed else nn.Conv2d(8, 8, 1), "head": nn.Linear(8, 5)}

    def forward(m, x):
        x = torch.relu(m.stem(x))
        x = torch.relu(m.body(x) + x)
        x = torch.relu(m.up(torch.relu(m.depth(x))))
        return 4 * m.head(x.mean((2, 3)))

    return model_of(forward, **layers)


def reconstruct(graph, plan, batches, settings=None, searched=(), **more):
    return SequentialReconstruction(graph, plan, settings or GptqSettings(), searched, seed=0, **more).run(batches)


DATA = list(randn(256, 3, 10, 10, seed=1).split(32))
NEW = randn(256, 3, 10, 10, seed=2)


def loss(result, graph) -> float:
    return Reference(graph, [[NEW]]).loss(result.graph, result.plan)


def fitted(platform="mqbench_academic", overrides=None, settings=None, model=None, **options):
    options |= {} if settings is None else {"settings": settings}
    return quantized(model or net(), DATA, platform, overrides=overrides, **options)


def weight_origins(result):
    return {name: t.origin.split()[0] for name, t in result.plan.tensors.items() if t.role == "weight" and t.quantized}


# ---------------------------------------------------------------- whole networks


@pytest.mark.parametrize(
    "platform, overrides, most",
    [("mqbench_academic", bits(4), 0.3), ("mqbench_academic", bits(3), 0.2), ("nnie", None, 0.8)],
)
def test_new_images_lose_less_than_by_rounding_to_the_nearest(platform, overrides, most):
    plain, better = fitted(platform, overrides, NEAREST), fitted(platform, overrides, GPTQ)
    assert loss(better, plain.graph) < most * loss(plain, plain.graph)
    assert any("rounded by gptq" in n for n in better.plan.rewrites)


def test_each_step_of_the_recipe_has_its_share():
    graph = fitted(overrides=bits(3), settings=NEAREST).graph
    steps = [{"rounding": "nearest", "correct_weights": None}, {"rounding": "gptq", "correct_weights": None}]
    steps = [Settings(rounding_guard=False, **s) for s in (*steps, {"rounding": "gptq"})]
    losses = [loss(fitted(overrides=bits(3), settings=s), graph) for s in (Settings(correct_bias=True), *steps)]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 4


def test_ranges_of_few_bits_serve_the_channels_that_the_outputs_depend_on():
    model, spread = mlp(2, 16, 4), torch.tensor([1.0, 10.0])
    with torch.no_grad():
        model[0].weight *= torch.tensor([3.0, 0.01])  # the second input, ten times as large, hardly counts
    data, few = [torch.randn(64, 2) * spread for _ in range(2)], bits(8, 4)
    plain = quantized(model, data, "mqbench_academic", overrides=few, settings=NEAREST)
    placed = with_weighted_ranges(plain.graph, plain.plan, plain.stats, [[x] for x in data], seed=0)
    (name,) = plain.graph.inputs
    assert placed[name].scale < 0.9 * plain.plan[name].scale
    reference = Reference(plain.graph, [[torch.randn(256, 2) * spread]])
    assert reference.loss(plain.graph, placed) < reference.loss(plain.graph, plain.plan)
    for own in (True, False):
        settings = Settings(rounding="gptq", rounding_guard=False, effect_ranges=own)
        done = quantized(model, data, "mqbench_academic", overrides=few, settings=settings)
        assert torch.equal(done.plan[name].scale, (placed if own else plain.plan)[name].scale)


@pytest.mark.parametrize(
    "platform, four", [("tflite_int8", ("stem", "body", "depth")), ("ort_cpu", ()), ("tengine", ()), ("ethos_u", ())]
)
def test_the_device_computes_what_was_decided(platform, four):
    pytest.importorskip("ai_edge_litert")
    result = fitted(platform, {name: {"bits": 4} for name in four} or None, GPTQ, net(transposed=False))
    assert not any("scales moved" in n for n in result.plan.rewrites)
    seen = result.verify([NEW[:32]])
    assert seen.exact, seen.summary()


@pytest.mark.parametrize("platform", ["tflite_int8", "tinyengine"])
def test_weights_lie_on_their_grids_and_scales_obey_the_platform(platform):
    result = fitted(platform, None, NO_GUARD)
    rounded = [t for t in result.plan.tensors.values() if "gptq over" in t.origin]
    assert len(rounded) >= 4
    for t in rounded:
        torch.testing.assert_close(t.stored.round(result.graph.weights[t.name]), result.graph.weights[t.name])
        for limit in (x for x in result.plan.limits if t.name in dict(x.terms)):
            total = sum(e * torch.log2(result.plan[n].scale.double()) for n, e in limit.terms)
            assert bool((total >= limit.low).all() and (total <= limit.high).all())


def test_the_same_seed_gives_the_same_plan_another_one_sees_other_positions_and_saving_keeps_it(tmp_path):
    settings = Settings(rounding="gptq", rounding_samples=64)
    first, second, other = (fitted("ort_cpu", None, settings, seed=s) for s in (0, 0, 1))
    assert all(t.stored.same_numbers(second.plan[name]) for name, t in first.plan.tensors.items() if t.quantized)
    assert not torch.equal(first.graph.weights["stem.bias"], other.graph.weights["stem.bias"])
    again = chipfit.load(first.save(tmp_path / "result"))
    assert all(torch.equal(again.graph.weights[k], w) for k, w in first.graph.weights.items())


def test_the_guard_keeps_the_plain_plan_where_it_is_better_and_says_so(monkeypatch):
    losses = iter((0.1, 0.2))
    monkeypatch.setattr(Reference, "loss", lambda *_: next(losses))
    plain, kept = fitted("ort_cpu"), fitted("ort_cpu", None, GPTQ)
    assert all(t.stored.same_numbers(kept.plan[n]) for n, t in plain.plan.tensors.items() if t.quantized)
    assert any("after all" in n and "0.2, 0.1 without" in n for n in kept.plan.rewrites)


def test_values_beyond_the_limit_lie_on_disk_and_change_nothing():
    result = fitted("ort_cpu")
    held, spilled = (
        reconstruct(result.graph, result.plan, [[x] for x in DATA[:2]], memory=m) for m in (1 << 30, 1 << 10)
    )
    assert held.memory.spilled == 0 < spilled.memory.spilled
    assert all(torch.equal(held.graph.weights[k], w) for k, w in spilled.graph.weights.items())


def test_settings_that_exclude_each_other_are_refused():
    with pytest.raises(ConfigError, match="'rounding' and 'correct_bias'"):
        fitted("ort_cpu", None, Settings(rounding="gptq", correct_bias=True))


@pytest.mark.parametrize(
    "width, options, walks",
    [(6, {}, False), (5, {}, True), (4, {"settings": Settings(correct_bias=True)}, False)]
    + [(4, {"weight_rule": "no_clipping"}, False), (4, {"rule": "no_clipping"}, True)],
    ids=str,
)
def test_few_bits_are_rounded_by_what_they_do_unless_the_user_chose_otherwise(width, options, walks):
    result = fitted(overrides=bits(width), **options)
    assert (set(weight_origins(result).values()) == {"gptq"}) is walks
    if walks and "rule" not in options:
        asked = fitted(overrides=bits(width), settings=GPTQ)
        assert all(t.stored.same_numbers(result.plan[k]) for k, t in asked.plan.tensors.items() if t.quantized)


def test_an_edit_rounds_anew_with_the_data_of_before(tmp_path):
    four, three = (bits(b, head={"bits": 8, "activation_bits": 8}) for b in (4, 3))
    result = fitted(overrides=four)
    edited, again = result.edit(three), fitted(overrides=three)
    assert set(weight_origins(edited).values()) == {"gptq"}
    assert torch.equal(edited.graph.weights["stem.weight"], again.graph.weights["stem.weight"])
    assert "gptq" not in weight_origins(result.edit(bits(8))).values()
    fitted(overrides=bits(8)).save(tmp_path / "plain")
    assert "gptq" not in weight_origins(chipfit.load(tmp_path / "plain").edit(four)).values()
    result.save(tmp_path / "rounded")
    with pytest.raises(PlanError, match="needs the calibration data"):
        chipfit.load(tmp_path / "rounded").edit(three)


@pytest.fixture(scope="module")
def two_layers():
    """A network of 4 bits on 40 numbers, and these numbers."""
    x = randn(40, 6)
    return quantized(mlp(6, 8, 4), x, "mqbench_academic", overrides=bits(4, 4), settings=NEAREST), x


@pytest.mark.parametrize("settings, name", [(GptqSettings(), "gptq"), (Nearest(ridge=None), "nearest")])
def test_weights_tell_how_they_were_rounded_and_the_given_network_stays_as_it_is(two_layers, settings, name):
    result, x = two_layers
    before = {k: w.clone() for k, w in result.graph.weights.items()}
    done = reconstruct(result.graph, result.plan, [[x]], settings)
    assert done.notes == [] and done.memory.spilled == 0
    assert {n: t.origin for n, t in done.tensors.items()} == dict.fromkeys(done.tensors, f"{name} over 40 positions")
    assert set(done.tensors) == {"0.weight", "2.weight"}
    for n, t in done.tensors.items():
        torch.testing.assert_close(t.stored.round(done.graph.weights[n]), done.graph.weights[n])
        assert not torch.equal(t.scale, result.plan[n].scale)
    assert all(torch.equal(w, result.graph.weights[k]) for k, w in before.items())


def test_moments_that_cannot_be_inverted_are_said(two_layers, monkeypatch):
    result, x = two_layers
    monkeypatch.setattr(sequential_reconstruction.gptq_solver, "error_feedback", lambda *_: None)
    notes = reconstruct(result.graph, result.plan, [[x]]).notes
    assert len(notes) == 2 and all("its moments are singular" in n for n in notes)


@pytest.mark.parametrize("images, warned", [(5, "'0', '2'"), (6, "'2'"), (7, "'2'"), (8, "")])
def test_fewer_positions_than_weights_are_said(two_layers, images, warned):
    result, x = two_layers
    notes = reconstruct(result.graph, result.plan, [[x[:images]]]).notes
    found = [n.partition("few positions in ")[2].partition(" (")[0] for n in notes if "more images improve" in n]
    assert found == [warned] * bool(warned)


# ---------------------------------------------------------------- scales of blocks

BLOCKS = [randn(64, 64, seed=k) @ randn(64, 64, seed=9) for k in range(4)]


def in_blocks(settings, inputs="float"):
    asked = {"Linear": {"bits": 4, "inputs": inputs}}
    return quantized(mlp(64, 96, 32), BLOCKS, "ort_dynamic", overrides=asked, settings=settings)


@pytest.mark.parametrize("inputs", ["dynamic", "float"])
def test_with_scales_of_blocks_the_error_in_the_outputs_is_less_than_half_of_that_of_nearest_values(inputs):
    new, model = torch.cat(BLOCKS)[:100] * 0.9, mlp(64, 96, 32)
    plain, better = (in_blocks(s, inputs) for s in (NEAREST, NO_GUARD))
    with torch.no_grad():
        before, after = (float((r.model(new) - model(new)).square().mean()) for r in (plain, better))
    assert after < 0.5 * before and better.verify([new]).sound


def test_the_scales_of_blocks_stay_and_every_weight_lies_on_its_grid():
    plain, result = in_blocks(NEAREST), in_blocks(NO_GUARD)
    stored, w = result.plan["0.weight"], result.graph.weights["0.weight"]
    assert torch.equal(stored.scale, plain.plan["0.weight"].scale) and torch.allclose(stored.round(w), w, atol=1e-6)
    assert not torch.equal(stored.quantize(w), stored.quantize(plain.graph.weights["0.weight"]))


# ---------------------------------------------------------------- what is summed for an operator, by hand

A = torch.tensor([[0.5, -1.0], [2.0, 0.25]])
B = torch.tensor([0.25, -0.5])
IMAGES = randn(40, 2, seed=5).half().float()  # exact in half precision
PLAIN = Nearest(ridge=None)


def network(*nodes, outputs=None, inputs=("x",), **weights):
    table = {"w": A.clone(), "b": B.clone(), "c": torch.tensor([0.3, -0.7]), **weights}
    return graph_of(*nodes, weights=table, outputs=outputs, inputs=inputs, shape=(None, 2))


def planned(roles=None, edges=(), **tensors):
    """A plan with x on 3 bits and w on 6."""
    kept = {"w": stored(0.25, bits=6), "x": X3, **tensors}
    return plan_of(roles, float_edges=edges, **{k: v for k, v in kept.items() if v is not None})


X3, W6 = stored(0.5, bits=3), stored(0.25, bits=6)


def sums(monkeypatch, graph, plan, settings=PLAIN, inputs=(IMAGES,)):
    """Inputs and wanted outputs of each operator, as [images, numbers]; and the result."""
    seen, old = {}, Moments.add

    def add(self, x, t):
        seen.setdefault(id(self), (self, [], []))[1].append(x[0].t())
        seen[id(self)][2].append(t[0].t())
        old(self, x, t)

    monkeypatch.setattr(Moments, "add", add)
    done = reconstruct(graph, plan, [list(inputs)], settings)
    return [(torch.cat(x), torch.cat(t)) for _, x, t in seen.values()], done


def nearest(x, scale=0.5, bits=3):
    return (x / scale).round().clamp(-(1 << bits - 1), (1 << bits - 1) - 1) * scale


LINEAR, Y = "y = Linear(x, w, b)", IMAGES @ A.t() + B


@pytest.mark.parametrize(
    "nodes, outputs, lost",
    [
        ((LINEAR, "z = Add(y, x)"), "z", lambda x: x - nearest(x)),
        ((LINEAR, "z = Add(x, y)"), "z", lambda x: x - nearest(x)),
        (("r = Relu(x)", LINEAR, "z = Add(y, r)"), "z", lambda x: x.relu() - nearest(x).relu()),
        ((LINEAR, "r = Relu(x)", "z = Add(y, r)"), "z", None),  # it is not there yet
        ((LINEAR, "z = Add(y, x)"), "zy", None),  # the output is read by others
        ((LINEAR, "z = Add(y, x)", "v = Add(y, z)"), "v", None),
        ((LINEAR, "z = Mul(y, x)"), "z", None),
        ((LINEAR, "z = Add(y, y)"), "z", None),
        ((LINEAR, "z = Add(y, c)"), "z", None),
        ((LINEAR,), "y", None),
    ],
)
def test_an_operator_before_an_addition_repairs_what_the_other_operand_has_lost(nodes, outputs, lost, monkeypatch):
    graph = network(*nodes, outputs=outputs)
    ((x, t),), _ = sums(monkeypatch, graph, planned())
    torch.testing.assert_close(x, nearest(IMAGES))
    torch.testing.assert_close(t, Y + lost(IMAGES) if lost else Y)
    ((_, t),), _ = sums(monkeypatch, graph, planned(), replace(PLAIN, residual=False))
    torch.testing.assert_close(t, Y)


def test_an_operand_of_another_shape_is_not_repaired(monkeypatch):
    graph = network(LINEAR, "z = Add(y, s)", inputs=("x", "s"))
    ((_, t),), _ = sums(monkeypatch, graph, planned(s=X3), inputs=(IMAGES, IMAGES[:, :1]))
    torch.testing.assert_close(t, Y)


@pytest.mark.parametrize("x3", [X3, stored([0.5, 0.5], bits=3, axis=1)])
def test_a_reader_of_floats_and_one_of_quantized_values_get_what_each_reads(x3, monkeypatch):
    graph = network(LINEAR, "v = Linear(x, w2, -)", "z = Add(y, x)", outputs="vz", w2=A.clone())
    v = IMAGES @ A.t()
    (of_y, of_v), _ = sums(monkeypatch, graph, planned(w2=W6, x=x3, edges=[("x", "v")]))
    torch.testing.assert_close(of_y, (nearest(IMAGES), Y + IMAGES - nearest(IMAGES)))
    torch.testing.assert_close(of_v, (IMAGES, v))
    (of_y, of_v), _ = sums(monkeypatch, graph, planned(w2=W6, x=x3, edges=[("x", "z")]))
    torch.testing.assert_close(of_y, (nearest(IMAGES), Y))  # an addition that reads floats loses nothing
    torch.testing.assert_close(of_v, (nearest(IMAGES), v))


@pytest.mark.parametrize(
    "role, c", [("weight", nearest(torch.tensor([0.3, -0.7]))), ("bias", torch.tensor([0.3, -0.7]))]
)
def test_later_operators_read_rounded_weights_and_constants(role, c, monkeypatch):
    graph = network(LINEAR, "s = Add(y, c)", "v = Linear(s, w2, -)", w2=A.clone())
    (_, (x, t)), done = sums(monkeypatch, graph, planned({"c": role}, w2=W6, c=X3))
    q, b = nearest(A, float(done.tensors["w"].scale), 6), done.graph.weights["b"]
    torch.testing.assert_close(done.graph.weights["w"], q)
    torch.testing.assert_close(x, nearest(IMAGES) @ q.t() + b + c)
    torch.testing.assert_close(t, (Y + torch.tensor([0.3, -0.7])) @ A.t())


@pytest.mark.parametrize("ridge", [None, 0.1])
def test_a_bias_takes_the_means_of_what_rounding_changes(ridge, monkeypatch):
    graph, settings = network(LINEAR), GptqSettings(ridge=ridge)
    _, done = sums(monkeypatch, graph, planned(), settings)
    q = done.graph.weights["w"]
    torch.testing.assert_close(done.graph.weights["b"], Y.mean(0) - q @ nearest(IMAGES).mean(0))
    _, done = sums(monkeypatch, network("y = Linear(x, w, -)"), planned(), settings)
    assert done.graph.nodes[0].bias is None and torch.equal(graph.weights["b"], B)


@pytest.fixture
def drawn(monkeypatch):
    """How many positions are asked for, by chunk."""
    seen, old = [], sequential_reconstruction.positions

    def positions(node, y, most, random):
        seen.append(most)
        return old(node, y, most, random)

    monkeypatch.setattr(sequential_reconstruction, "positions", positions)
    return seen


@pytest.mark.parametrize("samples, most", [(100, 3), (80, 2), (81, 3), (1, 1), (40, 1), (41, 2), (0, 1)])
def test_positions_are_as_many_as_asked_for_over_all_images_and_twice_the_weights(samples, most, drawn):
    """Of 40 images, in two chunks; 42 positions at least for rows of 21 weights."""
    reconstruct(network(LINEAR), planned(), [[IMAGES]], replace(PLAIN, samples=samples))
    reconstruct(network(LINEAR, w=torch.ones(2, 21)), planned(), [[randn(40, 21)]], replace(PLAIN, samples=samples))
    assert drawn == [most, most, max(most, 2), max(most, 2)]


def test_images_are_those_of_the_longest_input_and_a_single_number_is_none(drawn):
    graph = network(LINEAR, "z = Mul(y, s)", inputs=("x", "s"))
    for s in (torch.tensor(2.0), torch.ones(1, 2)):
        reconstruct(graph, planned(), [[IMAGES, s]], replace(PLAIN, samples=80))
    assert drawn == [2, 2]
    with pytest.raises(DataError, match="no calibration data"):
        reconstruct(network("y = Relu(x)"), Plan(), [[torch.tensor(1.0)]])


FLOOR = {"rounding": "floor"}


@pytest.mark.parametrize(
    "nodes, plan, why",
    [
        ([LINEAR], planned(x=None), None),
        (["y = Add(x, x)"], planned(), ""),
        (["y = Linear(x, x, b)"], planned(), ""),  # a product of two values
        ([LINEAR], planned(edges=[("w", "y")]), ""),
        ([LINEAR], planned(edges=[("w", "z"), ("x", "y")]), None),
        ([LINEAR], Plan(), ""),
        ([LINEAR], planned(w=stored(bits=3, **FLOOR)), "the chip rounds weights by floor"),
        ([LINEAR], planned(w=stored(kind="lut", table=(-1.0, 0.0, 1.0), **FLOOR)), None),
        (["y = Linear(c, w, b)"], planned(), "it reads no data"),
        ([LINEAR, "z = Linear(x, w, b)"], planned(), "'w' is read by several operators"),
        ([LINEAR, "z = Linear(x, w2, b)"], planned(), "'b' is read by several operators"),
        ([LINEAR, "w"], planned(), "'w' is an output of the model"),
    ],
)
def test_why_a_weight_is_not_fitted(nodes, plan, why):
    returned = "w" in nodes
    graph = network(*nodes[: 1 if returned else None], w2=A, outputs="yw" if returned else None)
    assert why_not_fitted(graph, plan, Readers(graph), graph.nodes[0]) == why


@pytest.mark.parametrize(
    "nodes, outputs, rules, placed",
    [
        ([LINEAR, "z = Relu(y)"], "yz", {}, {"z"}),  # quantized values of the first are read
        ([LINEAR], "y", {}, {"y"}),
        *[([LINEAR], "y", rule, set()) for rule in ({"fixed": ("y",)}, {"zeros": ("y",)}, {"ties": (("x", "y"),)})],
    ],
)
def test_ranges_of_scores_are_searched_where_nothing_reads_them_and_no_rule_says_them(nodes, outputs, rules, placed):
    scores = stored(9.0, bits=4, signed=False)
    graph, plan = network(*nodes, outputs=outputs), replace(planned(y=scores, z=scores), **rules)
    done = reconstruct(graph, plan, [[IMAGES[:20]]], PLAIN, ["y", "z"])
    assert set(done.tensors) - {"w"} == placed
    assert all(done.tensors[n].origin == "least divergence of the class probabilities" for n in placed)
    assert all(float(done.tensors[n].scale) < 9 for n in placed)
    assert set(reconstruct(graph, plan, [[IMAGES[:20]]], PLAIN, ["another"]).tensors) == {"w"}


@pytest.mark.parametrize(
    "shape, classes, on, scores",
    [
        ((20, 2), 2, grid(7, signed=False), True),
        ((20, 2), 2, grid(8, signed=False), False),
        ((20, 2), 2, grid(4, kind="lut", table=(0.0, 1.0)), False),
        ((20, 2), 1, grid(4), False),
        ((10, 2, 2), 2, grid(4), False),
    ],
)
def test_scores_are_of_two_classes_at_least_and_of_fewer_than_eight_bits(shape, classes, on, scores):
    graph = network("y = Linear(x, w, -)", w=A[:classes].clone())
    done = reconstruct(graph, planned(y=stored(9.0, on=on)), [[IMAGES[:20].reshape(shape)]], PLAIN, ["y"])
    assert ("y" in done.tensors) is scores


@pytest.mark.parametrize("scale, axis", [(0.5, None), ([0.5, 0.25, 1.0], 1)])
def test_positions_of_a_value_that_others_read_in_float_are_rounded_by_their_channel(scale, axis, monkeypatch):
    x = randn(40, 3, 2, seed=6).half().float()
    graph = network(LINEAR, "r = Relu(x)", outputs="yr")
    plan = planned(x=stored(scale, bits=3, axis=axis), edges=[("x", "r")])
    ((found, t),), _ = sums(monkeypatch, graph, plan, inputs=(x,))
    s = torch.tensor(scale).view(1, -1, 1)
    torch.testing.assert_close(found, ((x / s).round().clamp(-4, 3) * s).reshape(-1, 2))
    torch.testing.assert_close(t, (x @ A.t() + B).reshape(-1, 2))


def test_values_that_nothing_reads_any_more_are_let_go(monkeypatch):
    held, old = [], SequentialReconstruction.step

    def step(self, *args):
        held.append((set(self.floats), set(self.quantized), self.memory.used))
        return old(self, *args)

    monkeypatch.setattr(SequentialReconstruction, "step", step)
    graph = network(LINEAR, "z = Relu(y)", "v = Add(z, z)", inputs=("x", "s"))
    reconstruct(graph, planned(x=None), [[IMAGES, IMAGES]], PLAIN)
    # of 80 numbers in each stream, inputs in half precision: the second one is read by nothing
    assert [(a, b) for a, b, _ in held] == [({"x", "s"},) * 2, ({"s", "y"},) * 2, ({"s", "z"},) * 2]
    assert [used for *_, used in held] == [2 * 2 * 160, 2 * (160 + 320), 2 * (160 + 320)]
