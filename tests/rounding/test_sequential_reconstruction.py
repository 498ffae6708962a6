"""Rounding in one walk: better than plain rounding, exact on the device, and said where it cannot be done."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import chipfit
from chipfit import Settings
from chipfit.calibration.batch_cache import MemoryLimit
from chipfit.errors import ConfigError, DataError, PlanError, UnknownNameError
from chipfit.graph.ir import Graph, Node, Value
from chipfit.passes.rewriting import Readers
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.rounding import sequential_reconstruction as walking
from chipfit.rounding.activation_ranges import with_weighted_ranges
from chipfit.rounding.compare import Reference
from chipfit.rounding.methods.nearest import Nearest
from chipfit.rounding.moments import Moments
from chipfit.rounding.sequential_reconstruction import GptqSettings, reconstruct
from chipfit.rounding.streams import Stream

GPTQ = Settings(rounding="gptq")
OFF = Settings(rounding="off")


class Net(nn.Module):
    def __init__(self, transposed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.body = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.depth = nn.Conv2d(8, 8, 3, stride=2, groups=8)
        self.up = nn.ConvTranspose2d(8, 8, 3, 2) if transposed else nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.relu(self.body(x) + x)
        x = torch.relu(self.up(torch.relu(self.depth(x))))
        return 4 * self.head(x.mean((2, 3)))


DATA = list(torch.randn(256, 3, 10, 10, generator=torch.Generator().manual_seed(1)).split(32))
NEW = torch.randn(256, 3, 10, 10, generator=torch.Generator().manual_seed(2))


def loss(result, graph) -> float:
    return Reference(graph, [[NEW]]).loss(result.graph, result.plan)


def fitted(platform, overrides=None, settings=None, model=None, **options):
    model = model or Net().eval()
    given = {} if settings is None else {"settings": settings}
    return chipfit.quantize(model, DATA, platform, overrides=overrides, progress=False, **given, **options)


@pytest.mark.parametrize(
    "platform, bits, most",
    [("mqbench_academic", 4, 0.3), ("mqbench_academic", 3, 0.2), ("nnie", None, 0.8)],
)
def test_new_images_lose_less_than_by_rounding_to_the_nearest(platform, bits, most):
    wide = {"*": {"bits": bits, "activation_bits": 8}} if bits else None
    plain, better = fitted(platform, wide, OFF), fitted(platform, wide, GPTQ)
    assert loss(better, plain.graph) < most * loss(plain, plain.graph)
    assert any("rounded by gptq" in n for n in better.plan.rewrites)


def test_each_step_of_the_recipe_has_its_share():
    wide = {"*": {"bits": 3, "activation_bits": 8}}
    graph = fitted("mqbench_academic", wide, OFF).graph
    alone = {"rounding_guard": False}
    steps = [
        Settings(correct_bias=True),
        Settings(rounding="nearest", correct_weights=None, **alone),
        Settings(rounding="gptq", correct_weights=None, **alone),
        Settings(rounding="gptq", **alone),
    ]
    found = [loss(fitted("mqbench_academic", wide, s), graph) for s in steps]
    assert found[0] > found[1] > found[2] > found[3]


def test_grids_of_few_bits_serve_the_channels_that_the_outputs_depend_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        model[0].weight *= torch.tensor([3.0, 0.01])  # the second input, ten times as large, hardly counts
    data = [torch.randn(64, 2) * torch.tensor([1.0, 10.0]) for _ in range(2)]
    few = {"*": {"bits": 8, "activation_bits": 4}}
    plain = chipfit.quantize(model, data, "mqbench_academic", overrides=few, settings=OFF, progress=False)
    placed = with_weighted_ranges(plain.graph, plain.plan, plain.stats, [[x] for x in data])
    (name,) = plain.graph.inputs
    assert placed[name].scale < 0.9 * plain.plan[name].scale
    reference = Reference(plain.graph, [[torch.randn(256, 2) * torch.tensor([1.0, 10.0])]])
    assert reference.loss(plain.graph, placed) < reference.loss(plain.graph, plain.plan)
    for own in (True, False):
        settings = Settings(rounding="gptq", rounding_guard=False, effect_ranges=own)
        done = chipfit.quantize(model, data, "mqbench_academic", overrides=few, settings=settings, progress=False)
        assert torch.equal(done.plan[name].scale, (placed if own else plain.plan)[name].scale)


def test_grids_of_many_bits_and_those_that_others_share_stay():
    for platform, bits in (("mqbench_academic", 8), ("nnie", None)):
        plain = fitted(platform, {"*": {"activation_bits": bits}} if bits else None, OFF)
        assert with_weighted_ranges(plain.graph, plain.plan, plain.stats, [[DATA[0]]]) is plain.plan


@pytest.mark.parametrize(
    "platform, four", [("tflite_int8", ("stem", "body", "depth")), ("ort_cpu", ()), ("tengine", ()), ("ethos_u", ())]
)
def test_the_device_computes_what_the_walk_decided(platform, four):
    pytest.importorskip("ai_edge_litert")
    result = fitted(platform, {name: {"bits": 4} for name in four} or None, GPTQ, Net(transposed=False).eval())
    assert not any("moved to satisfy" in n for n in result.plan.rewrites)
    seen = result.verify([NEW[:32]])
    assert seen.exact, seen.summary()


@pytest.mark.parametrize("platform", ["tflite_int8", "tinyengine"])
def test_weights_lie_on_their_grids_and_scales_obey_the_platform(platform):
    result = fitted(platform, None, GPTQ)
    rounded = [t for t in result.plan.tensors.values() if "gptq over" in t.origin]
    assert len(rounded) >= 4
    for t in rounded:
        torch.testing.assert_close(t.stored.round(result.graph.weights[t.name]), result.graph.weights[t.name])
        for limit in (x for x in result.plan.limits if t.name in dict(x.terms)):
            total = sum(e * torch.log2(result.plan[n].scale.double()) for n, e in limit.terms)
            assert bool((total >= limit.low).all() and (total <= limit.high).all())


def test_the_same_seed_gives_the_same_plan_and_saving_keeps_it(tmp_path):
    first, second = (fitted("ort_cpu", None, GPTQ) for _ in range(2))
    for name, t in first.plan.tensors.items():
        if t.quantized:
            assert t.stored.same_numbers(second.plan[name])
    first.save(tmp_path / "result")
    again = chipfit.load(tmp_path / "result")
    assert all(torch.equal(again.graph.weights[k], w) for k, w in first.graph.weights.items())


def test_the_guard_keeps_the_plain_plan_where_it_is_better_and_says_so(monkeypatch):
    import chipfit.rounding.compare as step

    losses = iter((0.1, 0.2))
    monkeypatch.setattr(step.Reference, "loss", lambda *_: next(losses))
    plain, kept = fitted("ort_cpu"), fitted("ort_cpu", None, GPTQ)
    assert all(t.stored.same_numbers(kept.plan[n]) for n, t in plain.plan.tensors.items() if t.quantized)
    assert any("after all" in n and "0.2, 0.1 without" in n for n in kept.plan.rewrites)


def test_fewer_images_than_weights_are_carried_by_the_ridge_and_said():
    result = chipfit.quantize(
        Net().eval(), [DATA[0][:2]], "ort_cpu", settings=Settings(rounding="gptq", rounding_guard=False), progress=False
    )
    assert any("'head' is fitted to 2 positions for 8 weights" in n for n in result.plan.rewrites)
    assert all(bool(torch.isfinite(w).all()) for w in result.graph.weights.values() if w.is_floating_point())
    plain = fitted("ort_cpu")
    assert loss(result, plain.graph) < 20 * loss(plain, plain.graph)


def test_shared_weights_layers_without_bias_and_dead_inputs_are_carried():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.twice, self.out = nn.Linear(6, 6, bias=False), nn.Linear(6, 3, bias=False)

        def forward(self, x):
            return self.out(torch.relu(self.twice(torch.relu(self.twice(x * torch.tensor([1.0, 1, 1, 0, 0, 0]))))))

    data = [torch.randn(64, 6, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    wide = {"*": {"bits": 4, "activation_bits": 8}}
    result = chipfit.quantize(
        Odd().eval(),
        data,
        "mqbench_academic",
        overrides=wide,
        settings=Settings(rounding="gptq", rounding_guard=False),
        progress=False,
    )
    assert any("'twice.weight' is read by several operators" in n for n in result.plan.rewrites)
    assert all(bool(torch.isfinite(w).all()) for w in result.graph.weights.values() if w.is_floating_point())


def test_sequences_are_rounded_token_by_token():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(x)))

    data = [torch.randn(32, 12, 8, generator=torch.Generator().manual_seed(k)) for k in range(4)]
    wide = {"*": {"bits": 3, "activation_bits": 8}}
    plain, better = (
        chipfit.quantize(Tokens().eval(), data, "mqbench_academic", overrides=wide, settings=s, progress=False)
        for s in (OFF, GPTQ)
    )
    new = [[torch.randn(64, 12, 8, generator=torch.Generator().manual_seed(9))]]
    reference = Reference(plain.graph, new)
    assert reference.loss(better.graph, better.plan) < 0.5 * reference.loss(plain.graph, plain.plan)


def test_values_beyond_the_limit_lie_on_disk_and_change_nothing():
    result = fitted("ort_cpu")
    batches = [[x] for x in DATA[:2]]
    held, spilled = (reconstruct(result.graph, result.plan, batches, memory=m) for m in (1 << 30, 1 << 10))
    assert held.spilled == 0 < spilled.spilled
    assert all(torch.equal(held.graph.weights[k], w) for k, w in spilled.graph.weights.items())
    budget = MemoryLimit(16)  # in half precision, four numbers take 8 bytes
    stream = Stream(budget)
    for _ in range(3):
        stream.append(torch.arange(4.0))
    assert budget.used == 16 and budget.spilled == 8 and torch.equal(stream[2], torch.arange(4.0))
    stream.append(torch.arange(4))  # indices are kept as they are, and count for nothing
    stream.free()
    assert budget.used == 0
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    again = MemoryLimit(0).keep(image)
    assert torch.equal(again, image) and again.stride() == image.stride() and again.data_ptr() != image.data_ptr()


def test_a_part_of_a_value_is_the_same_whether_it_is_picked_before_or_after_it_is_decoded():
    x, zeros = torch.linspace(-3, 5, 24).view(2, 3, 4), torch.zeros(3, dtype=torch.int32)
    grid, scale = Grid(bits=8, qmin=0, qmax=255, zero="any"), torch.tensor([0.01, 0.02, 0.03])
    one = Stored(format="a", grid=grid, scale=scale[1], zero_point=zeros[1] + 90)
    each = Stored(format="a", grid=grid, scale=scale, zero_point=zeros + 90, axis=1)
    table = Stored(format="a", grid=replace(grid, table=(-2.0, 3.0)), scale=scale[1], zero_point=zeros[1])  # without 0
    for stored in (None, one, each, table):
        stream = Stream(MemoryLimit(), stored)
        stream.append(x)

        def pick(x, zero):
            return torch.cat([x.flatten(1)[:, 3:9], x.new_full((2, 1), zero)], 1)

        assert torch.equal(stream.part(0, pick), pick(stream[0], 0.0))


def test_small_values_are_kept_as_they_are():
    for size, bytes_of in ((1 << 10, 4), ((1 << 23) + 1, 2)):
        stream = Stream(MemoryLimit(), expected=2)
        stream.append(torch.zeros(size))
        assert stream.budget.used == size * bytes_of


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="'rounding' and 'correct_bias'"):
        fitted("ort_cpu", None, Settings(rounding="gptq", correct_bias=True))
    with pytest.raises(UnknownNameError):
        Settings(roundings="gptq")


def weights(result):
    return {name: t.origin.split()[0] for name, t in result.plan.tensors.items() if t.role == "weight" and t.quantized}


@pytest.mark.parametrize(
    "bits, options, walks",
    [
        (8, {}, False),
        (6, {}, False),
        (5, {}, True),
        (4, {}, True),
        (4, {"settings": OFF}, False),
        (4, {"settings": Settings(correct_bias=True)}, False),
        (4, {"weight_rule": "no_clipping"}, False),
        (4, {"rule": "no_clipping"}, True),
    ],
    ids=str,
)
def test_few_bits_are_rounded_by_what_they_do_unless_the_user_chose_otherwise(bits, options, walks):
    result = fitted("mqbench_academic", {"*": {"bits": bits, "activation_bits": 8}}, **options)
    assert (set(weights(result).values()) == {"gptq"}) is walks
    if walks and "rule" not in options:
        asked = fitted("mqbench_academic", {"*": {"bits": bits, "activation_bits": 8}}, GPTQ)
        assert {k: t.scale.tolist() for k, t in asked.plan.tensors.items() if t.quantized} == {
            k: t.scale.tolist() for k, t in result.plan.tensors.items() if t.quantized
        }


def test_an_edit_rounds_anew_with_the_data_of_before(tmp_path):
    four, other = ({"*": {"bits": b, "activation_bits": 8}, "head": {"bits": 8, "activation_bits": 8}} for b in (4, 3))
    result = fitted("mqbench_academic", four)
    edited, again = result.edit(other), fitted("mqbench_academic", other)
    assert set(weights(edited).values()) == {"gptq"}
    assert torch.equal(edited.graph.weights["stem.weight"], again.graph.weights["stem.weight"])
    eight = {"*": {"bits": 8, "activation_bits": 8}}
    assert "gptq" not in weights(result.edit(eight)).values()
    plain = fitted("mqbench_academic", eight)
    plain.save(tmp_path / "plain")
    assert "gptq" not in weights(chipfit.load(tmp_path / "plain").edit(four)).values()
    result.save(tmp_path / "rounded")
    with pytest.raises(PlanError, match="data are not here"):
        chipfit.load(tmp_path / "rounded").edit(other)


def test_another_seed_sees_other_positions():
    four = {"*": {"bits": 4, "activation_bits": 8}}
    few = Settings(rounding_samples=64)
    found = [fitted("mqbench_academic", four, few, seed=seed).graph.weights["stem.bias"] for seed in (0, 0, 1)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_scale_with_rules_beyond_bounds_stays_and_the_codes_are_fitted_to_it():
    plain = fitted("mqbench_academic", {"*": {"bits": 4, "activation_bits": 8}}, OFF)
    plan = replace(plain.plan, sums=(("body.weight", 1e9),))
    done = reconstruct(plain.graph, plan, [[x] for x in DATA])
    assert torch.equal(done.tensors["body.weight"].scale, plan.tensors["body.weight"].scale)
    assert not torch.equal(done.tensors["stem.weight"].scale, plan.tensors["stem.weight"].scale)
    stored, w = plan["body.weight"], done.graph.weights["body.weight"]
    assert torch.allclose(stored.round(w), w, atol=1e-6)
    assert not torch.equal(stored.quantize(w), stored.quantize(plain.graph.weights["body.weight"].detach()))


def test_batches_go_through_a_node_in_chunks(monkeypatch):
    """What memory holds for one node does not grow with the batches that the user happens to give."""
    sizes: list[int] = []
    plain = fitted("mqbench_academic", {"*": {"bits": 4, "activation_bits": 8}}, OFF)
    monkeypatch.setattr(Stream, "append", lambda self, x, inner=Stream.append: (sizes.append(len(x)), inner(self, x)))
    reconstruct(plain.graph, plain.plan, [[torch.cat(DATA)[:100]]])
    assert max(sizes) == 32 and min(sizes) == 4


FOUR = {"*": {"bits": 4, "activation_bits": 4}}


@pytest.fixture(scope="module")
def two_layers():
    """A network of 4 bits on 40 numbers, and its graph in float."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(40, 6)
    return chipfit.quantize(net, [x], "mqbench_academic", overrides=FOUR, settings=OFF, progress=False), x


