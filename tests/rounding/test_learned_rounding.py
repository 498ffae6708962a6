"""Learned codes; (n) is the number of the assertion in the list that users of MCT know."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import chipfit
from chipfit import Settings
from chipfit.calibration.batch_cache import MemoryLimit
from chipfit.engine.run import run
from chipfit.errors import DataError
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.rounding import learned_rounding as engine
from chipfit.rounding.adaround import (
    SoftWeight,
    inverse_sigmoid,
    output_error,
    rectified_sigmoid,
    regularizer,
    regularizer_exponent,
)
from chipfit.rounding.compare import Reference, run_quantized
from chipfit.rounding.learned_rounding import ReconstructionSettings, learn_rounding
from chipfit.rounding.network_blocks import SCOPES, network_blocks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.depth, self.up = nn.Conv2d(8, 8, 3, groups=8), nn.ConvTranspose2d(8, 4, 2)
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.relu(self.b(torch.relu(self.a(x))) + x)
        return self.head(torch.relu(self.up(self.depth(x))).flatten(1)[:, :64])


DATA = list(torch.randn(64, 3, 7, 7, generator=torch.Generator().manual_seed(1)).split(32))
NEW = torch.randn(128, 3, 7, 7, generator=torch.Generator().manual_seed(2))
THREE = {"*": {"bits": 3, "activation_bits": 8}}


@functools.cache
def plain_result():
    return fitted()


def fitted(platform="mqbench_academic", overrides=THREE, **settings):
    settings = Settings(**{"rounding": "off", **settings})
    return chipfit.quantize(Net().eval(), DATA, platform, overrides=overrides, settings=settings, progress=False)


def energy(graph, got) -> float:
    """The squared error of the outputs on new images, as a share of their energy."""
    (want,) = run(graph, [NEW]).values()
    return float((got - want).square().sum() / want.square().sum())


@torch.no_grad()
def error(result) -> float:
    graph = result.decision.graph
    return energy(graph, *run_quantized(result.graph, result.plan, [NEW]).values())


# ---------------------------------------------------------------- formulas on paper


def stored(scale=0.25, bits=3, **grid):
    g = Grid(bits=bits, qmin=-(1 << bits - 1), qmax=(1 << bits - 1) - 1, **grid)
    return Stored(format="w", grid=g, scale=torch.tensor(scale), zero_point=torch.tensor(0, dtype=torch.int32))


def test_the_rectified_sigmoid_ends_at_the_logarithm_of_eleven():
    v = torch.tensor([-9, -math.log(11), -math.log(2), 0, math.log(2), math.log(11), 9])
    # 1.2 / 3 - 0.1 = 0.3 at -ln 2
    torch.testing.assert_close(rectified_sigmoid(v), torch.tensor([0, 0, 0.3, 0.5, 0.7, 1, 1]), atol=1e-6, rtol=0)
    torch.testing.assert_close(inverse_sigmoid(torch.tensor([0.3, 0.7])), torch.tensor([-1, 1]) * math.log(2))


@torch.no_grad()
def test_36_soft_weights_start_as_the_float_ones_and_hard_ones_as_the_nearest():
    w = torch.linspace(-0.99, 0.74, 1001)  # inside the range, codes of -4 to 3
    soft = SoftWeight(stored(), w, w)
    torch.testing.assert_close(soft.soft().detach(), w, atol=5e-7, rtol=0)
    ties = (w / 0.25 % 1 - 0.5).abs() < 1e-5
    assert torch.equal(soft.hard()[~ties], stored().round(w)[~ties]) and int(ties.sum()) < 10
    assert float(soft.share().min()) >= 0 and float(soft.share().max()) <= 1


def test_36_within_2e_8_at_the_scale_of_weights():
    w = torch.linspace(-0.039, 0.029, 1001)
    assert float((SoftWeight(stored(0.01), w, w).soft() - w).detach().abs().max()) < 2e-8


def test_other_codes_to_start_from_stay_until_something_is_learned():
    w = torch.tensor([0.1, 0.1, 0.1, -0.3, 9.0])
    start = torch.tensor([0.0, 0.25, 0.5, -0.5, 0.75])  # the third is more than a step away, the last at the end
    soft = SoftWeight(stored(), w, start)
    assert torch.equal(soft.hard(), start)
    assert soft.low.tolist() == [0, 0, 0.25, -0.5, 0.75] and soft.high.tolist() == [0.25, 0.25, 0.5, -0.25, 0.75]


@pytest.mark.parametrize("grid", [{"table": (-1.0, -0.4, 0.0, 0.3, 1.0), "kind": "lut"}, {"zero": "any"}])
def test_tables_and_zero_points_have_neighbours_too(grid):
    s = stored(0.5, **grid)
    s = s if "table" in grid else s.with_(zero_point=torch.tensor(2, dtype=torch.int32))
    w = torch.tensor([-0.35, 0.05, 0.2])
    soft = SoftWeight(s, w, w)
    assert torch.equal(soft.hard(), s.round(w)) and bool((soft.low <= w).all()) and bool((w <= soft.high).all())
    assert torch.equal(s.round(soft.low), soft.low) and torch.equal(s.round(soft.high), soft.high)


def test_37_the_exponent_is_held_and_then_falls_in_a_line():
    assert [regularizer_exponent(s, 100) for s in (0, 10, 20)] == [20, 20, 20]
    assert regularizer_exponent(60, 100) == pytest.approx(11) and regularizer_exponent(100, 100) == pytest.approx(2)


def test_37_the_regularizer_is_0_at_the_ends_and_greatest_midway():
    assert float(regularizer(torch.tensor([0.0, 1.0]), 7)) == 0
    assert [float(regularizer(torch.tensor([h]), 2)) for h in (0.25, 0.5, 0.9)] == pytest.approx([0.75, 1, 0.36])


def test_38_the_error_is_summed_over_channels():
    got, want = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5)
    plain = (got - want).square().mean()
    torch.testing.assert_close(output_error(got, want), 3 * plain)
    torch.testing.assert_close(output_error(got, want, torch.full((4, 3), 2.0)), 6 * plain)
    torch.testing.assert_close(
        output_error(got[:, :, 0, 0], want[:, :, 0, 0]), 3 * (got - want)[..., 0, 0].square().mean()
    )


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize("scope", SCOPES)
def test_38_no_unit_ends_worse_and_the_float_network_stays(scope, monkeypatch):
    plain, seen = plain_result(), []
    before = {k: w.clone() for k, w in plain.graph.weights.items()}
    monkeypatch.setattr(engine._Learner, "_learn", lambda *_: None)
    same, notes = learn_rounding(
        plain.graph, plain.graph, plain.plan, [[x] for x in DATA], ReconstructionSettings(scope=scope)
    )
    assert "the codes of 0 of" in notes[-1]
    monkeypatch.undo()
    old = engine._Learner._error
    monkeypatch.setattr(engine._Learner, "_error", lambda *a: seen.append(old(*a)) or seen[-1])
    out, notes = learn_rounding(
        plain.graph, plain.graph, plain.plan, [[x] for x in DATA], ReconstructionSettings(scope=scope, steps=25)
    )
    assert all(torch.equal(w, plain.graph.weights[k]) for k, w in before.items())
    assert all(torch.equal(w, before[k]) for k, w in same.weights.items())
    better = [after < b for b, after in zip(seen[::2], seen[1::2], strict=True)]
    assert f"the codes of {sum(better)} of {len(better)} units" in notes[-1]
    changed = [name for name, w in out.weights.items() if not torch.equal(w, before[name])]
    assert any(better) == bool(changed) and (any(better) or scope == "network")
    for name, t in plain.plan.tensors.items():
        if t.role == "weight" and t.quantized and not torch.equal(out.weights[name], before[name]):
            torch.testing.assert_close(t.stored.round(out.weights[name]), out.weights[name])


def test_biases_learn_a_hundred_times_slower_and_ever_slower(monkeypatch):
    """Codes at 0.01 throughout; biases at 1e-4, 0.75e-4, 0.5e-4 and 0.25e-4."""
    rates = []

    class Adam(torch.optim.Adam):
        def step(self, *args):
            rates.append([group["lr"] for group in self.param_groups])
            return super().step(*args)

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    plain = plain_result()
    how = ReconstructionSettings(scope="network", steps=4, rate=0.01, biases=True)
    learn_rounding(plain.graph, plain.graph, plain.plan, [[DATA[0]]], how)
    assert [r for group in zip(*rates, strict=True) for r in group] == pytest.approx(
        [0.01] * 4 + [1e-4, 0.75e-4, 0.5e-4, 0.25e-4]
    )


@pytest.mark.parametrize("share, lost", [(0.0, 0.0), (1.0, 1.0), (0.25, 0.25)])
def test_39_as_many_values_stay_in_float_as_are_asked_for(share, lost):
    plain = plain_result()
    made = engine._Learner(plain.graph, plain.graph, plain.plan, ReconstructionSettings())
    rounded, real = torch.zeros(100_000), torch.ones(100_000)
    assert float(made._mixed(rounded, real, share).mean()) == pytest.approx(lost, abs=0.01)
    assert torch.equal(made._mixed(rounded, real, share), rounded) == (share == 0)


@pytest.mark.parametrize("inputs, outputs", [(1, 8), (8, 1), (5, 5)])
def test_40_equalized_channels_have_the_geometric_mean_of_both_ranges(inputs, outputs):
    from chipfit.passes.equalize import equalize
    from tests.steps import captured

    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(inputs, 6), nn.ReLU(), nn.Linear(6, outputs)), torch.randn(50, inputs)
    graph = captured(net, x)
    r = graph.weights["0.weight"].abs().amax(1), graph.weights["2.weight"].abs().amax(0)
    new, _ = equalize(graph)
    for got in (new.weights["0.weight"].abs().amax(1), new.weights["2.weight"].abs().amax(0)):
        torch.testing.assert_close(got, (r[0] * r[1]).sqrt())
    torch.testing.assert_close(*(run(g, [x])[graph.outputs[0]] for g in (graph, new)))


@pytest.mark.parametrize("scope, most", [("layer", 0.8), ("block", 0.8)])
def test_new_images_lose_less_than_by_rounding_to_the_nearest(scope, most):
    plain, learned = plain_result(), fitted(reconstruct=scope, reconstruct_steps=100)
    assert error(learned) < most * error(plain)
    assert any("learned codes are kept" in n for n in learned.plan.rewrites)
    assert all(t.stored.same_numbers(plain.plan[n]) for n, t in learned.plan.tensors.items() if t.quantized)


@pytest.mark.parametrize("more", [{"reconstruct_float": 0.5}, {"reconstruct_fisher": True}, {"rounding": "gptq"}])
def test_every_way_of_learning_ends_no_worse_than_it_began_and_alike_each_time(more):
    start = {k: v for k, v in more.items() if k == "rounding"}
    first, second = (fitted(reconstruct="block", reconstruct_steps=8, reconstruct_anneal=True, **more) for _ in "12")
    assert all(torch.equal(w, second.graph.weights[k]) for k, w in first.graph.weights.items())
    held = [[DATA[-1][24:]]]  # an eighth of the images, which the guard compares on
    reference = Reference(plain_result().graph, held)
    before = fitted(**start) if start else plain_result()
    assert reference.loss(first.graph, first.plan) <= reference.loss(before.graph, before.plan)


def test_the_guard_keeps_the_codes_from_before_where_they_are_better(monkeypatch):
    losses = iter((0.1, 0.2))
    monkeypatch.setattr(Reference, "loss", lambda *_: next(losses))
    plain, kept = plain_result(), fitted(reconstruct="block", reconstruct_steps=5)
    assert all(torch.equal(w, plain.graph.weights[k]) for k, w in kept.graph.weights.items())
    assert any("keep the codes from before" in n and "0.2, 0.1 without" in n for n in kept.plan.rewrites)


def test_codes_that_nothing_is_learned_about_do_not_pass_for_learned():
    """The control: with a pull alone, and no error to follow, new images lose as much as before."""
    plain, blind = plain_result(), fitted(reconstruct="layer", reconstruct_steps=10, reconstruct_rate=1e-9)
    assert error(blind) > 0.9 * error(plain)


@pytest.mark.parametrize("platform", ["tflite_int8", "ort_cpu", "imx500", "nnie"])
def test_weights_lie_on_the_grids_of_every_platform(platform):
    learned = fitted(platform, None, reconstruct="block", reconstruct_steps=4, rounding_guard=False)
    found = [t for t in learned.plan.tensors.values() if "learned by block" in t.origin]
    for t in found:
        w = learned.graph.weights[t.name]
        torch.testing.assert_close(t.stored.round(w), w)


def test_the_device_computes_what_was_learned():
    pytest.importorskip("onnxruntime")
    result = fitted("ort_cpu", None, reconstruct="layer", reconstruct_steps=4, rounding_guard=False)
    assert result.verify([NEW[:32]]).exact


def test_blocks_begin_and_end_where_one_value_connects_the_network():
    graph = plain_result().graph
    found = {
        s: [[graph.nodes[k].who for k in range(u.first, u.last)] for u in network_blocks(graph, s)] for s in SCOPES
    }
    assert len(found["network"]) == 1 and len(found["layer"]) == 6
    firsts = [names[0] for names in found["block"]]
    assert firsts == ["stem", "a", "depth"] and found["block"][1][:1] == ["a"] and "b" in found["block"][1]


def test_a_weight_that_several_operators_read_is_said():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.out(torch.relu(self.fc(torch.relu(self.fc(x)))))

    torch.manual_seed(0)
    settings = Settings(reconstruct="layer", reconstruct_steps=3)
    result = chipfit.quantize(Twice().eval(), [torch.randn(32, 6)], "ort_cpu", settings=settings, progress=False)
    assert any("'fc' is not learned: 'fc.weight' is read by several" in n for n in result.plan.rewrites)


def test_sums_of_codes_that_a_chip_bounds_are_left_alone():
    plain = plain_result()
    bound = replace(plain.plan, sums=(("stem.weight", 1e3),))
    _, notes = learn_rounding(plain.graph, plain.graph, bound, [[DATA[0]]], ReconstructionSettings(steps=2))
    assert notes[0] == "the rounding of 'stem' is not learned: the chip bounds the sum of its codes"


# ---------------------------------------------------------------- a step of learning, by hand

FOUR = {"*": {"bits": 4, "activation_bits": 4}}


@functools.cache
def small(platform="mqbench_academic"):
    """Two layers in a row on 40 numbers, in float and with a plan; two chunks of images."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(40, 6)
    off, wide = Settings(rounding="off"), FOUR if platform == "mqbench_academic" else None
    return chipfit.quantize(net, [x], platform, overrides=wide, settings=off, progress=False), x


