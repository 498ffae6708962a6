"""Losses of widths against brute force, and networks that keep their limits."""

import io
import itertools
import pickle
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import chipfit
from chipfit.cli.inputs import parse_limits
from chipfit.decision import Decision
from chipfit.errors import ConfigError, DataError, PlanError, UnknownNameError
from chipfit.platform.load import load
from chipfit.report.advice import advice
from chipfit.report.html import page
from chipfit.report.terminal import render
from chipfit.rounding.compare import Reference
from chipfit.search import candidates, choose
from chipfit.search.losses import RoundingModel, losses
from chipfit.search.resources import peak_bytes, resources
from tests.build import NEAREST, mlp, model_of, platform_of, quantized, randn, sequential


def net():
    """Layers of very different importance: the scores hardly depend on the second branch."""
    torch.manual_seed(0)
    layers = {"stem": nn.Conv2d(3, 8, 3), "a": nn.Conv2d(8, 16, 3), "b": nn.Conv2d(8, 16, 3)}
    layers |= {"depth": nn.Conv2d(16, 16, 3, groups=16), "head": nn.Linear(16, 6)}

    def forward(m, x):
        x = torch.relu(m.stem(x))
        x = torch.relu(3 * m.a(x) + 0.05 * m.b(x))
        return 4 * m.head(torch.relu(m.depth(x)).mean((2, 3)))

    return model_of(forward, **layers)