@pytest.mark.parametrize(
    "how, said",
    [(GptqSettings(), "gptq over 40 positions"), (Nearest(ridge=None), "nearest over 40 positions")],
)
def test_a_walk_says_over_what_it_rounded_and_nothing_where_all_is_well(two_layers, how, said):
    result, x = two_layers
    walked = reconstruct(result.graph, result.plan, [[x]], how)
    assert walked.notes == [] and walked.spilled == 0
    weights = [n.operand("w") for n in result.graph.nodes if n.op == "Linear"]
    assert set(walked.tensors) == set(weights) and {walked.tensors[w].origin for w in weights} == {said}
    for w in weights:
        stored = walked.tensors[w].stored
        torch.testing.assert_close(stored.round(walked.graph.weights[w]), walked.graph.weights[w])


def test_the_grid_of_class_scores_is_searched_where_it_was_asked_for(two_layers):
    result, x = two_layers
    (scores,), hidden = result.graph.outputs, result.graph.nodes[0].output
    grid = Grid(bits=4, qmin=0, qmax=15, zero="any")
    stored = Stored(format="a4", grid=grid, scale=torch.tensor(9.0), zero_point=torch.tensor(8, dtype=torch.int32))
    open_ones = {n: TensorPlan(name=n, role="activation", stored=stored) for n in (scores, hidden)}
    plan = replace(result.plan, tensors={**result.plan.tensors, **open_ones})
    found = reconstruct(result.graph, plan, [[x]], GptqSettings(), [scores, hidden]).tensors
    assert found[scores].origin == "least divergence of the class probabilities" and float(found[scores].scale) < 9
    assert hidden not in found  # it is no output
    assert scores not in reconstruct(result.graph, plan, [[x]], GptqSettings(), ["another"]).tensors
    assert (
        scores not in reconstruct(result.graph, replace(plan, zeros=(scores,)), [[x]], GptqSettings(), [scores]).tensors
    )


