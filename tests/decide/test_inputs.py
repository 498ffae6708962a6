"""Input modes: a layer reads quantized values, quantizes its input at run time, or reads floats; weights in blocks."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import PlanError, UnsupportedError
from chipfit.graph.ir import DYNAMIC
from chipfit.platform.schema import Format
from chipfit.ranges import choose
from tests.accelerators import moved
from tests.build import NEAREST, quantized, sequential

DATA = torch.randn(8, 64)


def fit(overrides=None, platform="ort_cpu", **options):
    torch.manual_seed(0)
    model = sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 40), nn.GELU(), nn.Linear(40, 10))
    return quantized(model, DATA, platform, overrides=overrides, settings=NEAREST, **options)


def runs(result) -> dict[str, str]:
    return {n.layer: n.exec for n in result.plan.nodes.values() if n.op == "Linear"}


def test_a_layer_reads_its_input_as_the_user_chooses():
    result = fit({"0": {"inputs": "dynamic"}, "2": {"inputs": "float"}})
    assert runs(result) == {"0": "int", "2": "float", "4": "int"}
    assert [n.op for n in result.graph.nodes][:2] == [DYNAMIC, "Linear"]
    assert result.plan[result.graph.node("linear_1").weight].format == "wb8"
    (why,) = [n.why for n in result.plan.nodes.values() if n.layer == "2"]
    assert why == "only its weights are quantized"
    assert result.report.integer_share == pytest.approx((64 * 96 + 40 * 10) / (64 * 96 + 96 * 40 + 40 * 10))


def test_an_edit_takes_dynamic_inputs_back():
    before = fit()
    result = before.edit({"*": {"inputs": "dynamic"}})
    assert torch.equal(moved(result.model, "cpu")(DATA), fit({"*": {"inputs": "dynamic"}}).model(DATA))
    back = result.edit({})
    assert DYNAMIC in {n.op for n in result.graph.nodes} and DYNAMIC not in {n.op for n in back.graph.nodes}
    assert torch.equal(moved(back.model, "cpu")(DATA), before.model(DATA))


def test_a_saved_result_rounds_as_before(tmp_path):
    result = fit([("*", {"inputs": "dynamic"}), ("2", {"inputs": "dynamic", "bits": 4})])
    again = chipfit.load(result.save(tmp_path / "saved"))
    assert torch.equal(again.model(DATA), result.model(DATA))
    assert again.plan["2.weight"].scale.shape == (40, 3) and again.plan["2.weight"].axis == 1


def test_blocks_that_do_not_divide_a_row_are_passed_over():
    result = fit({"*": {"inputs": "float"}})  # 40 is no multiple of 32
    assert runs(result) == {"0": "float", "2": "float", "4": "int"}
    assert any("'4' (its inputs are 'codes')" in line for line in result.plan.rewrites)
    with pytest.raises(UnsupportedError, match="'4' cannot have 4-bit weights"):
        fit({"4": {"bits": 4}})


def test_what_no_kernel_does_is_refused_by_name():
    with pytest.raises(PlanError, match="its inputs are 'codes'"):
        fit({"0": {"inputs": "dynamic"}}, "tensorrt")
    with pytest.raises(PlanError, match="'relu' has no weights|has no weights"):
        fit({"1": {"inputs": "dynamic"}})
    with pytest.raises(PlanError, match='"codes", "dynamic"'):
        fit({"0": {"inputs": "static"}})
    with pytest.raises(UnsupportedError, match="cannot have this scale per"):
        fit({"0": {"per": "block"}}, "tflite_int8")


def test_a_table_of_embeddings_reads_no_floats():
    network, ids = sequential(nn.Embedding(20, 64), nn.Linear(64, 32)), [torch.randint(0, 20, (4, 3))]
    with pytest.raises(PlanError, match="changes nothing for '0' .its inputs are not floats"):
        quantized(network, ids, "ort_dynamic", overrides={"0": {"inputs": "dynamic"}})
    result = quantized(network, ids, "ort_dynamic", overrides={"*": {"inputs": "dynamic"}}, settings=NEAREST)
    assert any("its inputs are not floats" in line for line in result.plan.rewrites)


def test_training_leaves_the_scales_of_blocks_and_learns_the_weights():
    with pytest.raises(UnsupportedError, match="its blocks have a scale each, which stay") as e:
        fit({"0": {"bits": 4}}, "ort_dynamic", training="lsq")
    assert "'only': {'0.weight': None}" in str(e.value)
    result = fit({"0": {"bits": 4}}, "ort_dynamic", training={"method": "lsq", "only": {"0.weight": None}})
    network = result.model.train()
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], 0.01)
    x, y, losses = torch.randn(64, 64), torch.randn(64, 10), []
    for _ in range(20):
        optimizer.zero_grad()
        losses.append(nn.functional.mse_loss(network(x), y))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1].item() < 0.8 * losses[0].item()
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