def small(seed=0):
    """Three operators and what they read: few enough to try all widths."""
    torch.manual_seed(seed)
    layers = {"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(8, 8, 3, groups=8), "c": nn.Linear(8, 6)}
    return model_of(lambda m, x: 4 * m.c(m.b(m.a(x).relu()).relu().mean((2, 3))), **layers)


DATA = list(randn(128, 3, 12, 12, seed=1).split(32))
FITTED = chipfit.Settings(rounding="gptq", rounding_guard=False, correct_weights=None)


def wide(bits=None, activations=16, **layers):
    return {"*": {"activation_bits": activations, **({} if bits is None else {"bits": bits})}, **layers}


def fitted(model=None, platform="mqbench_academic", data=DATA, **options):
    """The network, or another one, with activations of 16 bits unless overrides say otherwise."""
    options = {"overrides": None if model or platform != "mqbench_academic" else wide(), **options}
    options |= {"limits": chipfit.Limits(**options.pop("limits"))} if "limits" in options else {}
    return quantized(model or net(), data, platform, **options)


def reference_of(graph, data=DATA):
    return Reference(graph, [[x] for x in data])


@pytest.mark.parametrize("settings, tolerance", [(NEAREST, 0.5), (FITTED, 1.5)], ids=["nearest", "fitted"])
def test_losses_rank_layers_as_trying_them_out_does(settings, tolerance):
    four = {"bits": 4, "activation_bits": 16}
    found = fitted(overrides={"*": four}, settings=settings).sensitivity(DATA)
    reference, tried = reference_of(fitted(settings=NEAREST).graph), {}
    for name in ("stem", "a", "b", "depth", "head"):
        alone = fitted(overrides=wide(16, **{name: four}), settings=settings)
        tried[f"{name}.weight"] = reference.loss(alone.graph, alone.plan)
    predicted = {name: found.losses[name][4] for name in tried}
    assert min(tried, key=tried.get) == min(predicted, key=predicted.get) == "b.weight"
    for name, loss in tried.items():
        # to second order, from 128 images; what is in 16 bits loses 1e-7
        assert predicted[name] == pytest.approx(loss, rel=tolerance, abs=2e-7), name
    losses = [v for _, v in found.ranked()]
    assert losses == sorted(losses, reverse=True)
    assert "b.weight" in str(found) and "at other widths" in str(found)


def losses_alone(result, names):
    """The loss of each tensor where it alone is rounded."""
    reference, tensors = reference_of(result.graph), result.plan.tensors
    return {n: reference.loss(result.graph, replace(result.plan, tensors={n: tensors[n]})) for n in names}


def test_losses_of_activations_are_those_of_rounding_one_alone():
    result = fitted(overrides=wide(16, 5))
    names = [n for n, t in result.plan.tensors.items() if t.role == "activation" and t.quantized]
    alone, found = losses_alone(result, names), result.sensitivity(DATA).losses
    predicted = {name: found[name][5] for name in names}
    assert len(alone) == 4 and sorted(alone, key=alone.get) == sorted(predicted, key=predicted.get)
    assert predicted == {name: pytest.approx(loss, rel=0.6) for name, loss in alone.items()}


def test_losses_of_outputs_that_are_no_scores_are_shares_of_their_energy():
    torch.manual_seed(0)
    model = sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    with torch.no_grad():
        model[2].bias += 2.0  # most of the energy is in the mean
    result = fitted(model, overrides=wide(4), settings=NEAREST)
    found = result.sensitivity(DATA).losses
    for name, loss in losses_alone(result, ["0.weight", "2.weight"]).items():
        assert found[name][4] == pytest.approx(loss, rel=0.25), name
    assert quantized(model, DATA, "st_edge_ai").sensitivity(DATA).losses["0.weight"][1] > found["0.weight"][4]


def test_advice_names_a_width_that_was_tried_with_its_gain_and_price():
    result = fitted(overrides=wide(8, a={"bits": 2, "activation_bits": 16}), settings=NEAREST)
    assert result.report.sensitivity == () and "which tensors hurt" not in terminal(result)
    (advised,) = result.sensitivity(DATA).tried
    assert advised.startswith("keep 'a' at ") and advised in advice(result.report)
    assert "try   keep 'a' at " in str(result.sensitivity(DATA))
    bits, before, after, gain, price = re.search(
        r"'bits': (\d)}} takes the loss from (\S+) to (\S+) \((-\d+) %, predicted -\d+ %\) for \+(\S+) %", advised
    ).groups()
    other = fitted(overrides=wide(8, a={"bits": int(bits), "activation_bits": 16}), settings=NEAREST)
    reference = reference_of(result.graph)
    assert reference.loss(result.graph, result.plan) == pytest.approx(float(before), rel=0.01)
    assert reference.loss(other.graph, other.plan) == pytest.approx(float(after), rel=0.01)
    assert 100 * float(after) / float(before) - 100 == pytest.approx(float(gain), abs=1)
    sizes = {n: w.numel() for n, w in net().named_parameters() if w.dim() > 1}
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


def weight_bytes(result, bits=None):
    """Memory of quantized weights, perhaps with other bits for each."""
    weights = {n: t.grid.bits for n, t in result.plan.tensors.items() if t.role == "weight" and t.quantized}
    return sum(result.graph.weights[n].numel() * (bits or b) / 8 for n, b in weights.items())


@pytest.mark.parametrize("limit, share", [("50%", 0.5), ("38%", 0.38)])
def test_weights_keep_their_limit_and_lose_less_than_one_width_for_all(limit, share):
    settings = chipfit.Settings(rounding="gptq", rounding_guard=False)
    mixed = fitted(limits={"weights": limit}, settings=settings)
    assert weight_bytes(mixed) <= share * weight_bytes(mixed, 8)
    bits = {n: t.grid.bits for n, t in mixed.plan.tensors.items() if t.role == "weight" and t.quantized}
    assert bits["b.weight"] <= bits["a.weight"] and len(set(bits.values())) > 1
    alike, reference = fitted(overrides=wide(int(8 * share)), settings=settings), fitted(settings=NEAREST).graph
    loss = reference_of(reference).loss
    assert loss(mixed.graph, mixed.plan) < loss(alike.graph, alike.plan)
    assert any("widths of weights chosen" in n for n in mixed.plan.rewrites)
    assert mixed.plan.provenance["limits"] == {"weights": limit}


def test_the_curve_falls_with_size_and_its_losses_are_those_of_the_networks_that_it_names():
    result = fitted(small(), settings=NEAREST, rule="mse")
    assert result.report.pareto == () and "best widths" not in terminal(result)
    curve = result.pareto(DATA, shares=(20, 40, 60, 100))
    sizes, predicted = ([p[key] for p in curve.points] for key in ("size", "predicted"))
    assert sizes == sorted(sizes) and predicted == sorted(predicted, reverse=True) and len(sizes) == 3  # 20: none
    weights = {n: w.numel() for n, w in small().named_parameters() if w.dim() > 1}
    reference = reference_of(result.graph)
    for p, share in zip(curve.points, (40, 60, 100), strict=True):
        assert p["size"] == sum(n * p["bits"][w] / 8 for w, n in weights.items()) <= share / 100 * sum(weights.values())
        named = {w.removesuffix(".weight"): {"bits": b} for w, b in p["bits"].items()}
        other = fitted(small(), overrides=named, settings=NEAREST, rule="mse")
        assert p["measured"] == pytest.approx(reference.loss(other.graph, other.plan), rel=0.01)
    assert curve.points[0]["height"] == pytest.approx(1) and curve.points[-1]["height"] == 0
    assert "best choices by weights" in str(curve) and "size and loss of the best widths" in terminal(result)
    assert '<div id="curve">' in page(result.report) and len(result.report.to_dict()["pareto"]) == 3
    with pytest.raises(PlanError, match="at least"):
        result.pareto(DATA, shares=(1, 2))
    with pytest.raises(UnknownNameError, match="weights"):
        result.pareto(DATA, "weight")
    with pytest.raises(ConfigError, match="Limit on weights is not a valid amount"):
        result.pareto(DATA, shares=(-5,))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limits", [{"bops": "12%"}, {"bops": "25%"}, {"total": "80%", "weights": "40%"}])
def test_chosen_widths_are_nearly_the_best_of_all_and_beat_one_width_of_the_same_size(seed, limits, monkeypatch):
    widths = (2, 4, 8)
    monkeypatch.setattr(candidates, "FREE", widths)
    data = [x[..., :8, :8] for x in DATA]

    def searched():
        return fitted(small(seed), data=data, limits=limits, settings=NEAREST)

    alike = {b: fitted(small(seed), data=data, overrides=wide(b, b), settings=NEAREST) for b in widths}
    graph, plan, mixed = alike[8].graph, alike[8].plan, searched()
    names = [n for n, t in plan.tensors.items() if t.stored is not None and t.role != "bias"]
    whole, reference = resources(graph, plan), reference_of(graph, data)
    found = losses(alike[8].decision, plan, [[x] for x in data], dict.fromkeys(names, widths))
    best, predicted, uniform = [], [], []
    assert len(names) == 6
    for picks in itertools.product(widths, repeat=6):
        bits = dict(zip(names, picks, strict=True))
        other = replace(plan, tensors={**plan.tensors, **{n: alike[b].plan.tensors[n] for n, b in bits.items()}})
        used = resources(graph, other)
        if all(getattr(used, k) <= float(v[:-1]) / 100 * getattr(whole, k) for k, v in limits.items()):
            predicted.append(sum(found[n][b] for n, b in bits.items()))
            best.append(reference.loss(graph, other))
            uniform += best[-1:] if len(set(picks)) == 1 else []
    measured = reference.loss(mixed.graph, mixed.plan)
    assert measured <= 1.1 * min(best) and (not uniform or measured <= min(uniform))
    told, tries = re.search(r"measured (\S+), the least of (\d+) choices$", mixed.plan.rewrites[-1]).groups()
    assert float(told) == pytest.approx(measured, rel=0.01) and 1 <= int(tries) <= 8  # not those with fewer bits only
    monkeypatch.setattr(choose, "WORK", 0.0)
    by_sum = searched()
    chosen = by_sum.plan.provenance["chosen"]
    assert sum(found[n][b] for n, b in chosen.items()) <= 1.02 * min(predicted)
    assert "measured" not in by_sum.plan.rewrites[-1]


def test_readers_of_a_value_before_it_is_rounded_add_nothing_to_its_loss():
    def forward(m, x):
        x = torch.relu(m.stem(x))  # the sum reads it in float, the convolution quantized
        y = torch.relu(m.depth(m.a(x)))
        return 4 * m.head(torch.cat([y[:, :8] + x[..., :6, :6], y[:, 8:]], 1).mean((2, 3)))

    model = net()
    type(model).forward = forward
    result = fitted(model, overrides=wide(16, 4))
    (name,) = {v for v, _ in result.plan.float_edges if v in result.graph.producers()}
    (loss,) = losses_alone(result, [name]).values()
    assert result.sensitivity(DATA).losses[name][4] == pytest.approx(loss, rel=0.3)


def test_activations_that_kernels_share_have_one_width_and_only_what_is_limited_is_chosen():
    def bits(result, role):
        return {t.grid.bits for t in result.plan.tensors.values() if t.role == role and t.quantized}

    plain, large = fitted(platform="ort_qnn_ep"), fitted(platform="ort_qnn_ep", limits={"activations": "200%"})
    assert bits(large, "activation") == {16} and bits(large, "weight") - {16} == {8}  # 16: constants among activations
    assert all(n.exec == plain.plan.nodes[name].exec for name, n in large.plan.nodes.items())
    narrow = fitted(platform="ort_qnn_ep", limits={"activations": "199%"})
    kept = fitted(platform="ort_qnn_ep", limits={"total": "200%"}, overrides={"a": {"activation_bits": 8}})
    assert bits(narrow, "activation") == bits(kept, "activation") == {8}


@pytest.mark.parametrize("limits, role", [({"weights": "60%"}, "activation"), ({"activations": "300%"}, "weight")])
def test_only_limited_tensors_change(limits, role):
    free, limited = fitted(small()).plan.tensors, fitted(small(), limits=limits).plan.tensors
    changed = {t.role for n, t in limited.items() if t.quantized and t.format != free[n].format}
    assert changed and role not in changed


def test_the_peak_is_kept_where_one_layer_runs_several_times():
    """3 x 12 x 12 and 8 x 10 x 10 numbers, and fewer when the activation runs again."""
    layers = {"wide": nn.Conv2d(3, 8, 3), "small": nn.Conv2d(8, 4, 3, stride=3), "act": nn.ReLU()}
    again = model_of(lambda m, x: m.act(m.small(m.act(m.wide(x)))).mean((2, 3)), **layers)
    result = fitted(again, "ort_qnn_ep", limits={"activations": "150%"})
    assert peak_bytes(result.graph, result.plan) == 432 + 800


def test_a_limit_that_nothing_can_keep_says_where_and_what_takes_most():
    message = r"activations while 'relu_1' runs.*Allowed: 4,096 at least.*largest are 'conv2d_1', 'relu_1'"
    with pytest.raises(PlanError, match=message):  # two float values of 8 x 8 x 8 numbers
        fitted(small(), limits={"activations": "20%"})
    with pytest.raises(PlanError, match="leaves no width to choose"):
        fitted(platform="ort_cpu", limits={"activations": 10})
    with pytest.raises(PlanError, match="No choice of widths"):
        fitted(limits={"weights": "5%"})
    with pytest.raises(PlanError, match="no width"):
        fitted(platform="ort_cpu", limits={"weights": "50%"})


def test_limits_that_are_not_understood_are_refused():
    with pytest.raises(ConfigError, match="Limit on weights is not a valid amount"):
        parse_limits(["bops=50%", "weights"])
    with pytest.raises(UnknownNameError, match="There is no limit named 'bobs'. Try: 'bops'"):
        parse_limits(["bobs=9"])
    with pytest.raises(ConfigError, match="limits"):
        quantized(net(), DATA, limits="50%")
    with pytest.raises(DataError):
        fitted().sensitivity([])


def test_a_limit_on_the_loss_gives_the_least_memory_that_keeps_it():
    half = fitted(limits={"weights": "50%"}, settings=NEAREST)
    used, most, loss = re.search(r"weights (\S+) of (\S+); predicted loss ([^\s,]+)", half.plan.rewrites[-1]).groups()
    least = fitted(limits={"loss": float(loss) * 1.01}, settings=NEAREST)
    assert weight_bytes(least) <= 1.002 * float(used.replace(",", "")) <= float(most.replace(",", ""))
    told = re.search(r"loss (\S+) of (\S+); predicted loss (\S+)$", least.plan.rewrites[-1]).groups()
    assert float(told[0]) == float(told[2]) <= float(told[1])
    assert weight_bytes(fitted(limits={"loss": 10 * float(loss)}, settings=NEAREST)) < weight_bytes(least)
    with pytest.raises(PlanError, match="keeps the limit on (loss|weights).*and the other limits raised"):
        fitted(limits={"loss": 1e-6, "weights": "30%"}, settings=NEAREST)


def test_widths_that_the_user_chose_stay():
    assert fitted(overrides=wide(a={"bits": 8}), limits={"weights": "60%"}).plan["a.weight"].grid.bits == 8


# ---------------------------------------------------------------- blocks of weights share a scale

ROWS = [randn(64, 64, seed=k) for k in range(4)]


@pytest.mark.parametrize("rounding", ["off", "gptq"])
def test_four_bits_more_cost_two_hundred_and_fifty_times_less(rounding):
    settings = chipfit.Settings(rounding=rounding)
    result = quantized(mlp(64, 96, 32), ROWS, "ort_dynamic", overrides={"Linear": {"bits": 4}}, settings=settings)
    rows = {r["tensor"]: r for r in result.sensitivity(ROWS).rows()}
    for name in ("0.weight", "2.weight"):
        assert 100 < rows[name]["loss"] / rows[name]["others"][8] < 800  # 16 squared is 256


def test_widths_of_blocks_are_searched_under_a_limit():
    result = quantized(mlp(64, 96, 64, 32), ROWS, "ort_dynamic", limits=chipfit.Limits(weights="70%"))
    widths = {t.grid.bits for t in result.plan.tensors.values() if t.role == "weight" and t.quantized}
    assert widths == {4, 8} and result.verify([ROWS[0]]).sound


def test_an_activation_at_fault_is_advised_with_the_layers_on_both_sides_of_it():
    torch.manual_seed(0)
    wide, filters, factor = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, groups=16), 10 ** (-3 * torch.rand(16))
    with torch.no_grad():
        wide.weight.mul_(factor.view(-1, 1, 1, 1))
        wide.bias.mul_(factor)
        filters.weight.div_(factor.view(-1, 1, 1, 1))
    model = sequential(wide, nn.ReLU(), filters, nn.Conv2d(16, 4, 1), nn.Flatten())
    result = quantized(model, DATA, settings=chipfit.Settings(repairs="off"))
    found = result.sensitivity(DATA)
    assert found.ranked()[0][0] == next(n.output for n in result.graph.nodes if n.op == "Relu")
    assert found.tried[0].startswith(
        "keep '1', '2' in float: overrides={'1': 'float', '2': 'float'} takes the loss from "
    )
    after = float(found.tried[0].split(" to ")[1].split(" ")[0])
    other = result.edit({"1": "float", "2": "float"})
    assert reference_of(result.graph).loss(other.graph, other.plan) == pytest.approx(after, rel=0.01)