def test_moments_that_cannot_be_inverted_are_said(two_layers, monkeypatch):
    result, x = two_layers
    monkeypatch.setattr(walking.gptq, "error_feedback", lambda *_: None)
    notes = reconstruct(result.graph, result.plan, [[x]]).notes
    assert len(notes) == 2 and all("its moments are singular" in n for n in notes)


@pytest.mark.parametrize("images, warned", [(5, 2), (6, 1), (7, 1), (8, 0)])
def test_fewer_positions_than_weights_are_said(two_layers, images, warned):
    result, x = two_layers
    notes = reconstruct(result.graph, result.plan, [[x[:images]]]).notes
    assert sum("more images make it better" in n for n in notes) == warned


def test_no_batch_is_refused(two_layers):
    result, _ = two_layers
    with pytest.raises(DataError, match="no calibration data"):
        reconstruct(result.graph, result.plan, [])


# ---------------------------------------------------------------- what is summed for an operator, by hand

A = torch.tensor([[0.5, -1.0], [2.0, 0.25]])
B = torch.tensor([0.25, -0.5])
IMAGES = torch.randn(40, 2, generator=torch.Generator().manual_seed(5)).half().float()  # exact in half precision
PLAIN = Nearest(ridge=None)


def in_codes(name, scale=0.5, bits=3, role="activation", axis=None, **grid):
    g = Grid(**{"bits": bits, "qmin": -(1 << bits - 1), "qmax": (1 << bits - 1) - 1, **grid})
    s = torch.tensor(scale)
    stored = Stored(format="f", grid=g, scale=s, zero_point=torch.zeros_like(s, dtype=torch.int32), axis=axis)
    return TensorPlan(name=name, role=role, stored=stored)