def learned(how, platform="mqbench_academic", **plan):
    result, x = small(platform)
    return learn_rounding(result.graph, result.graph, replace(result.plan, **plan), [[x]], how)


@pytest.mark.parametrize(
    "steps, anneal, shares",
    [(5, True, [0.8, 0.6, 0.4, 0.2, 0.0]), (2, True, [0.8, 0.0]), (1, True, [0.8]), (3, False, [0.8])],
)
def test_fewer_values_stay_in_float_from_step_to_step_where_asked(steps, anneal, shares, monkeypatch):
    seen = []
    monkeypatch.setattr(engine._Learner, "_mixed", lambda self, x, other, share: seen.append(share) or x)
    learned(ReconstructionSettings(scope="network", steps=steps, floats=0.8, anneal=anneal))
    assert list(dict.fromkeys(round(s, 9) for s in seen)) == shares


def test_only_values_stay_in_float_no_weights(monkeypatch):
    seen = []
    monkeypatch.setattr(engine._Learner, "_mixed", lambda self, x, other, share: seen.append(tuple(x.shape)) or x)
    learned(ReconstructionSettings(scope="network", steps=2, floats=0.5), "ort_cpu")
    assert set(seen) <= {(32, 6), (32, 8), (8, 6), (8, 8)} and len({width for _, width in seen}) == 2
    seen.clear()
    learned(ReconstructionSettings(scope="network", steps=2), "ort_cpu")
    assert set(seen) <= {(32, 8), (8, 8)}  # what is read from before the network is as the chip has it


