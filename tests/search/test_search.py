"""Losses of widths against brute force, and networks that keep their limits."""

import io
import itertools
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import chipfit
from chipfit.cli.inputs import parse_limits
from chipfit.errors import ConfigError, DataError, PlanError, UnknownNameError, UnsupportedError
from chipfit.report.advice import advice
from chipfit.report.html import page
from chipfit.report.terminal import render
from chipfit.rounding.compare import Reference
from chipfit.search import candidates, choose
from chipfit.search.losses import losses
from chipfit.search.resources import peak_bytes, resources


class Net(nn.Module):
    """Layers of very different importance: the scores hardly depend on the second branch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.Conv2d(8, 16, 3)
        self.depth, self.head = nn.Conv2d(16, 16, 3, groups=16), nn.Linear(16, 6)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.relu(3 * self.a(x) + 0.05 * self.b(x))
        return 4 * self.head(torch.relu(self.depth(x)).mean((2, 3)))


DATA = list(torch.randn(128, 3, 12, 12, generator=torch.Generator().manual_seed(1)).split(32))
PLATFORM = {"platform": "mqbench_academic", "progress": False}
OFF = chipfit.Settings(rounding="off")
WIDE = {"*": {"activation_bits": 16}}


def fitted(**options):
    return chipfit.quantize(Net().eval(), DATA, overrides=options.pop("overrides", WIDE), **PLATFORM, **options)


FITTED = chipfit.Settings(rounding="gptq", rounding_guard=False, correct_weights=None)


@pytest.mark.parametrize("settings, tolerance", [(OFF, 0.5), (FITTED, 1.5)], ids=["nearest", "fitted"])
def test_losses_rank_layers_as_trying_them_out_does(settings, tolerance):
    four = {"bits": 4, "activation_bits": 16}
    result = fitted(overrides={"*": four}, settings=settings)
    found = result.sensitivity(DATA)
    reference = Reference(fitted(settings=OFF).graph, [[x] for x in DATA])
    tried = {}
    for name in ("stem", "a", "b", "depth", "head"):
        alone = fitted(overrides={"*": {"bits": 16, "activation_bits": 16}, name: four}, settings=settings)
        tried[f"{name}.weight"] = reference.loss(alone.graph, alone.plan)
    predicted = {name: found.losses[name][4] for name in tried}
    assert sorted(tried, key=tried.get)[0] == sorted(predicted, key=predicted.get)[0] == "b.weight"
    for name, loss in tried.items():
        # to second order, from 128 images; what is in 16 bits loses 1e-7
        assert predicted[name] == pytest.approx(loss, rel=tolerance, abs=2e-7), name
    ranked = found.ranked()
    assert [v for _, v in ranked] == sorted((v for _, v in ranked), reverse=True)
    assert "b.weight" in str(found) and "at other widths" in str(found)


def test_losses_of_activations_are_those_of_rounding_one_alone():
    result = chipfit.quantize(Net().eval(), DATA, overrides={"*": {"bits": 16, "activation_bits": 5}}, **PLATFORM)
    found, reference = result.sensitivity(DATA), Reference(result.graph, [[x] for x in DATA])
    alone = {
        name: reference.loss(result.graph, replace(result.plan, tensors={name: t}))
        for name, t in result.plan.tensors.items()
        if t.role == "activation" and t.quantized
    }
    assert len(alone) == 4 and alone.keys() <= found.losses.keys()
    predicted = {name: found.losses[name][5] for name in alone}
    assert sorted(alone, key=alone.get) == sorted(predicted, key=predicted.get)
    for name, loss in alone.items():
        assert predicted[name] == pytest.approx(loss, rel=0.6), name


def test_losses_of_what_are_no_scores_are_shares_of_the_outputs_energy():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    with torch.no_grad():
        model[2].bias += 2.0  # most of the energy is in the mean
    result = chipfit.quantize(
        model, DATA, overrides={"*": {"bits": 4, "activation_bits": 16}}, settings=OFF, **PLATFORM
    )
    found, reference = result.sensitivity(DATA), Reference(result.graph, [[x] for x in DATA])
    for name in ("0.weight", "2.weight"):
        alone = replace(result.plan, tensors={name: result.plan.tensors[name]})
        assert found.losses[name][4] == pytest.approx(reference.loss(result.graph, alone), rel=0.25), name


def test_advice_names_a_width_that_was_tried_with_its_gain_and_price():
    overrides = {"*": {"bits": 8, "activation_bits": 16}, "a": {"bits": 2, "activation_bits": 16}}
    result = fitted(overrides=overrides, settings=OFF)
    assert result.report.sensitivity == () and "which tensors hurt" not in terminal(result)
    (said,) = result.sensitivity(DATA).tried
    assert said.startswith("keep 'a' at ") and said in advice(result.report)
    assert "try   keep 'a' at " in str(result.sensitivity(DATA))
    bits, before, after, gain, price = re.search(
        r"'bits': (\d)}} takes the loss from (\S+) to (\S+) \((-\d+) %, predicted -\d+ %\) for \+(\S+) %", said
    ).groups()
    other = fitted(overrides={**overrides, "a": {"bits": int(bits), "activation_bits": 16}}, settings=OFF)
    reference = Reference(result.graph, [[x] for x in DATA])
    assert reference.loss(result.graph, result.plan) == pytest.approx(float(before), rel=0.01)
    assert reference.loss(other.graph, other.plan) == pytest.approx(float(after), rel=0.01)
    assert 100 * float(after) / float(before) - 100 == pytest.approx(float(gain), abs=1)
    sizes = {n: w.numel() for n, w in Net().named_parameters() if w.dim() > 1}
    size = 8 * sum(sizes.values()) - 6 * sizes["a.weight"]
    assert 100 * (int(bits) - 2) * sizes["a.weight"] / size == pytest.approx(float(price), abs=0.06)
    shown = terminal(result)
    assert "which tensors hurt" in shown and "█" * 24 in shown
    rows = result.report.to_dict()["sensitivity"]
    assert [r["loss"] for r in rows] == sorted((r["loss"] for r in rows), reverse=True) and rows[0]["share"] == 1
    assert "Which tensors hurt" in page(result.report) and "a.weight, 2 bits" in page(result.report)


def terminal(result):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(result.report))
    return console.export_text()


def test_fewer_bits_never_lose_less_and_float_activations_have_no_row():
    result = fitted()
    for name, row in result.sensitivity(DATA).losses.items():
        assert result.plan.quantized(name)
        assert [row[b] for b in sorted(row)] == sorted(row.values(), reverse=True), name


@pytest.mark.parametrize("limit, share", [("50%", 0.5), ("38%", 0.38)])
def test_weights_keep_their_limit_and_lose_less_than_one_width_for_all(limit, share):
    settings = chipfit.Settings(rounding="gptq", rounding_guard=False)
    mixed = fitted(limits=chipfit.Limits(weights=limit), settings=settings)
    weights = {n: t for n, t in mixed.plan.tensors.items() if t.role == "weight" and t.quantized}
    taken = sum(mixed.graph.weights[n].numel() * t.grid.bits / 8 for n, t in weights.items())
    assert taken <= share * sum(mixed.graph.weights[n].numel() for n in weights)
    assert weights["b.weight"].grid.bits <= weights["a.weight"].grid.bits
    assert len({t.grid.bits for t in weights.values()}) > 1
    one = {"*": {"bits": int(8 * share), "activation_bits": 16}}
    alike = fitted(overrides=one, settings=settings)
    reference = Reference(fitted(settings=OFF).graph, [[x] for x in DATA])
    assert reference.loss(mixed.graph, mixed.plan) < reference.loss(alike.graph, alike.plan)
    assert any("widths of weights chosen" in n for n in mixed.plan.rewrites)
    assert mixed.plan.provenance["limits"] == {"weights": limit}


def test_the_curve_falls_with_size_and_its_losses_are_those_of_the_networks_that_it_names():
    result = chipfit.quantize(Small(0).eval(), DATA, settings=OFF, **PLATFORM)
    assert result.report.pareto == () and "best widths" not in terminal(result)
    curve = result.pareto(DATA, shares=(20, 40, 60, 100))
    sizes, predicted = ([p[key] for p in curve.points] for key in ("size", "predicted"))
    assert (
        len(curve.points) == 3 and sizes == sorted(sizes) and predicted == sorted(predicted, reverse=True)
    )  # 20: none
    weights = {n: w.numel() for n, w in Small(0).named_parameters() if w.dim() > 1}
    reference = Reference(result.graph, [[x] for x in DATA])
    for p, share in zip(curve.points, (40, 60, 100), strict=True):
        assert p["size"] == sum(n * p["bits"][w] / 8 for w, n in weights.items()) <= share / 100 * sum(weights.values())
        named = {w.removesuffix(".weight"): {"bits": b} for w, b in p["bits"].items()}
        other = chipfit.quantize(Small(0).eval(), DATA, overrides=named, settings=OFF, **PLATFORM)
        assert p["measured"] == pytest.approx(reference.loss(other.graph, other.plan), rel=0.01)
    assert curve.points[0]["height"] == pytest.approx(1) and curve.points[-1]["height"] == 0
    assert "best choices by weights" in str(curve) and "size and loss of the best widths" in terminal(result)
    assert '<div id="curve">' in page(result.report) and len(result.report.to_dict()["pareto"]) == 3
    with pytest.raises(PlanError, match="at least"):
        result.pareto(DATA, shares=(1, 2))
    with pytest.raises(UnknownNameError, match="weights"):
        result.pareto(DATA, "weight")
    with pytest.raises(ConfigError, match="weights is not understood"):
        result.pareto(DATA, shares=(-5,))


class Small(nn.Module):
    """Three operators and what they read: few enough to try all widths."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Linear(8, 6)

    def forward(self, x):
        return 4 * self.c(torch.relu(self.b(torch.relu(self.a(x)))).mean((2, 3)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limits", [{"bops": "12%"}, {"bops": "25%"}, {"total": "80%", "weights": "40%"}])
def test_chosen_widths_are_nearly_the_best_of_all_and_beat_one_width_of_the_same_size(seed, limits, monkeypatch):
    widths = (2, 4, 8)
    monkeypatch.setattr(candidates, "FREE", widths)
    model, data = Small(seed).eval(), [x[..., :8, :8] for x in DATA]

    def with_all(bits):
        overrides = {"*": {"bits": bits, "activation_bits": bits}}
        return chipfit.quantize(model, data, overrides=overrides, settings=OFF, **PLATFORM)

    alike = {b: with_all(b) for b in widths}
    graph, plan = alike[8].graph, alike[8].plan
    names = [n for n, t in plan.tensors.items() if t.stored is not None and t.role != "bias"]
    assert len(names) == 6
    mixed = chipfit.quantize(model, data, limits=chipfit.Limits(**limits), settings=OFF, **PLATFORM)
    whole = resources(graph, plan)
    reference = Reference(graph, [[x] for x in data])
    found = losses(graph, plan, [[x] for x in data], dict.fromkeys(names, widths), mixed.stats)
    best, predicted, uniform = [], [], []
    for picks in itertools.product(widths, repeat=6):
        bits = dict(zip(names, picks, strict=True))
        tensors = {n: alike[b].plan.tensors[n] for n, b in bits.items()}
        other = replace(plan, tensors={**plan.tensors, **tensors})
        used = resources(graph, other)
        if all(getattr(used, k) <= float(v[:-1]) / 100 * getattr(whole, k) for k, v in limits.items()):
            predicted.append(sum(found[n][b] for n, b in bits.items()))
            best.append(reference.loss(graph, other))
            uniform += best[-1:] if len(set(picks)) == 1 else []
    measured = reference.loss(mixed.graph, mixed.plan)
    assert measured <= 1.1 * min(best)
    assert not uniform or measured <= min(uniform)
    said = re.search(r"measured (\S+), the least of (\d+) choices$", mixed.plan.rewrites[-1]).groups()
    assert float(said[0]) == pytest.approx(measured, rel=0.01) and said[1] == "8"
    monkeypatch.setattr(choose, "WORK", 0.0)
    by_sum = chipfit.quantize(model, data, limits=chipfit.Limits(**limits), settings=OFF, **PLATFORM)
    chosen = by_sum.plan.provenance["chosen"]
    assert sum(found[n][b] for n, b in chosen.items()) <= 1.02 * min(predicted)
    assert "measured" not in by_sum.plan.rewrites[-1]


def test_readers_of_what_was_before_the_codes_add_nothing_to_their_loss():
    class Residual(Net):
        def forward(self, x):
            x = torch.relu(self.stem(x))  # the sum reads it in float, the convolution in codes
            y = torch.relu(self.depth(self.a(x)))
            return 4 * self.head(torch.cat([y[:, :8] + x[..., :6, :6], y[:, 8:]], 1).mean((2, 3)))

    result = chipfit.quantize(Residual().eval(), DATA, overrides={"*": {"bits": 16, "activation_bits": 4}}, **PLATFORM)
    (name,) = {v for v, _ in result.plan.float_edges if v in result.graph.producers()}
    found, reference = result.sensitivity(DATA), Reference(result.graph, [[x] for x in DATA])
    alone = replace(result.plan, tensors={name: result.plan.tensors[name]})
    assert found.losses[name][4] == pytest.approx(reference.loss(result.graph, alone), rel=0.3)


def test_activations_that_kernels_share_have_one_width_and_only_what_is_limited_is_chosen():
    chip = {"platform": "ort_qnn_ep", "progress": False}
    plain = chipfit.quantize(Net().eval(), DATA, **chip)

    def bits(result, role):
        return {t.grid.bits for t in result.plan.tensors.values() if t.role == role and t.quantized}

    wide = chipfit.quantize(Net().eval(), DATA, limits=chipfit.Limits(activations="200%"), **chip)
    assert bits(wide, "activation") == {16} and bits(wide, "weight") - {16} == {8}  # 16: constants among activations
    assert all(n.exec == plain.plan.nodes[name].exec for name, n in wide.plan.nodes.items())
    narrow = chipfit.quantize(Net().eval(), DATA, limits=chipfit.Limits(activations="199%"), **chip)
    assert bits(narrow, "activation") == {8}
    kept = {"a": {"activation_bits": 8}}
    asked = chipfit.quantize(Net().eval(), DATA, overrides=kept, limits=chipfit.Limits(total="200%"), **chip)
    assert bits(asked, "activation") == {8}
    for limits, role in (({"weights": "60%"}, "activation"), ({"activations": "300%"}, "weight")):
        free = chipfit.quantize(Small(0).eval(), DATA, **PLATFORM)
        only = chipfit.quantize(Small(0).eval(), DATA, limits=chipfit.Limits(**limits), **PLATFORM)
        changed = {n for n, t in only.plan.tensors.items() if t.quantized and t.format != free.plan.tensors[n].format}
        assert changed and role not in {only.plan.tensors[n].role for n in changed}


def test_the_peak_is_kept_where_one_layer_runs_several_times():
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.wide, self.small, self.act = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3, stride=3), nn.ReLU()

        def forward(self, x):
            x = self.act(self.wide(x))  # 3 x 12 x 12 and 8 x 10 x 10 numbers, and less when it runs again
            return self.act(self.small(x)).mean((2, 3))

    chip = {"platform": "ort_qnn_ep", "progress": False}
    result = chipfit.quantize(Again().eval(), DATA, limits=chipfit.Limits(activations="150%"), **chip)
    assert peak_bytes(result.graph, result.plan) == 432 + 800


def test_a_limit_that_nothing_can_keep_says_where_and_what_takes_most():
    said = r"activations while 'relu_1' runs.*Allowed: 4,096 at least.*largest are 'conv2d_1', 'relu_1'"
    with pytest.raises(PlanError, match=said):  # two float values of 8 x 8 x 8 numbers
        chipfit.quantize(Small(0).eval(), DATA, limits=chipfit.Limits(activations="20%"), **PLATFORM)
    with pytest.raises(PlanError, match="leaves no width to choose"):
        chipfit.quantize(Net().eval(), DATA, "ort_cpu", limits=chipfit.Limits(activations=10), progress=False)
    with pytest.raises(ConfigError, match="activations is not understood.*KB"):
        chipfit.Limits(activations="3 bits")
    with pytest.raises(ConfigError, match="There is no limit on 'speed'.*weights, activations, total, bops"):
        parse_limits(["weights=50%", "speed=9"])
    with pytest.raises(ConfigError, match="weights is not understood"):
        parse_limits(["weights"])


def test_a_limit_on_the_loss_gives_the_least_memory_that_keeps_it():
    half = fitted(limits=chipfit.Limits(weights="50%"), settings=OFF)
    used, most, loss = re.search(r"weights (\S+) of (\S+); predicted loss ([^\s,]+)", half.plan.rewrites[-1]).groups()
    small = fitted(limits=chipfit.Limits(loss=float(loss) * 1.01), settings=OFF)
    taken = sum(small.graph.weights[n].numel() * b / 8 for n, b in small.plan.provenance["chosen"].items())
    assert taken <= 1.002 * float(used.replace(",", "")) <= float(most.replace(",", ""))
    said = re.search(r"loss (\S+) of (\S+); predicted loss (\S+)$", small.plan.rewrites[-1]).groups()
    assert float(said[0]) == float(said[2]) <= float(said[1])
    more = fitted(limits=chipfit.Limits(loss=10 * float(loss)), settings=OFF).plan.provenance["chosen"]
    assert sum(more.values()) < sum(small.plan.provenance["chosen"].values())
    with pytest.raises(PlanError, match="keeps the limit on (loss|weights).*and the other limits raised"):
        fitted(limits=chipfit.Limits(loss=1e-6, weights="30%"), settings=OFF)


@pytest.mark.parametrize("choice, bits, has", [("bits", 3, "8"), ("activation_bits", 5, "8")])
def test_widths_that_the_chip_has_not_are_refused_with_those_that_it_has(choice, bits, has):
    with pytest.raises(UnsupportedError, match=rf"cannot have {bits}-bit.*'ort_cpu'.*Allowed: {has} bits"):
        chipfit.quantize(Net().eval(), DATA, "ort_cpu", overrides={"a": {choice: bits}}, progress=False)


def test_bit_operations_are_multiplications_times_both_widths():
    limited = fitted(limits=chipfit.Limits(bops="25%"))
    conv = {"stem": 3 * 8 * 9 * 100, "a": 8 * 16 * 9 * 64, "b": 8 * 16 * 9 * 64, "depth": 16 * 9 * 36, "head": 16 * 6}
    used = sum(p * limited.plan[f"{n}.weight"].grid.bits * 16 for n, p in conv.items())
    note = next(n for n in limited.plan.rewrites if "widths of weights chosen" in n)
    assert f"bops {used:,.0f} of {sum(p * 8 * 16 for p in conv.values()) / 4:,.0f}" in note


def test_widths_that_the_user_chose_stay_and_what_cannot_be_searched_is_refused():
    kept = fitted(overrides={"*": {"activation_bits": 16}, "a": {"bits": 8}}, limits=chipfit.Limits(weights="60%"))
    assert kept.plan["a.weight"].grid.bits == 8
    with pytest.raises(PlanError, match="No choice of widths"):
        fitted(limits=chipfit.Limits(weights="5%"))
    with pytest.raises(PlanError, match="no width"):
        chipfit.quantize(Net().eval(), DATA, "ort_cpu", limits=chipfit.Limits(weights="50%"), progress=False)
    with pytest.raises(ConfigError, match="limits"):
        chipfit.quantize(Net().eval(), DATA, limits="50%", progress=False)
    with pytest.raises(DataError):
        fitted().sensitivity([])
