"""One weight that several operators read: it is stored once, and every session of ONNX Runtime opens the file."""

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.build import model_of, needs_vnni, quantized, randn

WORDS = torch.randint(0, 64, (8, 6), generator=torch.Generator().manual_seed(0))


def tied(bias=False):
    torch.manual_seed(0)
    model = model_of(lambda m, i: m.head(m.body(m.words(i))), words=nn.Embedding(64, 32), body=nn.LayerNorm(32))
    model.head = nn.Linear(32, 64, bias=bias)
    model.head.weight = model.words.weight
    return model.eval(), WORDS


def tied_between_layers():
    """The table's linear layer stands before the table's rows are read again."""

    def forward(m, i):
        x = m.head(F.relu(m.body(m.words(i))))
        return m.words(x.argmax(-1)) + m.body(m.words(i))

    model, data = tied()
    return model_of(forward, words=model.words, body=nn.Linear(32, 32), head=model.head).eval(), data


def called_twice():
    torch.manual_seed(0)
    parts = {"a": nn.Linear(32, 32), "b": nn.Linear(32, 3)}
    return model_of(lambda m, x: m.b(F.relu(m.a(F.relu(m.a(F.relu(m.a(x))))))), **parts).eval(), randn(8, 32)


def convolution_called_thrice():
    torch.manual_seed(0)
    parts = {"i": nn.Conv2d(3, 8, 1), "c": nn.Conv2d(8, 8, 3, padding=1), "o": nn.Conv2d(8, 4, 1)}
    return model_of(lambda m, x: m.o(F.relu(m.c(F.relu(m.c(F.relu(m.c(m.i(x)))))))), **parts).eval(), randn(4, 3, 8, 8)


@pytest.mark.parametrize("network", [tied, tied_between_layers, called_twice, convolution_called_thrice])
@pytest.mark.parametrize("platform", ["ort_cpu", "ort_dynamic", pytest.param("ort_cpu@VNNI", marks=needs_vnni)])
def test_a_plain_session_and_one_with_more_precision_compute_alike(tmp_path, platform, network):
    model, data = network()
    result = quantized(model, data, platform)
    file = result.export(tmp_path / "m.onnx")
    assert result.verify(data, path=file).exact
    for precise in ("0", "1"):
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.x64quantprecision", precise)
        session = onnxruntime.InferenceSession(str(file), options)
        got = session.run(None, {session.get_inputs()[0].name: data.numpy()})[0]
        assert np.allclose(got, result.device_model(data).numpy(), atol=1e-4)
    stored = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    assert file.stat().st_size < 30_000 + stored * (4 if platform == "ort_dynamic" and data.dim() == 4 else 1)


@pytest.mark.parametrize("platform", ["ort_cpu", "ort_dynamic"])
@pytest.mark.parametrize("named", ["*", "words", "head", "Embedding"])
@pytest.mark.parametrize("bias", [False, True])
def test_bits_that_one_reader_is_given_are_those_of_the_weight(tmp_path, platform, named, bias):
    model, data = tied(bias)
    result = quantized(model, data, platform, overrides={named: {"bits": 4}})
    assert result.plan["words.weight"].grid.bits == 4 and result.plan["words.weight"].grid.per == "block"
    file = result.export(tmp_path / "m.onnx")
    assert result.verify(data, path=file).exact
    session = onnxruntime.InferenceSession(str(file))
    got = torch.tensor(session.run(None, {session.get_inputs()[0].name: data.numpy()})[0])
    with torch.no_grad():
        want = model(data)
    assert (got - want).square().mean() < 0.01 * want.square().mean()


def test_a_later_entry_about_another_reader_of_the_weight_wins():
    model, data = tied()
    result = quantized(model, data, "ort_dynamic", overrides={"words": {"bits": 4}, "head": {"bits": 8}})
    assert result.plan["words.weight"].grid.bits == 8 and result.verify(data).exact