def test_integers_and_what_is_no_tensor_are_never_mixed():
    result, _ = small()
    made = engine._Learner(result.graph, result.graph, result.plan, ReconstructionSettings())
    for x, other in ((torch.arange(9), torch.zeros(9)), (7, 8)):
        assert made._mixed(x, other, 1.0) is x
    half = torch.ones(4)
    assert made._mixed(half, torch.zeros(4), 0.0) is half


def test_the_pull_sets_in_after_a_fifth_of_the_steps(monkeypatch):
    """Of 10 steps in the 3rd, with exponents of 20 - 18 k / 8, for both weights."""
    seen = []
    monkeypatch.setattr(engine, "regularizer", lambda h, e: seen.append((h.shape, round(e, 9))) or h.sum())
    learned(ReconstructionSettings(scope="network", steps=10))
    assert seen == [(s, 20 - 18 * k / 8) for k in range(8) for s in ((8, 6), (4, 8))]


def adam(monkeypatch, seen):
    """Note what variables of weights and of biases have as gradients, and what they are after a step."""

    class Adam(torch.optim.Adam):
        def step(self, *args):
            grads = [[p.grad.clone() for p in group["params"]] for group in self.param_groups]
            before = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
            super().step(*args)
            seen.append((grads, before, [[p.detach().clone() for p in g["params"]] for g in self.param_groups]))

    monkeypatch.setattr(torch.optim, "Adam", Adam)