def linear(name, reads, weight="w", bias="b"):
    return Node(name, "Linear", (reads, weight, bias), (name,))


def op(kind, name, *reads):
    return Node(name, kind, reads, (name,))


def network(nodes, outputs=None, inputs=("x",), **weights):
    values = {n: Value(n, (None, 2)) for n in (*inputs, *(n.name for n in nodes))}
    table = {"w": A.clone(), "b": B.clone(), "c": torch.tensor([0.3, -0.7]), **weights}
    return Graph(list(nodes), list(inputs), list(outputs or [nodes[-1].name]), values, table)


def planned(*tensors, edges=(), **more):
    kept = {t.name: t for t in (in_codes("w", 0.25, 6, "weight"), *tensors)}
    return Plan(tensors=kept, float_edges=frozenset(edges), **more)


def sums(monkeypatch, graph, plan, how=PLAIN, inputs=(IMAGES,)):
    """What each operator reads, and what it should give, as [images, numbers]; and what the walk decided."""
    seen, old = {}, Moments.add

    def add(self, x, t):
        seen.setdefault(id(self), (self, [], []))[1].append(x[0].t())
        seen[id(self)][2].append(t[0].t())
        old(self, x, t)

    monkeypatch.setattr(Moments, "add", add)
    walked = reconstruct(graph, plan, [list(inputs)], how)
    return [(torch.cat(x), torch.cat(t)) for _, x, t in seen.values()], walked


