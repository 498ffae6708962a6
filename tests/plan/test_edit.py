"""Editing a decision: the plan is that of a call with the same overrides, and the result is still exact."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.errors import ChipfitError, NothingQuantizedError, PlanError, UnknownNameError
from tests.build import images, model_of, quantized
from tests.zoo import make


@pytest.fixture(scope="module")
def fitted():
    model, batch = make("residual")
    return quantized(model, batch), batch


def test_excluding_a_layer_leaves_every_other_number_as_it_was(fitted):
    result, batch = fitted
    edited = result.edit({"head": "float"})
    assert edited.plan.nodes["linear"].why == "overrides keep 'head' in float"
    for name, t in edited.plan.tensors.items():
        if t.quantized and t.role != "bias":
            assert torch.equal(t.scale, result.plan.tensors[name].scale)
    assert edited.verify([batch]).exact


@pytest.mark.parametrize("name, op", [("Add", "Add"), ("Conv2d", "Conv2D")])
def test_operators_and_layer_types_are_excluded_by_their_name(name, op, fitted):
    assert all(n.exec == "float" for n in fitted[0].edit({name: "float"}).plan.nodes.values() if n.op == op)


def test_other_bits_for_one_layer():
    model, batch = make("residual")
    result = quantized(model, batch, "imx500")
    edited = result.edit({"a.0": {"bits": 4}})
    changed = [n for n, t in edited.plan.tensors.items() if t.grid != result.plan.tensors[n].grid]
    assert changed == ["a.0.weight"] and edited.plan.tensors["a.0.weight"].grid.bits == 4


def test_a_loaded_result_can_be_edited(fitted, tmp_path):
    result, batch = fitted
    edited = chipfit.load(result.save(tmp_path / "saved")).edit({"a": "float"})
    assert edited.verify([batch]).sound
    same = chipfit.load(tmp_path / "saved").edit({"head": "float"})
    assert {n: t.scale for n, t in same.plan.tensors.items() if t.quantized}.keys() == {
        n for n, t in result.edit({"head": "float"}).plan.tensors.items() if t.quantized
    }


BROKEN = {  # platform, tensor whose scale is changed by hand -> what is wrong then
    ("ort_cpu", "a.bias"): r"Linear: a.bias \* x\^-1 \* a.weight\^-1 = 1",
    ("tflite_int8", "a.weight"): "break a rule",
    ("tflite_int8", "cat"): "must share scale and zero point",
    ("tflite_int8", "sigmoid"): "dictates the scale of 'sigmoid'",
}


@pytest.mark.parametrize("platform, tensor", BROKEN)
def test_a_scale_that_is_changed_by_hand_breaks_no_rule_in_silence(platform, tensor):
    net = model_of(lambda m, x: torch.cat([m.a(x).sigmoid(), m.a(x)[:, :1].relu()], 1), a=nn.Linear(8, 8))
    result = quantized(net, [torch.randn(16, 8)], platform)
    changed = result.plan.tensors[tensor].with_(scale=result.plan[tensor].scale * 2**12)
    plan = replace(result.plan, tensors={**result.plan.tensors, tensor: changed})
    with pytest.raises(PlanError, match=BROKEN[platform, tensor]):
        replace(result, plan=plan)


def test_mistakes_are_typed_errors(fitted):
    result, _ = fitted
    with pytest.raises(UnknownNameError, match="'head'"):
        result.edit({"haed": "float"})
    with pytest.raises(PlanError, match="'head.wieght'.*Try: 'head.weight'"):
        result.plan["head.wieght"]
    with pytest.raises(NothingQuantizedError):
        result.edit({"Conv2D": "float", "Linear": "float", "Relu": "float", "Add": "float", "GlobalAvgPool": "float"})
    with pytest.raises(PlanError, match="has an unknown form"):
        result.edit({"head": {"bitz": 4}})


# ---------------------------------------------------------------- an edit is a call with these overrides

DATA = [images(8, 8, seed=s) for s in range(3)]


def joins():
    """Return a network with ties, a residual addition, a fixed scale, and an output that joins two magnitudes."""
    torch.manual_seed(0)

    def forward(m, x):
        y = m.a(x).relu()
        z = torch.cat([m.b(y), m.c(y).sigmoid() * 3], 1)
        p = F.avg_pool2d(F.silu(m.e(m.d(z).relu() + y)), 2).flatten(1)
        return torch.cat([m.f(p) * 100, m.g(p).softmax(1)], 1)

    layers = {"a": nn.Conv2d(3, 8, 3, padding=1), "b": nn.Conv2d(8, 4, 1), "c": nn.Conv2d(8, 4, 1)}
    layers |= {"d": nn.Conv2d(8, 8, 3, padding=1), "e": nn.Conv2d(8, 4, 1)}
    return model_of(forward, **layers, f=nn.Linear(64, 6), g=nn.Linear(64, 5))


LAYERS = "a c sigmoid cat e silu avg_pool2d flatten g softmax cat_1".split()
OVERRIDES = [{name: "float"} for name in LAYERS]
OVERRIDES += [{name: {"rule": "no_clipping"}} for name in ("b", "mul", "cat", "avg_pool2d", "cat_1")]
OVERRIDES += [{"mul_1": {"range": (-2.0, 2.0)}}, {"e": {"activation_bits": "float"}}, {"a": {"bits": 4}}]
OVERRIDES += [{"*": {"activation_bits": 16}}, {"cat_1": {"result": "codes"}}, {"Conv2D": "float"}]


def told(make):
    """Return a plan without its history, or the text of the error."""
    try:
        plan = make().plan
    except ChipfitError as e:
        return str(e)
    seen = {k: [x if x is None else f"{x:.4g}" for x in (t.low, t.high)] for k, t in plan.tensors.items()}
    stored = {k: (t.format, str(t.stored), t.why, t.origin, seen[k]) for k, t in plan.tensors.items()}
    return stored, plan.nodes, plan.groups, plan.float_edges, plan.ties, str(plan.limits), plan.rewrites


PLATFORMS = {"ort_cpu": 1, "tflite_int8": 1, "vitis_dpu": 3, "imx500": 4, "tensorrt": 5, "mqbench_academic": 6}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("platform, every", PLATFORMS.items())
def test_an_edit_gives_the_plan_of_a_call_with_these_overrides(platform, every):
    settings = chipfit.Settings(repairs="off")  # an edit tries nothing anew
    result = quantized(joins(), DATA, platform, settings=settings)
    for overrides in OVERRIDES[every // 2 :: every]:
        edited = told(lambda o=overrides: result.edit(o))
        assert edited == told(lambda o=overrides: quantized(joins(), DATA, platform, overrides=o, settings=settings)), (
            overrides
        )


def test_an_edit_without_data_lets_go_of_the_scales_of_ties_that_it_ends(tmp_path):
    """Loaded results keep ranges and no histograms: numbers stay, except where an edit changes what shares them."""
    loaded = chipfit.load(quantized(joins(), DATA, "tflite_int8").save(tmp_path / "saved"))
    before, edited = loaded.plan, loaded.edit({"cat": "float"}).plan
    assert before["conv2d_1"].scale == before["cat"].scale  # tied to the sigmoid, times 3
    seen = before.tensors["conv2d_1"]
    assert float(edited["conv2d_1"].scale) == pytest.approx((seen.high - seen.low) / 255, rel=0.05)
    assert float(before["conv2d_1"].scale) > 1.2 * float(edited["conv2d_1"].scale)
    assert edited["relu"].same_numbers(before["relu"])