@pytest.mark.parametrize("pull", [1.0, 4.0])
def test_the_pull_is_the_mean_over_all_weights_times_its_weight(pull, monkeypatch):
    """With no error, and shares themselves for a regularizer, the slope is pull / 80 times that of the sigmoid."""
    seen = []
    adam(monkeypatch, seen)
    monkeypatch.setattr(engine._Learner, "_error", lambda *_: 1.0)
    monkeypatch.setattr(engine._Learner, "_loss", lambda self, unit, got, k: 0 * sum(y.sum() for y in got.values()))
    monkeypatch.setattr(engine, "regularizer", lambda h, e: h.sum())
    learned(ReconstructionSettings(scope="network", steps=2, pull=pull))
    (first, *_), (second, (before, _), _) = seen
    assert all(not g.any() for group in first for g in group)
    for v, g in zip(before, second[0], strict=True):
        sigmoid = torch.sigmoid(v)
        torch.testing.assert_close(g, pull / 80 * 1.2 * sigmoid * (1 - sigmoid))


def test_errors_count_as_a_share_of_what_they_were(monkeypatch):
    found = []
    for before in (1.0, 4.0):
        seen = []
        with monkeypatch.context() as m:
            adam(m, seen)
            m.setattr(engine._Learner, "_error", lambda *_, before=before: before)
            learned(ReconstructionSettings(scope="network", steps=1))
        found.append([g for group in seen[0][0] for g in group])
    assert len(found[0]) == 4 and all(g.any() for g in found[0])
    for once, quarter in zip(*found, strict=True):
        torch.testing.assert_close(once / 4, quarter)


