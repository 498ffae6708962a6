"""Quantization-aware training under MCT's names; of Keras: tests/frameworks/keras/test_trainable.py."""

import copy
import io

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import ConfigError, PlanError, UnknownNameError
from chipfit.qat import QATConfig, TrainingMethod, result_of
from chipfit.registry import registered
from chipfit.trainable_infrastructure import PytorchActivationQuantizationHolder, PytorchQuantizationWrapper
from tests.build import quantized
from tests.training.small import DATA, train

X = DATA[0]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 5)).eval()


def batches():
    yield [X]


def init(**options):
    platform = {"target_platform_capabilities": "ort_cpu", **options}
    return chipfit.pytorch_quantization_aware_training_init_experimental(net(), batches, **platform)


def from_file(model, path):
    torch.save(model, path)
    return torch.load(path, weights_only=False)


def test_a_model_from_a_file_of_torch_is_finalized_exported_and_verified(tmp_path):
    model, _ = init(qat_config=QATConfig("lsq", "lsq"))
    train(model)
    want = model(X)
    loaded = from_file(model, tmp_path / "trainable.pt")
    final = from_file(chipfit.pytorch_quantization_aware_training_finalize_experimental(loaded), tmp_path / "final.pt")
    assert torch.equal(final(X), chipfit.pytorch_quantization_aware_training_finalize_experimental(model)(X))
    torch.testing.assert_close(final(X), want.detach(), rtol=0, atol=1e-5)
    result = result_of(final)
    result.export(tmp_path / "model.onnx")
    assert result.verify([X]).exact and (tmp_path / "model.onnx").exists()


def test_a_file_of_a_model_that_was_trained_since_is_no_result(tmp_path):
    model, _ = chipfit.pytorch_post_training_quantization(net(), batches, target_platform_capabilities="ort_cpu")
    assert result_of(from_file(model, tmp_path / "calibrated.pt")).plan.tensors.keys()
    train(model)
    with pytest.raises(PlanError, match="has changed since it was made"):
        result_of(from_file(model, tmp_path / "trained.pt"))


def test_train_finalize_export_and_verify(tmp_path):
    config = QATConfig(TrainingMethod.LSQ, TrainingMethod.LSQ, {"use_grad_scaling": False})
    model, information = init(qat_config=config)
    kinds = {type(m) for m in model.modules()}
    for kind in (PytorchActivationQuantizationHolder, PytorchQuantizationWrapper):
        assert any(issubclass(k, kind) for k in kinds)
    assert not information.result.training.weights.use_grad_scaling
    assert information.result.training.activations.use_grad_scaling
    assert information.result.model is model
    train(model)
    averaged = copy.deepcopy(model)
    final = chipfit.pytorch_quantization_aware_training_finalize(model)
    trainable = [n for n, p in final.named_parameters() if p.requires_grad]
    assert torch.equal(final(X), model(X)) and not any("quant" in n for n in trainable)
    result = result_of(final)
    assert torch.equal(result.plan["3.weight"].scale, model.quantizer_of("3.weight").numbers()[0].detach())
    assert result.export(tmp_path / "net.onnx").is_file() and result.verify([X]).exact
    again = chipfit.qat.pytorch_quantization_aware_training_finalize_experimental(averaged)
    assert torch.equal(again(X), final(X))  # also for a copy


def test_the_default_method_is_straight_through_rounding():
    model, information = init()
    assert not [n for n, p in model.named_parameters() if p.requires_grad and "quant." in n]
    assert type(information.result.training.weights).__name__ == "STE"


def test_every_algorithm_is_a_training_method():
    assert {m.value for m in TrainingMethod} == set(registered("training"))


def test_a_trained_model_has_no_result_until_it_is_finalized():
    model, _ = init()
    assert result_of(model).plan is not None
    train(model)
    with pytest.raises(PlanError, match="trained"):
        result_of(model)


def test_a_model_of_no_facade_is_refused():
    for use in (result_of, chipfit.pytorch_quantization_aware_training_finalize):
        with pytest.raises(PlanError, match="does not come from a facade"):
            use(net())


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        (lambda: QATConfig("lsk"), UnknownNameError, "'lsq'"),
        (lambda: QATConfig(TrainingMethod.LSQ, "ste", {"scaling": True}), UnknownNameError, "use_grad_scaling"),
        (lambda: QATConfig(weight_method="lsq"), UnknownNameError, "weight_training_method"),
        (lambda: QATConfig(weight_quantizer_params_override=3), ConfigError, "weight_quantizer_params_override"),
        (lambda: QATConfig(7), ConfigError, "training algorithm"),
        (lambda: "lsq", ConfigError, "qat_config"),
    ],
)
def test_invalid_methods_are_refused(config, error, says):
    with pytest.raises(error, match=says):
        init(qat_config=config())


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: {k: v for k, v in state.items() if k != "quant.input.scale"}, "quant.input.scale"),
        (lambda state: {**state, "3.weight": torch.zeros(5, 5)}, "3.weight"),
        (lambda state: {f"module.{k}": v for k, v in state.items()}, "module"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(change, says):
    model, _ = init()
    with pytest.raises(PlanError, match=f"(?s)another plan.*{says}"):
        model.load_state_dict(change(model.state_dict()))


def test_a_checkpoint_of_other_grids_is_refused():
    result, other = (quantized(net(), X, "imx500", overrides=o) for o in (None, {"3": {"bits": 4}}))
    torch.save(other.model.state_dict(), file := io.BytesIO())
    file.seek(0)
    for state in (other.model.state_dict(), torch.load(file, weights_only=True)):
        with pytest.raises(PlanError, match=r"(?s)another plan.*3\.weight.*bit"):
            result.model.load_state_dict(state)
