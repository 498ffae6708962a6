"""Padding with zeros is written as the padding of the convolutions that read it."""

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from tests import build

X = torch.randn(4, 3, 12, generator=torch.Generator().manual_seed(0))


def kinds(result, folder):
    return [n.op_type for n in onnx.load(result.export(folder / "m.onnx")).graph.node]


def causal(left, *, value=0.0, mode="constant"):
    conv = nn.Conv1d(3, 4, 3)
    forward = lambda m, x: F.leaky_relu(m.conv(F.pad(x, (left, 0), mode, value)), 0.1)
    torch.manual_seed(0)
    return chipfit.quantize(build.model_of(forward, conv=conv), [X], progress=False)


def test_a_causal_convolution_has_no_operator_for_its_padding_and_stays_exact(tmp_path):
    result = causal(2)
    assert "Pad" not in kinds(result, tmp_path) and result.verify([X]).exact


@pytest.mark.parametrize("how", [{"left": 2, "value": 1.0}, {"left": 2, "mode": "replicate"}, {"left": -1}])
def test_other_padding_stays(how, tmp_path):
    result = causal(**how)
    assert {"Pad", "Slice", "Concat"} & {*kinds(result, tmp_path)} and result.verify([X]).exact


def test_padding_that_a_pool_reads_too_stays(tmp_path):
    def forward(m, x):
        y = F.pad(x, (2, 0))
        return m.conv(y) + F.max_pool1d(y, 3, 1)

    result = chipfit.quantize(build.model_of(forward, conv=nn.Conv1d(3, 3, 3)), [X], progress=False)
    assert "Pad" in kinds(result, tmp_path) and result.verify([X]).exact


def test_padding_adds_to_that_of_the_convolution(tmp_path):
    def forward(m, x):
        return m.conv(F.pad(x, (2, 1, 0, 1)))

    data = build.images(2)
    model = build.model_of(forward, conv=nn.Conv2d(3, 4, 3, padding=1, stride=2))
    result = chipfit.quantize(model, [data], progress=False)
    (conv,) = [n for n in onnx.load(result.export(tmp_path / "m.onnx")).graph.node if n.op_type == "Conv"]
    assert list({a.name: a for a in conv.attribute}["pads"].ints) == [1, 3, 2, 2] and result.verify([data]).exact


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8"])
def test_integers_are_padded_with_an_integer(platform):
    net = build.model_of(lambda m, ids: m.words(F.pad(ids[:, :-1], (1, 0), value=1)), words=nn.Embedding(20, 8))
    ids = torch.arange(20).view(4, 5)
    assert build.quantized(net, ids, platform).verify(ids).exact
