"""Batch norms that train, folded in each step, inside a whole simulation: exported and exact like any other."""

import copy

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import ConfigError, UnsupportedError
from chipfit.plan.training import Training
from tests.build import quantized
from tests.training.small import DATA, NormedNet, set_share, train


@pytest.fixture(scope="module")
def plain():
    return quantized(NormedNet(), DATA, settings=chipfit.Settings(repairs="off"))


def test_a_corrected_bias_stays_in_the_batch_norm():
    result, plain = (quantized(NormedNet(), DATA, settings=chipfit.Settings(repairs=r)) for r in (None, "off"))
    assert result.corrections == ("measured_bias",)
    weights = [r.trains(Training("lsq", bn_fold=1)).model.state_dict() for r in (result, plain)]
    moved = result.graph.weights["body.bias"] - plain.graph.weights["body.bias"]
    torch.testing.assert_close(weights[0]["bn2.bias"] - weights[1]["bn2.bias"], moved, rtol=0.01, atol=1e-6)
    torch.testing.assert_close(weights[0]["body.weight"], weights[1]["body.weight"])


@pytest.mark.parametrize("bn_fold", [-1, 1, 2, 3, 4])
def test_without_rounding_it_is_the_model_of_the_user(bn_fold, plain):
    own = NormedNet().train(bn_fold != 1)
    model = plain.trains(Training("lsq", bn_fold=bn_fold)).model
    set_share(model, 0.0)
    expected = own.state_dict()
    dead = expected["bn2.weight"] == 0  # folded to zeros, of which nothing comes back
    for name, t in model.state_dict().items():
        if name in expected and name not in ("body.weight", "body.bias"):
            torch.testing.assert_close(t, expected[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.weight("body.weight")[~dead], expected["body.weight"][~dead])
    for m in (own, model):
        with torch.no_grad():
            m.get_parameter("body.weight")[dead], m.get_parameter("body.bias")[dead] = 0, 0
    train(own, 3, 0.05, mode=bn_fold != 1), train(model, 3, 0.05)
    for name, t in own.state_dict().items():  # weights, gammas, betas and statistics after three steps
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(model.state_dict()[name], t, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("bn_fold", [1, 2, 3, 4])
def test_what_was_trained_is_exact_on_the_device(bn_fold, plain):
    result = plain.trains(Training("lsq", bn_fold=bn_fold))
    before = copy.deepcopy(result.model.state_dict())
    train(result.model, 4, 0.05)
    moved = {n for n, t in result.model.state_dict().items() if not torch.equal(t, before[n])}
    assert {"bn1.weight", "bn1.bias", "stem.weight", "bn4.weight"} <= moved
    assert ("bn1.running_mean" in moved) == (bn_fold != 1)
    assert "stem.bias" not in moved  # the layer had none
    after = result.trained()
    assert torch.equal(after.model(DATA[1]), result.model(DATA[1]))  # nothing is repaired at the end
    verified = after.verify([2 * DATA[2]])
    assert verified.exact, verified


def test_what_was_never_folded_trains_and_is_not_deployed(plain):
    result = plain.trains(Training("lsq", bn_fold=-1))
    train(result.model, 4, 0.05)
    for leave in (result.trained, lambda: result.export("never.onnx")):
        with pytest.raises(UnsupportedError, match="bn_fold=-1 rounds weights without their batch norm"):
            leave()


def test_batch_norms_train_in_few_bits_without_a_setting():
    """Weights of fewer than 6 bits are rounded in closed form otherwise, after which no batch norm comes apart."""
    few = {"fc": {"bits": 4}}
    result = quantized(NormedNet(), DATA, "imx500", overrides=few, training={"method": "lsq", "bn_fold": 4})
    train(result.model, 1, 0.05)
    assert result.trained().plan["fc.weight"].grid.bits == 4
    with pytest.raises(UnsupportedError, match='rounding="off"'):
        quantized(NormedNet(), DATA, "imx500", overrides=few).trains({"method": "lsq", "bn_fold": 4}).model


def test_training_goes_on_after_it_was_saved(plain, tmp_path):
    result = plain.trains({"method": "lsq", "bn_fold": 4})
    train(result.model, 2, 0.05)
    result.trained().save(tmp_path / "saved")
    again = chipfit.load(tmp_path / "saved").trains({"method": "lsq", "bn_fold": 4})
    torch.testing.assert_close(again.model(DATA[1]), result.model(DATA[1]), rtol=0.05, atol=0.05)
    torch.testing.assert_close(again.model.weight("stem.weight"), result.model.weight("stem.weight"))
    train(again.model, 1, 0.05)
    assert not torch.equal(again.model.weight("bn1.running_mean"), result.model.weight("bn1.running_mean"))


def test_what_cannot_be_told_apart_is_refused(plain):
    for bad in (5, True, "1"):
        with pytest.raises(ConfigError, match="'bn_fold' (must|should) be"):
            Training("lsq", bn_fold=bad)
    with pytest.raises(ConfigError, match="at most 1"):
        Training("lsq", bn_momentum=2)
    settings = chipfit.Settings(equalize=True)
    changed = quantized(NormedNet(), DATA, settings=settings)
    with pytest.raises(UnsupportedError, match=r"changed after its batch norm was folded.*bn_fold=0"):
        changed.trains(Training("lsq", bn_fold=1)).model
    flat = quantized(nn.Linear(4, 4), torch.randn(8, 4))
    with pytest.raises(UnsupportedError, match="no folded batch norm"):
        flat.trains(Training("lsq", bn_fold=1)).model


@pytest.mark.parametrize("name", ["dorefa", "qil", "n2uq"])
def test_strategy_4_is_refused_where_weights_have_no_scale(name, plain):
    training = {"weights": name, "activations": "lsq"}
    with pytest.raises(UnsupportedError, match=r"bn_fold=4 .* bn_fold 1 to 3"):
        plain.trains({**training, "bn_fold": 4}).model
    result = plain.trains({**training, "bn_fold": 2})
    train(result.model, 3, 0.01)
    assert result.trained().verify([2 * DATA[2]]).exact
