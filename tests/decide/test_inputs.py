"""How a layer takes its data: in codes, rounding them itself, in float; and what shares a scale of its weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.decide.groups import block_of, blocks_of
from chipfit.errors import PlanError, UnsupportedError
from chipfit.graph.ir import DYNAMIC
from chipfit.platform.schema import Format, OpRule, Option, Platform
from chipfit.ranges import choose

DATA = [torch.randn(8, 64)]
OFF = chipfit.Settings(rounding="off")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 40), nn.GELU(), nn.Linear(40, 10)).eval()


def quantized(overrides=None, platform="ort_cpu", **options):
    return chipfit.quantize(model(), DATA, platform, overrides=overrides, settings=OFF, progress=False, **options)


def runs(result) -> dict[str, str]:
    return {n.layer: n.exec for n in result.plan.nodes.values() if n.op == "Linear"}


def test_a_layer_takes_its_data_as_the_user_says():
    result = quantized({"0": {"inputs": "dynamic"}, "2": {"inputs": "float"}})
    assert runs(result) == {"0": "int", "2": "float", "4": "int"}
    assert [n.op for n in result.graph.nodes][:2] == [DYNAMIC, "Linear"]
    assert result.plan[result.graph.node("linear_1").weight].format == "wb8"
    (weights_alone,) = [n.why for n in result.plan.nodes.values() if n.layer == "2"]
    assert weights_alone == "its weights alone are stored in codes"
    assert result.report.integer_share == pytest.approx((64 * 96 + 40 * 10) / (64 * 96 + 96 * 40 + 40 * 10))


def test_an_edit_takes_it_back():
    before = quantized()
    result = before.edit({"*": {"inputs": "dynamic"}})
    assert torch.equal(result.model(DATA[0]), quantized({"*": {"inputs": "dynamic"}}).model(DATA[0]))
    back = result.edit({})
    assert DYNAMIC in {n.op for n in result.graph.nodes} and DYNAMIC not in {n.op for n in back.graph.nodes}
    assert torch.equal(back.model(DATA[0]), before.model(DATA[0]))


def test_a_saved_result_rounds_as_before(tmp_path):
    result = quantized([("*", {"inputs": "dynamic"}), ("2", {"inputs": "dynamic", "bits": 4})])
    again = chipfit.load(result.save(tmp_path / "saved"))
    assert torch.equal(again.model(DATA[0]), result.model(DATA[0]))
    assert again.plan["2.weight"].scale.shape == (40, 3) and again.plan["2.weight"].axis == 1


def test_blocks_that_do_not_divide_a_row_are_passed_over():
    result = quantized({"*": {"inputs": "float"}})  # 40 is no multiple of 32
    assert runs(result) == {"0": "float", "2": "float", "4": "int"}
    assert any(
        "changes nothing for '4'" in line or "'4' (its inputs are 'codes')" in line for line in result.plan.rewrites
    )
    with pytest.raises(UnsupportedError, match="'4' cannot have 4-bit weights"):
        quantized({"4": {"bits": 4}})


def test_what_no_kernel_does_is_refused_by_name():
    with pytest.raises(PlanError, match="its inputs are 'codes'"):
        quantized({"0": {"inputs": "dynamic"}}, "tensorrt")
    with pytest.raises(PlanError, match="'relu' has no weights|has no weights"):
        quantized({"1": {"inputs": "dynamic"}})
    with pytest.raises(PlanError, match='"codes", "dynamic"'):
        quantized({"0": {"inputs": "static"}})
    with pytest.raises(UnsupportedError, match="cannot have this scale per"):
        quantized({"0": {"per": "block"}}, "tflite_int8")


def test_a_table_of_embeddings_reads_no_floats():
    network = nn.Sequential(nn.Embedding(20, 64), nn.Linear(64, 32)).eval()
    ids, plain = [torch.randint(0, 20, (4, 3))], {"settings": OFF, "progress": False}
    with pytest.raises(PlanError, match="changes nothing for '0' .its inputs are not floats"):
        chipfit.quantize(network, ids, "ort_dynamic", overrides={"0": {"inputs": "dynamic"}}, **plain)
    result = chipfit.quantize(network, ids, "ort_dynamic", overrides={"*": {"inputs": "dynamic"}}, **plain)
    assert any("its inputs are not floats" in line for line in result.plan.rewrites)


def test_training_leaves_the_scales_of_blocks_and_learns_the_weights():
    with pytest.raises(UnsupportedError, match="its blocks have a scale each, which stay") as e:
        quantized({"0": {"bits": 4}}, "ort_dynamic", training="lsq")
    assert "'only': {'0.weight': None}" in str(e.value)
    result = chipfit.quantize(
        model(), DATA, "ort_dynamic", overrides={"0": {"bits": 4}}, settings=OFF, progress=False,
        training={"method": "lsq", "only": {"0.weight": None}},
    )  # fmt: skip
    network = result.model.train()
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], 0.01)
    x, y = torch.randn(64, 64), torch.randn(64, 10)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    after = result.trained()
    assert torch.equal(after.plan["0.weight"].scale, result.plan["0.weight"].scale)
    assert not torch.equal(after.graph.weights["0.weight"], result.graph.weights["0.weight"])
    assert after.verify([torch.randn(16, 64)]).sound


# ---------------------------------------------------------------- on paper


def test_each_block_has_the_scale_that_it_would_have_alone():
    w = torch.tensor([[1.0, -7.0, 0.1, 0.3], [14.0, 2.0, -0.7, 0.0]])
    grid = Format(bits=4, range="narrow").grid()
    q = choose(w, grid, rule="no_clipping", axis=1, block=2)
    assert torch.allclose(q.scale, torch.tensor([[1.0, 0.3 / 7], [2.0, 0.1]]))
    down = choose(w.t().contiguous(), grid, rule="no_clipping", axis=0, block=2)
    assert torch.equal(down.scale, q.scale.t())


def test_blocks_lie_along_what_is_summed_and_along_rows_that_are_picked():
    fmt = Format(bits=4, per="block", axis="in", block=(64, 32))
    assert blocks_of(fmt, "Linear", (96, 64)) == (1, 64) and blocks_of(fmt, "Linear", (64, 96)) == (1, 32)
    assert blocks_of(fmt, "MatMul", (64, 10)) == (0, 64) and blocks_of(fmt, "Embedding", (10, 64)) == (1, 64)
    assert blocks_of(fmt, "Linear", (10, 40)) is None and blocks_of(fmt, "Conv2D", (8, 32, 1, 1)) is None
    assert block_of(fmt, None) is None and block_of(Format(bits=4), 64) is None


@pytest.mark.parametrize(
    "formats, option, op, gap",
    [
        ({"d": {"dynamic": True, "per": "row"}}, {"in_": "d", "w": "w", "out": "float"}, "Conv2D", "input of Conv2D"),
        ({"d": {"dynamic": True}}, {"in_": "a", "w": "w", "out": "d"}, "Linear", "than the first"),
        ({"d": {"per": "block", "axis": "in", "block": 4}}, {"in_": "d", "w": "w", "out": "a"}, "Linear", "activat"),
    ],
)  # fmt: skip
def test_formats_that_no_slot_of_a_kernel_can_have_are_named(formats, option, op, gap):
    from chipfit.platform.match import resolve

    table = {"a": Format(bits=8), "w": Format(bits=8), **{k: Format(bits=8, **f) for k, f in formats.items()}}
    rule = OpRule(match=(op,), use=(Option(**option),), src=("M",), conf="V")
    found = resolve(Platform(name="paper", formats=table, ops=(rule,), sources={"M": "paper"}), op, {})
    assert not found.options and gap in found.why