def nearest(x, scale=0.5, bits=3):
    return (x / scale).round().clamp(-(1 << bits - 1), (1 << bits - 1) - 1) * scale


LATER = (linear("y", "x"), op("Relu", "r", "x"), op("Add", "z", "y", "r"))
EARLIER = (op("Relu", "r", "x"), linear("y", "x"), op("Add", "z", "y", "r"))


@pytest.mark.parametrize(
    "nodes, outputs, lost",
    [
        ((linear("y", "x"), op("Add", "z", "y", "x")), "z", lambda x: x - nearest(x)),
        ((linear("y", "x"), op("Add", "z", "x", "y")), "z", lambda x: x - nearest(x)),
        (EARLIER, "z", lambda x: x.relu() - nearest(x).relu()),
        (LATER, "z", None),  # it is not there yet
        ((linear("y", "x"), op("Add", "z", "y", "x")), "zy", None),  # others read what it gives
        ((linear("y", "x"), op("Add", "z", "y", "x"), op("Add", "v", "y", "z")), "v", None),
        ((linear("y", "x"), op("Mul", "z", "y", "x")), "z", None),
        ((linear("y", "x"), op("Add", "z", "y", "y")), "z", None),
        ((linear("y", "x"), op("Add", "z", "y", "c")), "z", None),
        ((linear("y", "x"),), "y", None),
    ],
)  # fmt: skip
def test_an_operator_before_an_addition_repairs_what_the_other_operand_has_lost(nodes, outputs, lost, monkeypatch):
    graph, plan = network(nodes, outputs), planned(in_codes("x"))
    ((x, t),), _ = sums(monkeypatch, graph, plan)
    y = IMAGES @ A.t() + B
    torch.testing.assert_close(x, nearest(IMAGES))
    torch.testing.assert_close(t, y + lost(IMAGES) if lost else y)
    ((_, t),), _ = sums(monkeypatch, graph, plan, replace(PLAIN, residual=False))
    torch.testing.assert_close(t, y)


