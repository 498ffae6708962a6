"""The default file of ONNX Runtime computes alike on every processor, in a session without options.

Without VNNI, x86 processors multiply unsigned data by signed weights and add products 2j and 2j + 1 of each sum in 16
bits, with saturation (vpmaddubsw). `saturating_sums` does the same in numpy, on the integers of the file.
"""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import nn

import chipfit
from tests.build import model_of, quantized, randn, sequential


def saturating_sums(x, w):
    """Sums of u8 x [N, K] times s8 w [R, K], where pairs of products are added in 16 bits."""
    products = x[:, None, :].astype(np.int32) * w[None].astype(np.int32)
    pairs = np.pad(products, ((0, 0), (0, 0), (0, products.shape[-1] % 2))).reshape(*products.shape[:2], -1, 2)
    return pairs.sum(-1).clip(-32768, 32767).sum(-1)


def test_two_large_weights_of_one_sign_saturate():
    x, w = np.uint8([[255, 255, 1]]), np.int8([[100, 100, 5], [100, -100, 5]])
    assert saturating_sums(x, w).tolist() == [[32767 + 5, 5]] and (x @ w.T.astype(int)).tolist() == [[51005, 5]]


def sums_of(path):
    """The weights of every integer product of a file by name, [rows, K] in the order in which kernels add them."""
    graph = onnx.load(str(path)).graph
    constants = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    makers = {o: n for n in graph.node for o in n.output}

    def integers(name):
        if name in constants:
            return constants[name], name
        n = makers.get(name)
        if n is None or n.op_type not in ("DequantizeLinear", "Slice", "Transpose"):
            return None, name
        w, source = integers(n.input[0])
        return (w.T if n.op_type == "Transpose" and w is not None else w), source

    for n in graph.node:
        if n.op_type not in ("Conv", "Gemm", "MatMul", "MatMulInteger"):
            continue
        w, name = integers(n.input[1])
        if w is None or w.dtype != np.int8:
            continue
        a = {x.name: x.i for x in n.attribute}
        if n.op_type == "Conv":  # by position in the kernel, then by input channel
            depthwise = w.shape[1] == 1 and a.get("group", 1) == w.shape[0]
            rows = w.reshape(-1, 1) if depthwise else np.moveaxis(w, 1, -1).reshape(len(w), -1)
        else:
            rows = w if a.get("transB") else w.T
        yield name, rows


def assert_nothing_saturates(path):
    """Each row meets the data that make its sum greatest and least, and random data; returns the names of weights."""
    found = dict(sums_of(path))
    for name, w in found.items():
        assert w.min() >= -127, f"{name}: ARM adds two products of -128 in 16 bits"
        random = np.random.default_rng(0).integers(0, 256, (8, w.shape[1]))
        for x in (255 * (w > 0), 255 * (w < 0), random):
            got, want = saturating_sums(x, w), x @ w.T.astype(np.int64)
            assert np.array_equal(got, want), name
    return set(found)


def plain_session(path, *inputs):
    session = onnxruntime.InferenceSession(str(path))
    return session.run(None, {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)})[0]


def large_weights(model):
    """Weights of one sign for whole channels, and outliers beside each other: pairs that 8 bits cannot hold."""
    torch.manual_seed(3)
    for p in model.parameters():
        if p.dim() > 1:
            p.data = p.data.abs() * torch.where(torch.arange(len(p)) % 2 == 0, 1.0, -1.0).view(-1, *[1] * (p.dim() - 1))
            p.data.view(len(p), -1)[:, :2] *= 3
    return model.eval()


def convolutions():
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 16, 1), nn.ReLU()
    return sequential(*layers, nn.Conv2d(16, 16, (1, 3), groups=4), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5)), randn(
        8, 3, 7, 7
    )


def widened_by_channel():
    layers = nn.Conv1d(4, 8, 3, groups=4), nn.ReLU(), nn.Conv1d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv1d(8, 3, 2)
    return sequential(*layers), randn(8, 4, 12)


def product_with_a_constant():
    def forward(m, x):
        return torch.softmax(m.a(x) @ m.b.weight.t() @ x.transpose(1, 2), -1) @ x

    return model_of(forward, a=nn.Linear(6, 7), b=nn.Linear(7, 6, bias=False)), randn(4, 5, 6)


