"""MCT's XQuant: a report of similarities as data, as JSON, and in TensorBoard."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit as mct
from chipfit.calibration.data import SizeMismatch
from chipfit.errors import ChipfitError, ConfigError
from chipfit.xquant import XQuantConfig, xquant_report_keras_experimental, xquant_report_pytorch_experimental
from tests.build import images, keras_sequential, model_of, small_cnn

KEYS = [f"{where}_similarity_metrics_{data}" for where in ("output", "intermediate") for data in ("repr", "val")]


def representative():
    yield [images(4, seed=1)]
    yield [images(4, seed=2)]


def validation():
    yield [[images(4, seed=3)], torch.zeros(4)]


def quantized(model: nn.Module, **options) -> nn.Module:
    return mct.ptq.pytorch_post_training_quantization(model, representative, **options)[0]


def report(folder: Path, model: nn.Module, own: nn.Module, **metrics) -> dict:
    config = XQuantConfig(report_dir=str(folder), custom_similarity_metrics=metrics or None)
    return xquant_report_pytorch_experimental(model, own, representative, validation, config)


def events(folder: Path) -> list:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (file,) = folder.glob("*events*")
    return [*LegacyEventFileLoader(str(file)).Load()]


def test_the_report_has_mcts_keys_and_metrics_and_is_written_as_json(tmp_path):
    model = small_cnn(norm=True).eval()
    own = quantized(model)
    found = report(tmp_path, model, own, mae=lambda x, y: nn.L1Loss()(x, y).item())
    assert sorted(found) == sorted(KEYS)
    assert list(found["output_similarity_metrics_val"]) == ["mse", "cs", "sqnr", "mae"]
    assert list(found["intermediate_similarity_metrics_repr"]) == ["0", "3", "7"]
    assert json.loads((tmp_path / "quant_report.json").read_text()) == found
    with torch.no_grad():
        want, got = (m(images(4, seed=3)).double() for m in (model, own))
    row = found["output_similarity_metrics_val"]
    assert row["mse"] == pytest.approx(float(F.mse_loss(got, want)), rel=1e-3)
    assert row["sqnr"] == pytest.approx(float(want.square().mean() / (got - want).square().mean()), rel=1e-3)


def test_tensorboard_shows_the_graph_with_the_metrics_of_each_kernel(tmp_path):
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    model = small_cnn(norm=True).eval()
    report(tmp_path, model, quantized(model))
    found = events(tmp_path / "xquant")
    (graph,) = (GraphDef.FromString(e.graph_def) for e in found if e.graph_def)
    measured = [n for n in graph.node if {"xquant_repr", "xquant_val"} <= set(n.attr)]
    assert len(measured) == 3 and b"'cs': " in measured[0].attr["xquant_repr"].s
    assert measured[0].attr["runs"].s == b"int" and measured[0].attr["format"].s
    sources = {n.name for n in graph.node}
    assert all(i in sources for n in graph.node for i in n.input)
    tags = {v.tag for e in found for v in e.summary.value}
    assert {"similarity/mse/0", "similarity/sqnr/output/output"} <= tags
    assert any(t.startswith("activations/") for t in tags)


def test_functional_models_and_models_that_end_in_float_are_reported(tmp_path):
    def forward(m, x):
        return F.softmax(x + m.conv(x), dim=1)

    model = model_of(forward, conv=nn.Conv2d(3, 3, 3, padding=1)).eval()
    found = report(tmp_path, model, quantized(model))
    assert "conv" in found["intermediate_similarity_metrics_val"]
    assert found["output_similarity_metrics_val"]["cs"] > 0.99


def test_a_model_trained_since_is_compared_as_it_is_now(tmp_path):
    model = small_cnn(norm=True).eval()
    own = quantized(model)
    before = report(tmp_path / "before", model, own)["output_similarity_metrics_val"]["mse"]
    with torch.no_grad():
        for p in own.parameters():
            p.mul_(1.5) if p.dim() > 1 else None
    after = report(tmp_path / "after", model, own)["output_similarity_metrics_val"]["mse"]
    assert after > 100 * before


def test_another_float_model_is_compared_by_its_own_values(tmp_path):
    model, other = small_cnn(norm=True).eval(), small_cnn(norm=True, seed=5).eval()
    found = report(tmp_path, other, quantized(model))
    assert found["output_similarity_metrics_val"]["cs"] < 0.9


def test_metrics_of_keras_models_get_arrays(tmp_path):
    import keras  # noqa: TID251

    model = keras_sequential([8, 8, 3], keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.Flatten())
    seen = []

    def mae(x, y) -> float:
        seen.append((type(x), type(y)))
        return float(np.abs(x.flatten() - y.flatten()).mean())

    def inputs():
        yield [np.random.default_rng(0).random((4, 8, 8, 3), dtype=np.float32)]

    own, _ = mct.ptq.keras_post_training_quantization(model, inputs)
    config = XQuantConfig(str(tmp_path), {"mae": mae})
    found = xquant_report_keras_experimental(model, own, inputs, inputs, config)
    assert found["output_similarity_metrics_repr"]["mae"] > 0 and set(seen) == {(np.ndarray, np.ndarray)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantized_model": nn.Conv2d(3, 4, 3)}, "'quantized_model'.*pytorch_post_training_quantization"),
        ({"repr_dataset": images(4)}, "function without arguments"),
        ({"validation_dataset": list}, "empty"),
        ({"xquant_config": {"report_dir": "x"}}, "xquant_config"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, change, words):
    model = small_cnn(norm=True).eval()
    given = {"float_model": model, "quantized_model": quantized(model), "xquant_config": XQuantConfig(str(tmp_path))}
    given |= {"repr_dataset": representative, "validation_dataset": validation} | change
    with pytest.raises(ChipfitError, match=f"(?s){words}"):
        xquant_report_pytorch_experimental(**given)


def test_arguments_of_the_keras_report_have_mcts_names():
    names = list(inspect.signature(xquant_report_keras_experimental).parameters)
    assert names == ["float_model", "quantized_model", "repr_dataset", "validation_dataset", "xquant_config"]
    named = dict.fromkeys(names[:4]) | {"xquant_config": 3}
    with pytest.raises(ConfigError, match="xquant_config"):  # not a missing argument
        xquant_report_keras_experimental(**named)


def of_size(size):
    return lambda: iter([[[images(4, size, seed=3)], torch.zeros(4)]])


def test_validation_data_may_have_another_size_than_calibration_data(tmp_path):
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
    model = nn.Sequential(*layers).eval()
    own = quantized(model)
    config = XQuantConfig(report_dir=str(tmp_path))
    found = xquant_report_pytorch_experimental(model, own, representative, of_size(12), config)
    with torch.no_grad():
        want, got = (m(images(4, 12, seed=3)).double() for m in (model, own))
    assert found["output_similarity_metrics_val"]["mse"] == pytest.approx(float(F.mse_loss(got, want)), rel=1e-3)


def test_data_of_a_size_that_the_network_cannot_take_are_refused(tmp_path):
    fixed = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Flatten(), nn.Linear(6 * 64, 4)).eval()
    pooled = model_of(lambda m, x: F.avg_pool2d(m.conv(x), x.shape[-1]), conv=nn.Conv2d(3, 6, 3, padding=1))
    for model in (fixed, pooled):  # the second is captured with a window of 8
        own, config = quantized(model), XQuantConfig(report_dir=str(tmp_path))
        with pytest.raises(SizeMismatch, match="Input '.*' has the wrong shape"):
            xquant_report_pytorch_experimental(model, own, representative, of_size(12), config)
