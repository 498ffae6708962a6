"""What is written of a model that trains: the numbers of its plan, under names that say what they are."""

import sys

import numpy as np
import pytest
import torch

from chipfit.errors import ConfigError, RuntimeUnavailable
from chipfit.training import write_scales, writer
from tests.build import keras_sequential, quantized, randn
from tests.training.small import DATA, Net


class Listed:
    def __init__(self):
        self.scalars, self.histograms = {}, {}

    def add_scalar(self, name, value, step):
        self.scalars[name, step] = value

    def add_histogram(self, name, values, step):
        self.histograms[name, step] = values


@pytest.fixture(scope="module")
def result():
    return quantized(Net(), DATA, training="lsq")


def test_every_tensor_has_its_numbers(result):
    to = Listed()
    write_scales(to, result.model, 7)
    t = result.plan["relu"]
    assert to.scalars["scale/relu", 7] == pytest.approx(float(t.scale))
    assert to.scalars["zero_point/relu", 7] == int(t.zero_point)
    for end, code in (("low", t.grid.qmin), ("high", t.grid.qmax)):
        assert to.scalars[f"{end}/relu", 7] == pytest.approx((code - int(t.zero_point)) * float(t.scale))
    np.testing.assert_allclose(to.histograms["scale/head.weight", 7], result.plan["head.weight"].scale)
    scales = [p.scale.reshape(-1) for n, p in result.plan.tensors.items() if p.quantized and p.role != "bias"]
    np.testing.assert_allclose(np.unique(to.histograms["log2_scale/all", 7]), np.unique(torch.cat(scales).log2()))
    result.model.quantizer_of("relu").scale.data.mul_(2)
    write_scales(to, result.model, 8)
    assert to.scalars["scale/relu", 8] == pytest.approx(2 * to.scalars["scale/relu", 7])
    result.model.quantizer_of("relu").scale.data.div_(2)


def test_a_keras_model_is_written_too():
    keras = pytest.importorskip("keras")
    net = keras_sequential((6,), keras.layers.Dense(3, name="dense"))
    result = quantized(net, [randn(8, 6).numpy()], training="lsq")
    to = Listed()
    write_scales(to, result.model, 0)
    written, planned = to.histograms["scale/dense/kernel", 0], result.plan["dense/kernel"].scale
    np.testing.assert_allclose(np.sort(written), np.sort(planned))
    assert any(name.startswith("scale/") for name, _ in to.scalars)


def test_tensorboard_reads_it(result, tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with writer(tmp_path) as to:
        write_scales(to, result.model, 3)
    events = EventAccumulator(str(tmp_path)).Reload()
    (scale,) = events.Scalars("scale/relu")
    assert scale.step == 3 and scale.value == pytest.approx(float(result.plan["relu"].scale))
    assert "scale/head.weight" in events.Tags()["histograms"]


def test_what_cannot_be_written_is_refused(result, monkeypatch, tmp_path):
    for to, model in ((object(), result.model), (Listed(), torch.nn.Linear(2, 2))):
        with pytest.raises(ConfigError, match="add_histogram"):
            write_scales(to, model, 0)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RuntimeUnavailable, match=r"pip install 'chipfit\[track\]'"):
        writer(tmp_path)
