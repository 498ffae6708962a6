"""Losses of widths against brute force, and networks that keep their limits."""

import io
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import chipfit
from chipfit.errors import ConfigError, DataError, PlanError
from chipfit.report.advice import advice
from chipfit.report.html import page
from chipfit.report.terminal import render
from chipfit.rounding.compare import Reference


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


def test_losses_rank_layers_as_trying_them_out_does():
    result = fitted(overrides={"*": {"bits": 4, "activation_bits": 16}}, settings=OFF)
    found = result.sensitivity(DATA)
    reference = Reference(result.graph, [[x] for x in DATA])
    tried = {}
    for name in ("stem", "a", "b", "depth", "head"):
        only = {"*": {"bits": 16, "activation_bits": 16}, name: {"bits": 4, "activation_bits": 16}}
        alone = chipfit.quantize(
            Net().eval(),
            DATA,
            overrides=only,
            settings=chipfit.Settings(rounding="gptq", rounding_guard=False, correct_weights=None),
            **PLATFORM,
        )
        tried[f"{name}.weight"] = reference.loss(alone.graph, alone.plan)
    predicted = {name: found.losses[name][4] for name in tried}
    assert sorted(tried, key=tried.get)[0] == sorted(predicted, key=predicted.get)[0] == "b.weight"
    for name, loss in tried.items():
        assert predicted[name] == pytest.approx(loss, rel=1.5), name  # to second order, H from 128 images
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
    reference = Reference(fitted().graph, [[x] for x in DATA])
    assert reference.loss(mixed.graph, mixed.plan) < reference.loss(alike.graph, alike.plan)
    assert any("widths of weights chosen" in n for n in mixed.plan.rewrites)
    assert mixed.plan.provenance["limits"] == {"weights": limit}


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
    with pytest.raises(DataError, match="twice"):
        chipfit.quantize(Net().eval(), iter(DATA), limits=chipfit.Limits(weights="50%"), progress=False)
    with pytest.raises(ConfigError, match="limits"):
        chipfit.quantize(Net().eval(), DATA, limits="50%", progress=False)
    with pytest.raises(DataError):
        fitted().sensitivity([])