def tied_embedding():
    model = model_of(lambda m, i: m.head(F.relu(m.body(m.words(i)))), words=nn.Embedding(20, 8), body=nn.Linear(8, 8))
    model.head = nn.Linear(8, 20, bias=False)
    model.head.weight = model.words.weight
    return model, torch.randint(0, 20, (8, 5), generator=torch.Generator().manual_seed(0))


def called_twice():
    return model_of(lambda m, x: m.b(F.relu(m.a(F.relu(m.a(x))))), a=nn.Linear(8, 8), b=nn.Linear(8, 3)), randn(8, 8)


NETWORKS = [convolutions, widened_by_channel, product_with_a_constant, tied_embedding, called_twice]


@pytest.mark.parametrize(
    "platform, build", [*(("ort_cpu", n) for n in NETWORKS), *(("ort_dynamic", n) for n in NETWORKS[2:])]
)
def test_no_pair_of_products_leaves_16_bits(tmp_path, platform, build):
    model, data = build()
    result = quantized(large_weights(model), data, platform)
    file = result.export(tmp_path / "m.onnx")
    assert assert_nothing_saturates(file) or platform == "ort_dynamic"
    assert result.verify(data, path=file).exact
    assert np.allclose(plain_session(file, data), result.device_model(data).numpy(), atol=1e-5)


@pytest.mark.parametrize("layer", [nn.ConvTranspose2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, bias=False)])
def test_layers_in_float_between_quantizers_stay_in_float_in_a_plain_session(tmp_path, layer):
    """An optimiser of ONNX Runtime would quantize them, with scales of its own."""
    torch.manual_seed(0)
    model = sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), layer, nn.ReLU(), nn.Conv2d(8, 4, 1))
    result = quantized(model, data := randn(8, 3, 9, 9), overrides={"2": "float"})
    file = result.export(tmp_path / "m.onnx")
    assert result.verify(data, path=file).exact
    assert (plain_session(file, data) == result.device_model(data).numpy()).mean() > 0.99


def test_eight_bits_without_a_limit_would_saturate(tmp_path):
    model, data = convolutions()
    file = quantized(large_weights(model), data, "ort_cpu@VNNI").export(tmp_path / "m.onnx")
    with pytest.raises(AssertionError):
        assert_nothing_saturates(file)


@pytest.mark.parametrize("rounding", ["gptq", "learned(steps=20)"])
def test_weights_rounded_by_their_effect_do_not_saturate(tmp_path, rounding):
    model, data = convolutions()
    result = quantized(large_weights(model), data, settings=chipfit.Settings(rounding=rounding))
    file = result.export(tmp_path / "m.onnx")
    assert assert_nothing_saturates(file) and result.verify(data, path=file).exact


@pytest.mark.parametrize("training", [None, "lsq", "dorefa"])
def test_trained_weights_do_not_saturate_and_compute_as_they_were_trained(tmp_path, training):
    model, data = convolutions()
    result = quantized(large_weights(model), data, training=training)
    optimizer = torch.optim.SGD(result.model.train().parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        (result.model(data) - 3).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        trained = result.model.eval()(data)
    result = result.trained()
    file = result.export(tmp_path / "m.onnx")
    assert assert_nothing_saturates(file) and result.verify(data, path=file).exact
    assert (trained - result.device_model(data)).abs().max() <= 2 / 255 * (trained.max() - trained.min())


def test_weights_bounded_in_pairs_lose_little():
    """Bell-shaped weights, as training leaves them: far less than the 6 dB of another bit."""
    torch.manual_seed(0)
    model, data = sequential(nn.Linear(256, 64)), randn(64, 256)
    nn.init.normal_(model[0].weight)
    stored = {p: quantized(model, data, p).plan["0.weight"] for p in ("ort_cpu", "ort_cpu@VNNI")}
    w = model[0].weight.detach()
    noise = [float((s.round(w) - w).square().sum()) for s in stored.values()]
    assert 1 < noise[0] / noise[1] < 10 ** (3.0 / 10)
