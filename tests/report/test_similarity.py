"""Similarity of a quantized network to the float one, on the user's own data."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.errors import ConfigError, DataError, ExportError, UnknownNameError
from chipfit.report.similarity import METRICS, measure
from tests.build import graph_of, images, keras_sequential, plan_of, quantized, sequential, small_cnn, stored


@pytest.fixture(scope="module")
def result() -> chipfit.Result:
    return quantized(small_cnn(norm=True), images(), overrides={"*": {"bits": 8}})


def test_the_numbers_are_those_of_arithmetic_on_paper():
    graph = graph_of("y = Relu(x)")
    plan = plan_of(y=stored(0.5))
    found = measure(graph, graph, plan, [[torch.tensor([[0.2, 0.6, 1.0, 1.4]])]], METRICS)
    (row,) = found.layers.values()  # rounded to 0, 0.5, 1, 1.5: errors 0.2, 0.1, 0, 0.1 of a power of 0.84
    assert row["mse"] == pytest.approx(0.06 / 4) and row["sqnr_db"] == pytest.approx(10 * math.log10(0.84 / 0.015))
    assert row["cosine"] == pytest.approx((0.3 + 1 + 2.1) / math.sqrt(3.36 * 3.5))
    assert next(iter(found.outputs.values())) == pytest.approx(row)


def test_outputs_are_compared_as_torch_compares_them(result):
    model, x = small_cnn(norm=True).eval(), images(6, seed=9)
    with torch.no_grad():
        want, got = model(x).double(), result.model(x).double()
    (row,) = result.similarity([x]).outputs.values()
    assert row["mse"] == pytest.approx(float(F.mse_loss(got, want)), rel=1e-3)
    assert row["cosine"] == pytest.approx(float(F.cosine_similarity(got.flatten(), want.flatten(), 0)), abs=1e-6)
    ratio = float(want.square().mean() / (got - want).square().mean())
    assert row["sqnr_db"] == pytest.approx(10 * math.log10(ratio), abs=1e-3)


def test_a_kernel_has_the_name_of_its_first_layer_as_in_the_report(result):
    found = result.similarity([images()])
    assert list(found.layers) == [k.name for k in result.report.kernels if k.exec != "follow"] == ["0", "3", "7"]
    assert found.samples == 8 and "Similarity to the float network on 8 samples" in str(found)


def test_means_weigh_batches_by_their_samples(result):
    a, b = images(1, seed=3), images(3, seed=4)
    one, other, both = (next(iter(result.similarity(d).outputs.values()))["mse"] for d in ([a], [b], [a, b]))
    assert both == pytest.approx((one + 3 * other) / 4)


def test_rounded_weights_are_compared_with_those_of_the_float_network():
    r = quantized(small_cnn(norm=True), images(), "imx500", overrides={"*": {"bits": 2}})
    assert max(row["sqnr_db"] for row in r.similarity([images()]).layers.values()) < 20


def test_a_metric_of_the_user_stands_beside_the_others(result):
    found = result.similarity([images()], {"largest": lambda x, y: (x - y).abs().max()})
    assert found.metrics == ["mse", "cosine", "sqnr_db", "largest"]
    assert all(row["largest"] ** 2 >= row["mse"] for row in [*found.layers.values(), *found.outputs.values()])


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("mae", "Metric 'own' must be a function of two tensors that returns a number. Got: str"),
        (lambda x, y: x, "Metric 'own' must return a number. Got: Tensor"),
        (lambda x, y: x.missing, r"Metric 'own' fails: AttributeError: .*missing.*values \[8, 8, 8, 8\] of '0'"),
    ],
)
def test_a_metric_that_is_wrong_is_named(result, metric, words):
    with pytest.raises(ConfigError, match=words):
        result.similarity([images()], {"own": metric})


def test_data_without_a_batch_are_refused(result):
    with pytest.raises(DataError, match="empty"):
        result.similarity([])


def test_a_plot_has_a_bar_for_each_kernel_and_output(result, tmp_path):
    found = result.similarity([images()])
    for metric in found.metrics:
        found.plot(tmp_path / f"{metric}.svg", metric)
        page = (tmp_path / f"{metric}.svg").read_text()
        assert all(f"<!-- {name} -->" in page for name in found.layers) and f"<!-- {metric}" in page
    with pytest.raises(UnknownNameError, match="mse"):
        found.plot(tmp_path / "a.svg", "msee")
    with pytest.raises(ExportError, match="cannot be written"):
        found.plot(tmp_path / "a.text")
    assert not (tmp_path / "a.text").exists()


def test_every_number_is_written_as_a_scalar(result):
    class Recorder(dict):
        def add_scalar(self, name: str, number: float, step: int) -> None:
            self[name, step] = number

    found, to = result.similarity([images()]), Recorder()
    found.write(to, step=4)
    assert len(to) == 3 * 4 and to["similarity/mse/0", 4] == found.layers["0"]["mse"]
    assert any(name.startswith("similarity/cosine/output/") for name, _ in to)


def test_a_loaded_result_says_which_weights_its_float_network_has(tmp_path):
    r = quantized(small_cnn(norm=True), images(), settings=chipfit.Settings(correct_bias=True))
    assert not r.similarity([images()]).notes
    assert "corrected weights" in chipfit.load(r.save(tmp_path / "saved")).similarity([images()]).notes[0]


def test_models_of_keras_are_compared_too():
    import keras  # noqa: TID251

    model = keras_sequential([8, 8, 3], keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.Flatten())
    found = quantized(model, torch.rand(8, 8, 8, 3), "tflite_int8").similarity([torch.rand(4, 8, 8, 3)])
    assert all(row["cosine"] > 0.99 for row in found.layers.values()) and len(found.outputs) == 1


def test_what_only_moves_numbers_is_left_out():
    model = sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Unflatten(1, (12, 12)), nn.Softmax(-1))
    r = quantized(model, images(), overrides={"3": "float"})
    assert list(r.similarity([images()]).layers) == ["0", "3"]


def test_operators_in_float_are_compared_with_the_noise_that_they_receive():
    model = sequential(nn.Conv2d(3, 4, 3), nn.Softplus(), nn.Flatten(), nn.Linear(144, 3))
    r = quantized(model, images(), overrides={"1": "float"})
    assert {"0", "1", "3"} <= set(r.similarity([images()]).layers)