def test_biases_move_in_units_of_the_norm_of_their_weights(monkeypatch):
    result, _ = small()
    seen, given = [], []
    adam(monkeypatch, seen)
    old = engine.unrounded_outputs

    def run_of(graph, plan, inputs, weights=None, *rest, **more):
        given.extend([] if weights is None else [weights])
        return old(graph, plan, inputs, weights, *rest, **more)

    monkeypatch.setattr(engine, "unrounded_outputs", run_of)
    learned(ReconstructionSettings(scope="network", steps=2))
    weights = result.graph.weights
    norms = [weights[f"{k}.weight"].norm(dim=1) for k in (0, 2)]
    assert all(not d.any() for d in seen[0][1][1])
    for k, norm, shift in zip((0, 2), norms, seen[1][1][1], strict=True):
        assert torch.equal(given[0][f"{k}.bias"], weights[f"{k}.bias"]) and shift.any()
        torch.testing.assert_close(given[1][f"{k}.bias"], weights[f"{k}.bias"] + norm * shift)
    monkeypatch.setattr(
        engine._Learner, "_learn", lambda self, unit, soft, shifts, _: [d.data.fill_(2.0) for _, d in shifts.values()]
    )
    errors = iter((2.0, 1.0))
    monkeypatch.setattr(engine._Learner, "_error", lambda *_: next(errors))
    new, _ = learned(ReconstructionSettings(scope="network", steps=2))
    for k, norm in zip((0, 2), norms, strict=True):
        torch.testing.assert_close(new.weights[f"{k}.bias"], weights[f"{k}.bias"] + 2 * norm)


