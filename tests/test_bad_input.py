"""Bad input: a typed error that says what to do, or a correct result; never a half-written file."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import (
    CaptureError,
    ChipfitError,
    DataError,
    ExportError,
    NothingQuantizedError,
    PlanError,
    UnknownNameError,
    UnsupportedError,
)
from tests.zoo import make


def fit(model, data, **options):
    return chipfit.quantize(model, data, platform=options.pop("platform", "ort_cpu"), progress=False, **options)


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()


X = torch.randn(4, 3, 8, 8)


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("data", [[], iter([]), list])
def test_empty_data_are_refused(data):
    with pytest.raises(DataError, match="empty"):
        fit(small(), data)


def test_one_sample_is_enough():
    result = fit(small(), [X[:1]])
    assert result.verify([X]).exact


def test_a_single_tensor_is_cut_into_batches():
    assert fit(small(), X).verify(X).exact


def test_labels_of_a_data_loader_are_left_out():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, torch.arange(4)), batch_size=2)
    assert fit(small(), loader).verify(loader).samples == 4


def test_a_generator_function_can_be_given():
    assert fit(small(), lambda: (X for _ in range(2))).verify([X]).exact


def test_the_first_nan_names_its_layer():
    model = small()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with pytest.raises(DataError, match=r"NaN or infinite values in layer '2'"):
        fit(model, [X])


def test_infinite_inputs_are_named():
    with pytest.raises(DataError, match="input 'input'"):
        fit(small(), [torch.full((2, 3, 8, 8), float("inf"))])


def test_integer_images_for_a_float_model_are_refused_with_the_cure():
    with pytest.raises((DataError, CaptureError), match="float|dtype|type"):
        fit(small(), [torch.zeros(2, 3, 8, 8, dtype=torch.uint8)])


def test_a_batch_of_another_shape_is_named():
    with pytest.raises(DataError, match=r"\[2, 3, 6, 6\].*'batch', 3, 8, 8"):
        fit(small(), [X, torch.randn(2, 3, 6, 6)])


def test_a_smaller_last_batch_is_fine():
    assert fit(small(), [X, X[:1]]).verify([X[:3]]).exact


def test_a_string_is_not_data():
    with pytest.raises(DataError, match="not calibration data"):
        fit(small(), "images")


# ---------------------------------------------------------------- numbers at the edge


@pytest.mark.parametrize("value", [0.0, 1e-30, 3.0, 1e6])
def test_constant_inputs_give_an_exact_result(value):
    x = torch.full((2, 3, 8, 8), value)
    assert fit(small(), [x]).verify([x]).exact


def test_dead_channels_and_all_zero_weights_give_an_exact_result():
    model = small()
    with torch.no_grad():
        model[0].weight[1] = 0
        model[0].bias[1] = 5.0  # alone in its channel: the weight scale has to grow until int32 holds it
        model[2].weight.zero_()
    result = fit(model, [X])
    assert result.verify([X]).exact
    with torch.no_grad():
        assert torch.isfinite(result.model(X)).all()


def test_one_huge_outlier_does_not_break_anything():
    x = X.clone()
    x[0, 0, 0, 0] = 1e8
    assert fit(small(), [x]).verify([x]).exact


# ---------------------------------------------------------------- models, names, platforms


def test_branching_on_values_names_the_users_line():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)

        def forward(self, x):
            y = self.l(x)
            return y.relu() if y.sum() > 0 else y

    with pytest.raises(CaptureError, match=r"test_bad_input.py:\d+, in forward") as e:
        fit(Branch(), [torch.randn(2, 8)])
    assert "torch.where" in str(e.value)


def test_a_model_that_fails_by_itself_is_reported_as_that():
    with pytest.raises(CaptureError, match="fails on the example input"):
        fit(small(), [torch.randn(2, 5, 8, 8)])


def test_a_class_is_not_a_model():
    with pytest.raises(CaptureError, match="instance"):
        fit(nn.Linear, [X])


def test_an_unknown_platform_lists_near_ones():
    with pytest.raises(UnknownNameError, match="ort_cpu"):
        fit(small(), [X], platform="ort-cpu")


def test_an_unknown_layer_lists_near_ones():
    model, batch = make("residual")
    with pytest.raises(UnknownNameError, match="'head'"):
        fit(model, [batch], overrides={"haed": "float"})


def test_an_unknown_rule_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match="mse"):
        fit(small(), [X], rule="msee")


def test_an_override_that_is_no_decision_is_refused():
    with pytest.raises(PlanError, match="not understood"):
        fit(small(), [X], overrides={"0": "int8"})


def test_bits_that_the_platform_does_not_have_are_refused():
    with pytest.raises(UnsupportedError, match="3-bit"):
        fit(small(), [X], overrides={"0": {"bits": 3}})


def test_quantizing_nothing_is_an_error():
    with pytest.raises(NothingQuantizedError, match="overrides keep"):
        fit(small(), [X], overrides={"Conv2D": "float", "Relu": "float"})


def test_a_platform_that_rejects_an_operator_says_so(tmp_path):
    file = tmp_path / "strict.yaml"
    file.write_text(
        "name: strict\nunlisted: reject\nformats: {a: {bits: 8, zero: any}}\n"
        "ops: [{match: [Relu], use: [{in: a, out: a}], src: [S], conf: I}]\nsources: {S: me}\n"
    )
    with pytest.raises(UnsupportedError, match="Conv2D '0' cannot run on 'strict'"):
        fit(small(), [X], platform=file)


# ---------------------------------------------------------------- files


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    result = fit(small(), [X])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ExportError, match="No space left"):
        result.export(tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_kill_during_export_leaves_the_old_file(tmp_path, monkeypatch):
    result = fit(small(), [X])
    file = result.export(tmp_path / "m.onnx")
    before = file.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        result.export(file)
    assert file.read_bytes() == before


def test_an_unknown_file_format_lists_the_known_ones(tmp_path):
    with pytest.raises(UnknownNameError, match=".onnx"):
        fit(small(), [X]).export(tmp_path / "m.onx")


def test_an_opset_that_is_too_old_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="opset 13"):
        fit(small(), [X]).export(tmp_path / "m.onnx", opset=11)


@pytest.mark.parametrize("name", ["plan.json", "plan.safetensors", "weights.safetensors"])
def test_a_truncated_saved_result_is_refused(tmp_path, name):
    folder = fit(small(), [X]).save(tmp_path / "saved")
    file = folder / name
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(PlanError, match=name):
        chipfit.load(folder)


def test_verifying_on_nothing_is_an_error():
    with pytest.raises(ChipfitError, match="no data"):
        fit(small(), [X]).verify([])


def test_numpy_arrays_and_float64_are_accepted():
    assert fit(small(), [np.asarray(X, dtype=np.float64)]).verify([X.numpy()]).exact