def test_an_operand_of_another_shape_is_not_repaired(monkeypatch):
    graph = network((linear("y", "x"), op("Add", "z", "y", "s")), inputs=("x", "s"))
    ((_, t),), _ = sums(monkeypatch, graph, planned(in_codes("x"), in_codes("s")), inputs=(IMAGES, IMAGES[:, :1]))
    torch.testing.assert_close(t, IMAGES @ A.t() + B)


@pytest.mark.parametrize("axis, scale", [(None, 0.5), (1, [0.5, 0.5])])
def test_a_reader_of_floats_and_one_of_codes_get_what_each_reads(axis, scale, monkeypatch):
    nodes = (linear("y", "x"), linear("v", "x", "w2", None), op("Add", "z", "y", "x"))
    more = (in_codes("w2", 0.25, 6, "weight"), in_codes("x", scale, axis=axis))
    graph = network(nodes, "vz", w2=A.clone())
    y, v = IMAGES @ A.t() + B, IMAGES @ A.t()
    (of_y, of_v), _ = sums(monkeypatch, graph, planned(*more, edges=[("x", "v")]))
    torch.testing.assert_close(of_y, (nearest(IMAGES), y + IMAGES - nearest(IMAGES)))
    torch.testing.assert_close(of_v, (IMAGES, v))
    (of_y, of_v), _ = sums(monkeypatch, graph, planned(*more, edges=[("x", "z")]))
    torch.testing.assert_close(of_y, (nearest(IMAGES), y))  # an addition that reads floats loses nothing
    torch.testing.assert_close(of_v, (nearest(IMAGES), v))


def test_what_comes_behind_reads_rounded_weights_and_constants(monkeypatch):
    nodes = (linear("y", "x"), op("Add", "s", "y", "c"), linear("v", "s", "w2", None))
    of_c = {"weight": nearest(torch.tensor([0.3, -0.7])), "bias": torch.tensor([0.3, -0.7])}
    for role, c in of_c.items():
        plan = planned(in_codes("x"), in_codes("w2", 0.25, 6, "weight"), in_codes("c", role=role))
        (_, (x, t)), walked = sums(monkeypatch, network(nodes, w2=A.clone()), plan)
        q = nearest(A, float(walked.tensors["w"].scale), 6)
        torch.testing.assert_close(walked.graph.weights["w"], q)
        torch.testing.assert_close(x, nearest(IMAGES) @ q.t() + walked.graph.weights["b"] + c)
        torch.testing.assert_close(t, (IMAGES @ A.t() + B + torch.tensor([0.3, -0.7])) @ A.t())