def test_biases_stay_where_they_are_not_to_be_learned(monkeypatch):
    result, _ = small()
    errors = iter((2.0, 1.0))
    monkeypatch.setattr(engine._Learner, "_error", lambda *_: next(errors))
    new, _ = learned(ReconstructionSettings(scope="network", steps=3, biases=False))
    assert all(torch.equal(new.weights[f"{k}.bias"], result.graph.weights[f"{k}.bias"]) for k in (0, 2))
    assert not torch.equal(new.weights["0.weight"], result.graph.weights["0.weight"])


@pytest.mark.parametrize(
    "scope, errors, better, left, kept",
    [
        ("network", (2.0, 1.0), "1 of 1", "50%", []),
        ("network", (2.0, 2.0), "0 of 1", "100%", [0, 2]),
        ("network", (2.0, 3.0), "0 of 1", "100%", [0, 2]),
        ("layer", (10.0, 5.0, 10.0, 3.0), "2 of 2", "40%", []),
        ("layer", (10.0, 11.0, 10.0, 2.0), "1 of 2", "60%", [0]),
        ("network", (0.0,), "0 of 0", "0%", [0, 2]),
    ],
)
def test_a_unit_keeps_what_it_has_learned_where_its_error_falls(scope, errors, better, left, kept, monkeypatch):
    result, _ = small()
    found = iter(errors)
    monkeypatch.setattr(engine._Learner, "_error", lambda *_: next(found))
    new, (note,) = learned(ReconstructionSettings(scope=scope, steps=2))
    said = f"learned the codes of {better} units ({scope}), the others keep theirs"
    assert note == f"{said}: the error of their outputs falls to {left} on average" and next(found, None) is None
    for k in (0, 2):
        for name in (f"{k}.weight", f"{k}.bias"):
            assert torch.equal(new.weights[name], result.graph.weights[name]) is (k in kept)


def test_the_error_of_a_unit_is_the_mean_of_its_chunks(monkeypatch):
    seen = []
    monkeypatch.setattr(
        engine, "output_error", lambda got, want, weight=None: seen.append(len(got)) or torch.tensor(float(len(got)))
    )
    monkeypatch.setattr(engine._Learner, "_learn", lambda self, unit, soft, shifts, before: seen.append(before))
    learned(ReconstructionSettings(scope="network"))
    assert seen == [32, 8, (32 + 8) / 2, 32, 8]  # before, and after


@pytest.mark.parametrize(
    "scope, fisher, watched", [("network", True, 2), ("layer", True, 2), ("block", True, 1), ("network", False, 0)]
)
def test_with_second_derivatives_a_network_is_watched_at_every_linear_operator(scope, fisher, watched, monkeypatch):
    result, _ = small()
    seen, weighed = [], []

    def slopes(graph, inputs, wanted, besides, random):
        seen.append(set(wanted))
        return {}, {name: torch.full((len(inputs[0]), 2), 3.0) for name in wanted}

    monkeypatch.setattr(engine, "gradients", slopes)
    old = output_error
    monkeypatch.setattr(engine, "output_error", lambda got, want, weight=None: weighed.append(weight) or old(got, want))
    learned(ReconstructionSettings(scope=scope, fisher=fisher, steps=1))
    heads = [n.output for n in result.graph.nodes if n.op == "Linear"]
    wanted = {"network": set(heads), "layer": {result.graph.nodes[1].output, heads[1]}, "block": {heads[1]}}[scope]
    assert seen == ([wanted] * 2 if fisher else []) and len(wanted) >= watched
    assert all((w is not None and bool((w == 9).all())) is fisher for w in weighed) and weighed


def test_slopes_of_images_are_squared_and_averaged_over_positions(monkeypatch):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Conv2d(2, 3, 1)).eval(), torch.randn(8, 1, 3, 3)
    off = Settings(rounding="off")
    result = chipfit.quantize(net, [x], "mqbench_academic", overrides=FOUR, settings=off, progress=False)
    slope, weighed = torch.arange(8 * 3 * 4.0).view(8, 3, 2, 2), []
    monkeypatch.setattr(engine, "gradients", lambda graph, inputs, wanted, *_: ({}, dict.fromkeys(wanted, slope)))
    monkeypatch.setattr(engine, "output_error", lambda got, want, weight=None: weighed.append(weight) or got.sum())
    learn_rounding(
        result.graph, result.graph, result.plan, [[x]], ReconstructionSettings(scope="block", fisher=True, steps=1)
    )
    assert weighed and all(torch.equal(w, slope.square().mean((2, 3))) for w in weighed)