def test_time_and_names_that_are_no_limit_are_refused_with_what_there_is():
    with pytest.raises(UnknownNameError, match="no limit named 'latency'.*Try: limit 'bops', and measure a file"):
        chipfit.prune(net(), DATA, limits=chipfit.Limits(latency=5.0))
    with pytest.raises(UnknownNameError, match="no limit named 'weigths'.*Try: 'weights'"):
        chipfit.Limits(weigths="50%")
    limits = chipfit.Limits(weights="50%")
    assert replace(limits, weights="60%").weights == "60%" and pickle.loads(pickle.dumps(limits)) == limits


def test_a_result_of_known_range_is_searched_with_that_range():
    """Its statistics are not collected, and it had the chip's width alone before."""
    a8, a4 = ({"bits": bits, "signed": "auto", "zero": 0} for bits in (8, 4))
    use = [{"in": "any", "w": "w8", "out": out} for out in ("a8", "a4")]
    chip = platform_of({"match": ["*"], "use": use}, formats={"a8": a8, "a4": a4, "w8": {"bits": 8}})
    model = model_of(lambda m, x: torch.sigmoid(m.a(x)) * 3, a=nn.Linear(16, 32))
    known = {
        "overrides": {"sigmoid": {"range": (0.0, 1.0)}},
        "limits": chipfit.Limits(activations=31, largest_value=True),
    }
    t = quantized(model, [randn(64, 16)], chip, **known).plan.tensors["sigmoid"]
    assert t.grid.bits == 4 and t.origin.startswith("known beforehand") and float(t.scale) == 1 / 16


def test_weights_are_fitted_only_if_a_correction_rounds_them_by_a_method_that_fits():
    chip = load("ort_cpu")
    by_method = {m: Decision(platform=chip, settings=chipfit.Settings(rounding=m)) for m in ("gptq", "off")}
    fitted = {(m, c): RoundingModel.of(d, c).fitted for m, d in by_method.items() for c in ((), ("rounding",))}
    assert [key for key, is_fitted in fitted.items() if is_fitted] == [("gptq", ("rounding",))]