@pytest.mark.parametrize("ridge", [None, 0.1])
def test_a_bias_takes_the_means_of_what_rounding_changes(ridge, monkeypatch):
    graph, plan = network((linear("y", "x"),)), planned(in_codes("x"))
    y = IMAGES @ A.t() + B
    _, walked = sums(monkeypatch, graph, plan, GptqSettings(ridge=ridge))
    q = walked.graph.weights["w"]
    torch.testing.assert_close(walked.graph.weights["b"], y.mean(0) - q @ nearest(IMAGES).mean(0))
    _, walked = sums(monkeypatch, network((linear("y", "x", bias=None),)), plan, GptqSettings(ridge=ridge))
    assert walked.graph.nodes[0].bias is None and graph.weights["b"].tolist() == B.tolist()


@pytest.mark.parametrize("samples, most", [(100, 3), (80, 2), (81, 3), (1, 1), (40, 1), (41, 2), (0, 1)])
def test_positions_are_as_many_as_asked_for_over_all_images_and_twice_the_weights(samples, most, monkeypatch):
    seen, old = [], walking.positions
    monkeypatch.setattr(walking, "positions", lambda node, y, n, rng: seen.append(n) or old(node, y, n, rng))
    sums(monkeypatch, network((linear("y", "x"),)), planned(in_codes("x")), replace(PLAIN, samples=samples))
    assert seen == [most] * 2  # of 40 images, in two chunks
    seen.clear()
    wide = network((linear("y", "x"),), w=torch.ones(2, 21))
    sums(monkeypatch, wide, planned(in_codes("x")), replace(PLAIN, samples=samples), (torch.randn(40, 21),))
    assert seen == [max(most, 2)] * 2  # 42 at least


def test_images_are_those_of_the_longest_input_and_a_single_number_is_none(monkeypatch):
    seen, old = [], walking.positions
    monkeypatch.setattr(walking, "positions", lambda node, y, n, rng: seen.append(n) or old(node, y, n, rng))
    nodes, plan = (linear("y", "x"), op("Mul", "z", "y", "s")), planned(in_codes("x"))
    for s in (torch.tensor(2.0), torch.ones(1, 2)):
        sums(monkeypatch, network(nodes, inputs=("x", "s")), plan, replace(PLAIN, samples=80), (IMAGES, s))
    assert seen == [2, 2]
    with pytest.raises(DataError, match="no calibration data"):
        reconstruct(network((op("Relu", "y", "x"),)), Plan(), [[torch.tensor(1.0)]])


def test_values_on_their_way_are_as_precise_as_their_number_allows(monkeypatch):
    """Of inputs nobody knows how many will come; what follows is known to be few."""
    seen, old = [], Stream.append
    monkeypatch.setattr(Stream, "append", lambda self, x: seen.append((self.expected, self.stored)) or old(self, x))
    plan = planned(in_codes("x"), in_codes("y"))
    sums(monkeypatch, network((linear("y", "x"), op("Relu", "z", "y"))), plan)
    x, y = plan["x"], plan["y"]
    assert seen == [(None, None), (None, x)] * 2 + [(2, None)] * 2 + [(2, y)] * 2 + [(2, None)] * 4


def why(nodes, plan, **more):
    graph = network(nodes, **more)
    return walking.why_not_fitted(graph, plan, Readers(graph), graph.nodes[0])


def test_why_a_weight_is_not_fitted():
    one, plan = (linear("y", "x"),), planned()
    assert why(one, plan) is None
    assert why((op("Add", "y", "x", "x"),), plan) == ""
    assert why((linear("y", "x", "x"),), plan) == ""  # a product of two values
    assert why(one, planned(edges=[("w", "y")])) == "" and why(one, planned(edges=[("w", "z"), ("x", "y")])) is None
    assert why(one, Plan()) == ""
    assert why(one, Plan(tensors={"w": in_codes("w", rounding="floor")})) == "the chip rounds weights by floor"
    table = in_codes("w", rounding="floor", kind="lut", table=(-1.0, 0.0, 1.0))
    assert why(one, Plan(tensors={"w": table})) is None
    assert why((linear("y", "c"),), plan) == "it reads no data"
    assert why((*one, linear("z", "x")), plan) == "'w' is read by several operators"
    assert why((*one, linear("z", "x", "w2")), plan, w2=A) == "'b' is read by several operators"
    assert why(one, plan, outputs="yw") == "'w' is an output of the model"