def test_outputs_that_are_no_floats_cost_nothing():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(6, 4)

        def forward(self, x):
            y = self.fc(x)
            return y, y.argmax(1)

    x, off = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), Settings(rounding="off")
    result = chipfit.quantize(Both().eval(), [x], "mqbench_academic", overrides=FOUR, settings=off, progress=False)
    for how in (
        ReconstructionSettings(scope="layer", steps=2),
        ReconstructionSettings(scope="layer", steps=2, fisher=True),
    ):
        _, notes = learn_rounding(result.graph, result.graph, result.plan, [[x]], how)
        assert "of 1 units" in notes[-1]


def test_without_a_batch_there_is_nothing_to_learn_from():
    result, _ = small()
    with pytest.raises(DataError, match="calibration data"):
        learn_rounding(result.graph, result.graph, result.plan, [])


def test_values_that_nothing_reads_any_more_are_not_kept():
    result, x = small()
    made, held = (
        engine._Learner(result.graph, result.graph, result.plan, ReconstructionSettings(scope="layer", steps=1)),
        [],
    )
    old = made._learn_block
    made._learn_block = lambda *block: held.append((set(made.floats), set(made.codes))) or old(*block)
    made.run([[x]])
    assert held == [({result.graph.inputs[0]},) * 2, ({result.graph.nodes[1].output},) * 2]
    assert not made.floats and not made.codes


def test_a_weight_that_is_not_learned_does_not_keep_others_from_it():
    """The one whose sums are bounded may come first or last."""
    result, _ = small()
    for bound, free in (("0.weight", "2.weight"), ("2.weight", "0.weight")):
        new, notes = learned(ReconstructionSettings(scope="network", steps=20), sums=((bound, 1e3),))
        assert torch.equal(new.weights[bound], result.graph.weights[bound]) and len(notes) == 2
        assert not torch.equal(new.weights[free], result.graph.weights[free])
    new, notes = learned(
        ReconstructionSettings(scope="network", steps=20), float_edges=(("0.weight", result.graph.nodes[0].name),)
    )
    assert len(notes) == 1 and torch.equal(new.weights["0.weight"], result.graph.weights["0.weight"])


def test_values_that_some_operator_reads_in_float_are_kept_before_they_are_rounded():
    result, _ = small()
    (name,) = result.graph.inputs
    codes = engine._QuantizedStreams(MemoryLimit(), result.plan, set())
    assert codes[name].stored is result.plan[name] and codes.rounded == {name}
    codes = engine._QuantizedStreams(MemoryLimit(), result.plan, {name})
    assert codes[name].stored is None and codes.rounded == set()
    assert codes["another"].stored is None and codes.rounded == set() and set(codes) == {name, "another"}


@pytest.mark.parametrize("after", [0, 1])
def test_ctrl_c_ends_learning_with_what_was_learned(after, monkeypatch):
    result, _ = small()
    old, calls = engine._Learner._learn, iter(range(9))

    def pressed(*args):
        if next(calls) == after:
            raise KeyboardInterrupt
        return old(*args)

    monkeypatch.setattr(engine._Learner, "_learn", pressed)
    new, notes = learned(ReconstructionSettings(scope="layer", steps=20))
    assert notes[0] == f"warning: interrupted: '{2 * after}' and what follows it keep their codes"
    assert f"of {after} units" in notes[1] and len(notes) == 2 and next(calls) == after + 1
    assert torch.equal(new.weights["2.weight"], result.graph.weights["2.weight"])


def test_a_unit_in_which_nothing_is_learned_is_left_as_it_is():
    result, _ = small()
    new, notes = learned(ReconstructionSettings(scope="network", steps=2), sums=(("0.weight", 1e3), ("2.weight", 1e3)))
    assert [n.endswith("the chip bounds the sum of its codes") for n in notes] == [True, True, False]
    assert "the codes of 0 of 0 units" in notes[-1]
    assert all(torch.equal(w, result.graph.weights[k]) for k, w in new.weights.items())
