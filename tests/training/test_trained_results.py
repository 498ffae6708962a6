"""A model that was trained is not forgotten: a result does not export, verify, save or edit the old weights unasked."""

import pytest
import torch

from chipfit.errors import PlanError
from tests.build import mlp, quantized

X = torch.randn(16, 6)


@pytest.fixture
def result():
    return quantized(mlp(6, 8, 3), X)


def train(model):
    model.train()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 0.1)
    model(X).square().sum().backward()
    optimizer.step()
    model.eval()


USES = {
    "export": lambda r, d: r.export(d / "net.onnx"),
    "verify": lambda r, d: r.verify([X]),
    "save": lambda r, d: r.save(d / "saved"),
    "edit": lambda r, d: r.edit({"2": "float"}),
}


@pytest.mark.parametrize("use", USES)
def test_old_weights_are_not_used_in_silence(use, result, tmp_path):
    result.model(X)
    USES[use](result, tmp_path)  # nothing has changed yet
    train(result.model)
    with pytest.raises(PlanError, match=r"result.trained\(\).*result.as_calibrated\(\)"):
        USES[use](result, tmp_path)


@pytest.mark.parametrize("change", ["weight", "scale", "loaded"])
def test_every_number_counts(change, result, tmp_path):
    if change == "weight":
        result.model.get_parameter("0.weight").data[0, 0] += 1e-3
    elif change == "scale":
        result.model.quantizer_of(result.graph.inputs[0]).scale.data.mul_(2)
    else:
        result.model.load_state_dict({k: v * 2 for k, v in result.model.state_dict().items()})
    with pytest.raises(PlanError):
        result.export(tmp_path / "net.onnx")


def test_loading_a_state_fills_the_parameters_that_an_optimizer_holds(result):
    held, state = result.model.get_parameter("0.weight"), result.model.state_dict()
    result.model.load_state_dict({k: v.clone() for k, v in state.items()})
    assert result.model.get_parameter("0.weight") is held


def test_both_ways_out_say_which_weights_are_meant(result, tmp_path):
    old = result.graph.weights["0.weight"].clone()
    train(result.model)
    after, before = result.trained(), result.as_calibrated()
    assert not torch.equal(after.graph.weights["0.weight"], old)
    assert torch.equal(before.graph.weights["0.weight"], old)
    for r in (after, before):
        assert r.verify([X]).exact
    assert torch.equal(before.model(X), result.as_calibrated().model(X))
    assert not torch.equal(after.model(X), before.model(X)) and torch.equal(after.model(X), result.model(X))