def test_the_network_that_was_given_stays_as_it_is(monkeypatch):
    graph, plan = network((linear("y", "x"),)), planned(in_codes("x"))
    _, walked = sums(monkeypatch, graph, plan, GptqSettings())
    assert torch.equal(graph.weights["w"], A) and torch.equal(graph.weights["b"], B)
    assert float(plan["w"].scale) == 0.25 and float(walked.tensors["w"].scale) != 0.25
    assert set(walked.tensors) == {"w"} and walked.spilled == 0


@pytest.mark.parametrize(
    "nodes, outputs, rules, placed",
    [
        ((linear("y", "x"),), "y", {}, {"y"}),
        ((linear("y", "x"), op("Relu", "z", "y")), "yz", {}, {"z"}),  # codes of the first are read
        ((linear("y", "x"), op("Relu", "z", "y")), "z", {}, {"z"}),
        ((linear("y", "x"),), "y", {"fixed": ("y",)}, set()),
        ((linear("y", "x"),), "y", {"zeros": ("y",)}, set()),
        ((linear("y", "x"),), "y", {"ties": (("x", "y"),)}, set()),
    ],
)
def test_grids_of_scores_are_searched_where_nothing_reads_them_and_no_rule_says_them(nodes, outputs, rules, placed):
    scores = [in_codes(n, 9.0, 4, qmin=0, qmax=15, zero="any") for n in "yz"]
    walked = reconstruct(
        network(nodes, outputs), planned(in_codes("x"), *scores, **rules), [[IMAGES[:20]]], PLAIN, ["y", "z"]
    )
    assert set(walked.tensors) - {"w"} == placed
    assert all(walked.tensors[n].origin == "least divergence of the class probabilities" for n in placed)


@pytest.mark.parametrize("after, fitted", [(0, []), (1, ["0.weight"])])
def test_ctrl_c_ends_the_walk_with_what_was_fitted(after, fitted, two_layers, monkeypatch):
    result, x = two_layers
    old, calls = walking.SequentialReconstruction.fit, iter(range(9))

    def pressed(*args):
        if next(calls) == after:
            raise KeyboardInterrupt
        return old(*args)

    monkeypatch.setattr(walking.SequentialReconstruction, "fit", pressed)
    walked = reconstruct(result.graph, result.plan, [[x]])
    assert list(walked.tensors) == fitted and next(calls) == after + 1
    assert walked.notes == [f"warning: interrupted: '{2 * after}' and what follows it take their nearest codes"]
    assert torch.equal(walked.graph.weights["2.weight"], result.graph.weights["2.weight"])


@pytest.mark.parametrize("scale, axis", [(0.5, None), ([0.5, 0.25, 1.0], 1)])
def test_positions_of_a_value_that_others_read_in_float_are_rounded_as_they_lie(scale, axis, monkeypatch):
    x = torch.randn(40, 3, 2, generator=torch.Generator().manual_seed(6)).half().float()
    graph = network((linear("y", "x"), op("Relu", "r", "x")), "yr")
    plan = planned(in_codes("x", scale, axis=axis), edges=[("x", "r")])
    ((found, t),), _ = sums(monkeypatch, graph, plan, inputs=(x,))
    s = torch.tensor(scale).view(1, -1, 1)
    torch.testing.assert_close(found, ((x / s).round().clamp(-4, 3) * s).reshape(-1, 2))
    torch.testing.assert_close(t, (x @ A.t() + B).reshape(-1, 2))


def test_values_that_nothing_reads_any_more_are_let_go(monkeypatch):
    held, old = [], walking.SequentialReconstruction.step

    def step(self, *args):
        held.append((set(self.floats), set(self.quantized), self.memory.used))
        return old(self, *args)

    monkeypatch.setattr(walking.SequentialReconstruction, "step", step)
    nodes = (linear("y", "x"), op("Relu", "z", "y"), op("Add", "v", "z", "z"))
    reconstruct(network(nodes, inputs=("x", "s")), planned(), [[IMAGES, IMAGES]], PLAIN)
    # of 80 numbers in each stream, inputs in half precision: the second one is read by nothing
    assert [(a, b) for a, b, _ in held] == [({"x", "s"},) * 2, ({"s", "y"},) * 2, ({"s", "z"},) * 2]
    assert [used for *_, used in held] == [2 * 2 * 160, 2 * (160 + 320), 2 * (160 + 320)]
