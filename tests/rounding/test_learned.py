"""Learned rounding; (n) is the number of the assertion in the list that users of MCT know."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from chipfit import Settings
from chipfit.engine.run import run
from chipfit.rounding.adaround import output_error
from chipfit.rounding.compare import QuantizedRun, Reference, run_quantized
from chipfit.rounding.methods import learned
from chipfit.rounding.methods.learned import SCOPES, BlockReconstruction, Learned, network_blocks
from tests.accelerators import moved
from tests.build import NEAREST, graph_of, mlp, model_of, quantized, randn


def net():
    torch.manual_seed(0)
    layers = {"stem": nn.Conv2d(3, 8, 3), "a": nn.Conv2d(8, 8, 3, padding=1), "b": nn.Conv2d(8, 8, 3, padding=1)}
    layers |= {"depth": nn.Conv2d(8, 8, 3, groups=8), "up": nn.ConvTranspose2d(8, 4, 2), "head": nn.Linear(64, 4)}

    def forward(m, x):
        x = torch.relu(m.stem(x))
        x = torch.relu(m.b(torch.relu(m.a(x))) + x)
        return m.head(torch.relu(m.up(m.depth(x))).flatten(1)[:, :64])

    return model_of(forward, **layers)


DATA = list(randn(64, 3, 7, 7, seed=1).split(32))
NEW = randn(128, 3, 7, 7, seed=2)
THREE = {"*": {"bits": 3, "activation_bits": 8}}
FOUR = {"*": {"bits": 4, "activation_bits": 4}}


def fitted(platform="mqbench_academic", overrides=THREE, **settings):
    chosen = {"rounding": "off", "repairs": "off", **settings}
    return quantized(net(), DATA, platform, overrides=overrides, settings=Settings(**chosen))


plain_result = functools.cache(fitted)


@torch.no_grad()
def error(result) -> float:
    """The squared error of the outputs on new images, as a share of their energy."""
    (want,), (got,) = (
        run(result.decision.graph, [NEW]).values(),
        run_quantized(result.graph, result.plan, [NEW]).values(),
    )
    return float((got - want).square().sum() / want.square().sum())


def same_weights(a, b):
    return all(torch.equal(w, b.weights[k]) for k, w in a.weights.items())


def learn_rounding(graph, start, plan, batches, method):
    return BlockReconstruction(graph, start, plan, method, seed=0).run(batches)


# ---------------------------------------------------------------- whole networks


@pytest.mark.parametrize("scope", SCOPES)
def test_38_no_block_ends_worse_and_the_float_network_stays(scope, monkeypatch):
    plain, seen, old = plain_result(), [], BlockReconstruction.error
    before = {k: w.clone() for k, w in plain.graph.weights.items()}
    given = plain.graph, plain.graph, plain.plan, [[x] for x in DATA]
    with monkeypatch.context() as m:
        m.setattr(BlockReconstruction, "learn", lambda *_: None)
        same, notes = learn_rounding(*given, Learned(scope=scope))
    assert "the codes of 0 of" in notes[-1] and same_weights(same, plain.graph)
    monkeypatch.setattr(BlockReconstruction, "error", lambda *a: seen.append(old(*a)) or seen[-1])
    out, notes = learn_rounding(*given, Learned(scope=scope, steps=25))
    assert all(torch.equal(w, plain.graph.weights[k]) for k, w in before.items())
    better = [after < b for b, after in zip(seen[::2], seen[1::2], strict=True)]
    assert f"the codes of {sum(better)} of {len(better)} units" in notes[-1]
    changed = [name for name, w in out.weights.items() if not torch.equal(w, before[name])]
    assert any(better) == bool(changed) and (any(better) or scope == "network")
    for name in changed:
        if plain.plan.quantized(name) and name.endswith("weight"):
            torch.testing.assert_close(plain.plan[name].round(out.weights[name]), out.weights[name])


@pytest.mark.parametrize("scope", ["layer", "block"])
def test_new_images_lose_less_than_by_rounding_to_the_nearest(scope):
    plain, result = plain_result(), fitted(reconstruct=scope, reconstruct_steps=100)
    assert error(result) < 0.8 * error(plain)
    assert any("learned codes are kept" in n for n in result.plan.rewrites)
    assert all(t.stored.same_numbers(plain.plan[n]) for n, t in result.plan.tensors.items() if t.quantized)


@pytest.mark.parametrize("more", [{"reconstruct_float": 0.5}, {"reconstruct_fisher": True}, {"rounding": "gptq"}])
def test_every_way_of_learning_ends_no_worse_than_it_began_and_alike_each_time(more):
    start = {k: v for k, v in more.items() if k == "rounding"}
    first, second = (fitted(reconstruct="block", reconstruct_steps=8, reconstruct_anneal=True, **more) for _ in "12")
    assert same_weights(first.graph, second.graph)
    reference = Reference(plain_result().graph, [[DATA[-1][24:]]])  # the held-out eighth of the images
    before = fitted(**start) if start else plain_result()
    assert reference.loss(first.graph, first.plan) <= reference.loss(before.graph, before.plan)


def test_weights_that_do_not_move_do_not_pass_for_learned():
    """The control: with a rate of nearly 0 new images lose as much as before."""
    blind = fitted(reconstruct="layer", reconstruct_steps=10, reconstruct_rate=1e-9)
    assert error(blind) > 0.9 * error(plain_result())


@pytest.mark.parametrize("platform", ["tflite_int8", "ort_cpu", "imx500", "nnie"])
def test_weights_lie_on_the_grids_of_every_platform_and_the_device_computes_what_was_learned(platform):
    result = fitted(platform, None, reconstruct="block", reconstruct_steps=4, rounding_guard=False)
    for t in (t for t in result.plan.tensors.values() if "learned by block" in t.origin):
        torch.testing.assert_close(t.stored.round(result.graph.weights[t.name]), result.graph.weights[t.name])
    if platform == "ort_cpu":
        pytest.importorskip("onnxruntime")
        assert result.verify([NEW[:32]]).exact


# ---------------------------------------------------------------- parts of a network


def graph(nodes, inputs=("x",), outputs=None, ints=()):
    """Nodes as "name: operands", of which those that begin with L are linear."""
    parts = [line.split(": ") for line in nodes]
    texts = [f"{o} = Linear({i}, w{o}, -)" if o[0] == "L" else f"{o} = Add({', '.join(i.split())})" for o, i in parts]
    weights = {f"w{o}": torch.eye(2) for o, _ in parts if o[0] == "L"}
    return graph_of(*texts, weights=weights, inputs=inputs, outputs=outputs, dtypes=dict.fromkeys(ints, "int64"))


def firsts(g, scope):
    return [g.nodes[u.first].name for u in network_blocks(g, scope)]


def test_a_layer_is_a_linear_operator_with_what_follows_it():
    g = graph(["r: x x", "La: r", "b: La La", "c: b b", "Ld: c", "Le: Ld"])
    assert [(u.first, u.last, u.inputs, u.outputs) for u in network_blocks(g, "layer")] == [
        (0, 4, ["x"], ["c"]),
        (4, 5, ["c"], ["Ld"]),
        (5, 6, ["Ld"], ["Le"]),
    ]
    assert [(u.first, u.last) for u in network_blocks(g, "network")] == [(0, 6)]


def test_what_a_part_reads_and_gives_is_what_passes_its_ends():
    g = graph(["La: x", "Lb: La", "c: La Lb", "Ld: c", "e: Ld y x"], inputs=("x", "y"), outputs=["e", "Lb"])
    assert [(u.inputs, u.outputs) for u in network_blocks(g, "layer")] == [
        (["x"], ["La"]),
        (["La"], ["Lb", "c"]),
        (["c", "y", "x"], ["e"]),
    ]
    part = next(iter(network_blocks(g, "layer"))).subgraph(g, ["La", "x"])
    assert [n.name for n in part.nodes] == ["La"] and part.inputs == ["x"] and part.outputs == ["La", "x"]


def test_three_operators_in_a_row_make_a_block():
    row = [f"L{k}: {'x' if k == 0 else f'L{k - 1}'}" for k in range(8)]
    assert firsts(graph(row), "block") == ["L0", "L3", "L6"]
    assert firsts(graph(row[:3]), "block") == ["L0"] and firsts(graph(row[:4]), "block") == ["L0", "L3"]


def test_a_branch_is_a_block_of_its_own():
    """What lies between two values that alone connect the network: the sum, and what it is of."""
    around = ["La: x", "Lb: La", "Lc: Lb", "d: Lc La", "Le: d", "Lf: Le"]
    assert firsts(graph(around), "block") == ["La", "Lb", "Le"]
    one = ["La: x", "Lb: La", "c: Lb La", "Ld: c"]  # one operator beside the branch counts as one in a row
    assert firsts(graph(one), "block") == ["La"]
    first = ["La: x", "Lb: La", "c: Lb x", "Ld: c", "Le: Ld", "Lf: Le"]
    assert firsts(graph(first), "block") == ["La", "Ld"]
    last = ["L0: x", "La: L0", "Lb: La", "c: Lb L0"]
    assert firsts(graph(last), "block") == ["L0", "La"]


def test_only_floats_connect():
    """An integer that is alive beside the stream cuts nothing apart and holds nothing together."""
    g = graph(["La: x", "i: x x", "Lb: La", "Lc: Lb", "Ld: Lc", "e: Ld i"], ints=("i",))
    assert firsts(g, "block") == ["La", "Ld"]
    g = graph(["La: x", "Lb: La", "Lc: Lb", "Ld: Lc", "e: Ld i"], inputs=("x", "i"), ints=("i",))
    assert firsts(g, "block") == ["La", "Ld"]
    g = graph(["La: x", "Lb: La", "Lc: Lb", "Ld: Lc", "e: Ld i"], inputs=("x", "i"))
    assert firsts(g, "block") == ["La"]


# ---------------------------------------------------------------- a step of learning, by hand


@functools.cache
def small(platform="mqbench_academic"):
    """Two layers in a row on 40 numbers, in float and with a plan; two chunks of samples."""
    wide = FOUR if platform == "mqbench_academic" else None
    return quantized(mlp(6, 8, 4), randn(40, 6), platform, overrides=wide, settings=NEAREST)


def learn(platform="mqbench_academic", plan=(), **options):
    result = small(platform)
    method = Learned(**{"scope": "network", "steps": 2, **options})
    return learn_rounding(result.graph, result.graph, replace(result.plan, **dict(plan)), [[randn(40, 6)]], method)


def state(**options):
    result = small()
    return BlockReconstruction(result.graph, result.graph, result.plan, Learned(**options), seed=0)


@pytest.mark.parametrize("share, lost", [(0.0, 0.0), (1.0, 1.0), (0.25, 0.25)])
def test_39_as_many_values_stay_in_float_as_are_asked_for(share, lost):
    rounded, real = moved(torch.zeros(100_000)), moved(torch.ones(100_000))
    assert float(state().mixed(rounded, real, share).mean()) == pytest.approx(lost, abs=0.01)
    for x, other in ((torch.arange(9), torch.zeros(9)), (7, 8)):  # integers, and what is no tensor
        assert state().mixed(x, other, 1.0) is x


@pytest.mark.parametrize(
    "steps, anneal, shares",
    [(5, True, [0.8, 0.6, 0.4, 0.2, 0.0]), (2, True, [0.8, 0.0]), (1, True, [0.8]), (3, False, [0.8])],
)
def test_fewer_values_stay_in_float_from_step_to_step_where_asked(steps, anneal, shares, monkeypatch):
    seen = []
    monkeypatch.setattr(BlockReconstruction, "mixed", lambda self, x, other, share: seen.append((other, share)) or x)
    learn(steps=steps, floats=0.8, anneal=anneal)
    assert list(dict.fromkeys(round(s, 9) for other, s in seen if other is not None)) == shares


def test_only_values_stay_in_float_no_weights(monkeypatch):
    seen = []
    monkeypatch.setattr(BlockReconstruction, "mixed", lambda self, x, other, share: seen.append(tuple(x.shape)) or x)
    learn("ort_cpu", floats=0.5)
    assert set(seen) <= {(32, 6), (32, 8), (8, 6), (8, 8)} and len({width for _, width in seen}) == 2


def test_the_pull_sets_in_after_a_fifth_of_the_steps(monkeypatch):
    """Of 10 steps in the 3rd, with exponents of 20 - 18 k / 8, for both weights."""
    seen = []
    monkeypatch.setattr(learned, "regularizer", lambda h, e: seen.append((h.shape, round(e, 9))) or h.sum())
    learn(steps=10)
    assert seen == [(s, 20 - 18 * k / 8) for k in range(8) for s in ((8, 6), (4, 8))]


@pytest.fixture
def adam(monkeypatch):
    """What the optimizer does in each step: rates, gradients, and variables before the step, by group."""
    seen = []

    class Adam(torch.optim.Adam):
        def step(self, *args):
            groups = [group["params"] for group in self.param_groups]
            grads, before = ([[f(p) for p in g] for g in groups] for f in (lambda p: p.grad.clone(), torch.clone))
            seen.append(([group["lr"] for group in self.param_groups], grads, before))
            super().step(*args)

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    return seen


def test_biases_learn_a_hundred_times_slower_and_ever_slower(adam):
    learn(steps=4, rate=0.01)
    assert [rates[0] for rates, *_ in adam] == [0.01] * 4
    assert [rates[1] for rates, *_ in adam] == pytest.approx([1e-4, 0.75e-4, 0.5e-4, 0.25e-4])


@pytest.mark.parametrize("pull", [1.0, 4.0])
def test_the_pull_is_the_mean_over_all_weights_times_its_weight(pull, adam, monkeypatch):
    """With no error, and shares themselves for a regularizer, the slope is pull / 80 times that of the sigmoid."""
    monkeypatch.setattr(BlockReconstruction, "error", lambda *_: 1.0)
    monkeypatch.setattr(BlockReconstruction, "loss", lambda self, b, got, k: 0 * sum(y.sum() for y in got.values()))
    monkeypatch.setattr(learned, "regularizer", lambda h, e: h.sum())
    learn(pull=pull)
    (_, first, _), (_, second, (before, _)) = adam
    assert all(not g.any() for group in first for g in group)
    for v, g in zip(before, second[0], strict=True):
        sigmoid = torch.sigmoid(v)
        torch.testing.assert_close(g, pull / 80 * 1.2 * sigmoid * (1 - sigmoid))


def test_errors_count_as_a_share_of_what_they_were(adam, monkeypatch):
    for before in (1.0, 4.0):
        monkeypatch.setattr(BlockReconstruction, "error", lambda *_, before=before: before)
        learn(steps=1)
    once, quarter = ([g for group in grads for g in group] for _, grads, _ in adam)
    assert len(once) == 4 and all(g.any() for g in once)
    torch.testing.assert_close([g / 4 for g in once], quarter)


def test_biases_move_in_units_of_the_norm_of_their_weights(adam, monkeypatch):
    weights, given = small().graph.weights, []

    def run(graph, plan, inputs, weights=None, **more):
        given.extend([] if weights is None else [weights])
        return QuantizedRun(graph, plan, inputs, weights, **more)

    errors = iter((2.0, 1.0))
    monkeypatch.setattr(learned, "QuantizedRun", run)
    monkeypatch.setattr(BlockReconstruction, "error", lambda *_: next(errors))
    new, _ = learn(steps=3)
    assert all(not d.any() for d in adam[0][2][1])
    for k, shift in zip((0, 2), adam[1][2][1], strict=True):
        name, norm = f"{k}.bias", weights[f"{k}.weight"].norm(dim=1)
        shift, shifted = shift.cpu(), given[1][name].cpu()
        assert torch.equal(given[0][name].cpu(), weights[name]) and shift.any()
        torch.testing.assert_close(shifted, weights[name] + norm * shift)
        assert not torch.equal(new.weights[name], weights[name])


@pytest.mark.parametrize(
    "scope, errors, better, left, kept",
    [
        ("network", (2.0, 1.0), "1 of 1", "50%", []),
        ("network", (2.0, 2.0), "0 of 1", "100%", [0, 2]),
        ("layer", (10.0, 5.0, 10.0, 3.0), "2 of 2", "40%", []),
        ("layer", (10.0, 11.0, 10.0, 2.0), "1 of 2", "60%", [0]),
        ("network", (0.0,), "0 of 0", "0%", [0, 2]),
    ],
)
@pytest.mark.parametrize("biases", [True, False])
def test_a_block_keeps_what_it_learned_where_its_error_falls(scope, errors, better, left, kept, biases, monkeypatch):
    weights, given = small().graph.weights, iter(errors)
    monkeypatch.setattr(BlockReconstruction, "error", lambda *_: next(given))
    new, (note,) = learn(scope=scope, biases=biases)
    said = f"learned the codes of {better} units ({scope}), the others keep theirs"
    assert note == f"{said}: the error of their outputs falls to {left} on average" and next(given, None) is None
    for k in (0, 2):
        assert torch.equal(new.weights[f"{k}.weight"], weights[f"{k}.weight"]) is (k in kept)
        assert torch.equal(new.weights[f"{k}.bias"], weights[f"{k}.bias"]) is (k in kept or not biases)


def test_the_error_of_a_block_is_the_mean_of_its_chunks(monkeypatch):
    seen = []
    monkeypatch.setattr(learned, "output_error", lambda got, *_: seen.append(len(got)) or torch.tensor(seen[-1] * 1.0))
    monkeypatch.setattr(BlockReconstruction, "learn", lambda self, block, variables, before: seen.append(before))
    learn()
    assert seen == [32, 8, (32 + 8) / 2, 32, 8]  # before, and after


@pytest.mark.parametrize("scope, fisher", [("network", True), ("layer", True), ("block", True), ("network", False)])
def test_with_second_derivatives_a_network_is_watched_at_every_linear_operator(scope, fisher, monkeypatch):
    nodes, seen, weighed = small().graph.nodes, [], []

    def slopes(graph, inputs, wanted, besides, random, there):
        seen.append(set(wanted))
        return {}, {name: torch.full((len(inputs[0]), 2), 3.0) for name in wanted}

    def error_of(got, want, weight=None):
        weighed.append(weight)
        return output_error(got, want)

    monkeypatch.setattr(learned, "gradients", slopes)
    monkeypatch.setattr(learned, "output_error", error_of)
    learn(scope=scope, fisher=fisher, steps=1)
    first, relu, last = (n.output for n in nodes)
    wanted = {"network": {first, last}, "layer": {relu, last}, "block": {last}}[scope]
    assert seen == ([wanted] * 2 if fisher else [])
    assert all((w is not None and bool((w == 9).all())) is fisher for w in weighed) and weighed


def test_slopes_of_images_are_squared_and_averaged_over_positions(monkeypatch):
    convolutions, x = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Conv2d(2, 3, 1)), randn(8, 1, 3, 3)
    result = quantized(convolutions, x, "mqbench_academic", overrides=FOUR, settings=NEAREST)
    slope, weighed = torch.arange(8 * 3 * 4.0).view(8, 3, 2, 2), []
    monkeypatch.setattr(learned, "gradients", lambda graph, inputs, wanted, *_: ({}, dict.fromkeys(wanted, slope)))
    monkeypatch.setattr(learned, "output_error", lambda got, want, weight=None: weighed.append(weight) or got.sum())
    learn_rounding(result.graph, result.graph, result.plan, [[x]], Learned(fisher=True, steps=1))
    assert weighed and all(torch.equal(w, slope.square().mean((2, 3))) for w in weighed)


@pytest.mark.parametrize("fisher", [False, True])
def test_outputs_that_are_no_floats_cost_nothing(fisher):
    both, x = model_of(lambda m, x: (y := m.fc(x), y.argmax(1)), fc=nn.Linear(6, 4)), randn(20, 6)
    result = quantized(both, x, "mqbench_academic", overrides=FOUR, settings=NEAREST)
    method = Learned(scope="layer", steps=2, fisher=fisher)
    assert "of 1 units" in learn_rounding(result.graph, result.graph, result.plan, [[x]], method)[1][-1]


@pytest.mark.parametrize("scope", SCOPES)
def test_equal_chunks_give_equal_streams(scope, monkeypatch):
    parts = {"a": nn.Linear(6, 8), "b": nn.Linear(8, 8)}
    model = model_of(lambda m, x: m.b(torch.tanh(a := torch.relu(m.a(x))) + a) + a, **parts)
    four, streams, make = {"*": {"bits": 4}}, {}, BlockReconstruction.quantized_stream
    result = quantized(model, randn(32, 6, seed=3), "tflite_int8", overrides=four, settings=NEAREST)
    kept = lambda self, name: streams.setdefault(name, make(self, name))
    monkeypatch.setattr(BlockReconstruction, "quantized_stream", kept)
    monkeypatch.setattr("chipfit.rounding.streams.Stream.free", lambda self: None)
    learn_rounding(result.graph, result.graph, result.plan, [[randn(32, 6, seed=4)]] * 2, Learned(scope=scope, steps=2))
    assert len(streams) > 1 and all(torch.equal(s[0], s[1]) for s in streams.values())


def test_values_that_nothing_reads_any_more_are_not_kept():
    graph, made, held = small().graph, state(scope="layer", steps=1), []
    old = made.reconstruct
    made.reconstruct = lambda *block: held.append((set(made.floats), set(made.quantized))) or old(*block)
    made.run([[randn(40, 6)]])
    assert held == [({graph.inputs[0]},) * 2, ({graph.nodes[1].output},) * 2]
    assert not made.floats and not made.quantized


@pytest.mark.parametrize("bounds", [["0.weight"], ["0.weight", "2.weight"]])
def test_a_weight_whose_sum_the_chip_bounds_or_that_is_read_in_float_stays_and_others_are_learned(bounds):
    weights, first = small().graph.weights, small().graph.nodes[0].name
    new, notes = learn(steps=20, plan={"sums": tuple((b, 1e3) for b in bounds)})
    why = "is not learned: the chip bounds the sum of its codes"
    assert notes[:-1] == [f"the rounding of '{b[0]}' {why}" for b in bounds]
    for name in ("0.weight", "2.weight"):
        assert torch.equal(new.weights[name], weights[name]) is (name in bounds)
    new, notes = learn(steps=20, plan={"float_edges": (("0.weight", first),)})
    assert len(notes) == 1 and torch.equal(new.weights["0.weight"], weights["0.weight"])
