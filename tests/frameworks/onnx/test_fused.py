"""Fused operators of ONNX Runtime's optimizers and functions of ONNX, against ONNX Runtime itself."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

import chipfit
from chipfit.engine.run import run
from chipfit.frameworks import capture, load_model
from tests.onnx_models import onnx_node, onnx_of

_RANDOM = np.random.default_rng(0)
X, SKIP = (_RANDOM.standard_normal((2, 5, 8)).astype("f4") for _ in range(2))
IMAGE, ADDEND = _RANDOM.standard_normal((2, 3, 6, 6)).astype("f4"), _RANDOM.standard_normal((2, 4, 6, 6)).astype("f4")
MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], "i4")
IDS, SEGMENTS = _RANDOM.integers(0, 9, (2, 5)).astype("i4"), _RANDOM.integers(0, 2, (2, 5)).astype("i4")


def weight(*shape: int) -> np.ndarray:
    return (_RANDOM.standard_normal(shape) / 2).astype("f4")


def table(function: Any, width: int = 2) -> np.ndarray:
    return function(np.arange(5)[:, None] / 10.0 ** (np.arange(width) / width)).astype("f4")


LENGTHS = ["lengths", np.int32(5)]
_OTHER = np.random.default_rng(1)

#: operator, operands (arrays of "data" are inputs), attributes, number of results
CASES: list[tuple[str, list[Any], dict[str, Any], int]] = [
    ("Gelu", ["x"], {}, 1),
    ("FastGelu", ["x", weight(8)], {}, 1),
    ("BiasGelu", ["x", weight(8)], {}, 1),
    ("QuickGelu", ["x"], {"alpha": 1.702}, 1),
    ("SkipLayerNormalization", ["x", "skip", weight(8), weight(8), weight(8)], {"epsilon": 1e-5}, 4),
    ("SkipLayerNormalization", ["x", "skip", weight(8), weight(8)], {}, 1),
    ("SkipSimplifiedLayerNormalization", ["x", "skip", weight(8), weight(8)], {"epsilon": 1e-6}, 4),
    (
        "EmbedLayerNormalization",
        ["ids", "segments", weight(9, 8), weight(5, 8), weight(2, 8), weight(8), weight(8), "mask"],
        {"epsilon": 1e-5, "mask_index_type": 0},
        3,
    ),
    ("EmbedLayerNormalization", ["ids", "", weight(9, 8), weight(5, 8), "", weight(8), weight(8)], {}, 2),
    ("Attention", ["x", weight(8, 24), weight(24), "mask"], {"num_heads": 2}, 1),
    ("Attention", ["x", weight(8, 24), weight(24), "counts"], {"num_heads": 2}, 1),
    ("Attention", ["x", weight(8, 24), weight(24)], {"num_heads": 2, "unidirectional": 1}, 1),
    ("Attention", ["x", weight(8, 24), weight(24), "mask"], {"num_heads": 2, "unidirectional": 1, "scale": 0.3}, 1),
    (
        "Attention",
        ["x", weight(8, 16), weight(16), "", "", weight(1, 2, 5, 5)],
        {"num_heads": 2, "qkv_hidden_sizes": [4, 4, 8]},
        1,
    ),
    ("MultiHeadAttention", ["x", "skip", "skip"], {"num_heads": 2}, 1),
    ("MultiHeadAttention", ["x", "skip", "x", weight(24), "mask", weight(1, 2, 5, 5)], {"num_heads": 2}, 1),
    ("GroupQueryAttention", ["wide", "keys", "values", "", "", *LENGTHS], {"num_heads": 2, "kv_num_heads": 1}, 3),
    (
        "GroupQueryAttention",
        ["joined", "", "", "", "", *LENGTHS, table(np.cos, 8), table(np.sin, 8)],
        {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1, "scale": 0.2},
        3,
    ),
    ("FusedConv", ["image", weight(4, 3, 3, 3), weight(4)], {"pads": [1] * 4, "activation": "Relu"}, 1),
    ("FusedConv", ["image", weight(4, 3, 3, 3), weight(4), "addend"], {"pads": [1] * 4, "activation": "Relu"}, 1),
    (
        "FusedConv",
        ["image", weight(4, 3, 3, 3)],
        {"activation": "LeakyRelu", "activation_params": [0.2], "strides": [2, 2]},
        1,
    ),
    (
        "FusedGemm",
        ["flat", weight(4, 8), weight(4)],
        {"activation": "LeakyRelu", "activation_alpha": 0.1, "transB": 1},
        1,
    ),
    ("FusedMatMul", ["x", "skip"], {"alpha": 0.5, "transB": 1}, 1),
    ("FusedMatMul", ["x", weight(8, 8)], {"transB": 1}, 1),
    ("RotaryEmbedding", ["x", "positions", table(np.cos), table(np.sin)], {"num_heads": 2}, 1),
    ("RotaryEmbedding", ["x", "positions", table(np.cos), table(np.sin)], {"interleaved": 1}, 1),
    ("ExpandDims", ["x", np.int32(1)], {}, 1),
]
DATA = {
    "x": X,
    "skip": SKIP,
    "image": IMAGE,
    "addend": ADDEND,
    "mask": MASK,
    "ids": IDS,
    "segments": SEGMENTS,
    "flat": X[:, 0],
    "wide": _OTHER.standard_normal((2, 5, 16)).astype("f4"),
    "keys": _OTHER.standard_normal((2, 5, 8)).astype("f4"),
    "values": _OTHER.standard_normal((2, 5, 8)).astype("f4"),
    "joined": _OTHER.standard_normal((2, 5, 64)).astype("f4"),
    "lengths": np.array([4, 4], "i4"),
    "counts": np.array([5, 3], "i4"),
    "positions": np.tile(np.arange(5), (2, 1)),
}


def model(kind: str, operands: list[Any], attrs: dict[str, Any], results: int, domain: str, opset: int = 21) -> Any:
    """Return a model of one operator, with a row of results, and its inputs."""
    names = [o if isinstance(o, str) else f"c{k}" for k, o in enumerate(operands)]
    constants = {n: o for n, o in zip(names, operands, strict=True) if n not in DATA and n}
    given = {n: DATA[n] for n in names if n in DATA}
    types = {n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in given.items()}
    outs = {1: ["y"], 2: ["y", "unread"], 3: ["y", "mask_index", "total"], 4: ["y", "", "", "total"]}[results]
    node = helper.make_node(kind, names, outs, domain=domain, **attrs)
    ins = {n: ["n", *a.shape[1:]] for n, a in given.items()}
    made = onnx_of(node, inputs=ins, outputs=(), constants=constants, types=types, opset=opset)
    made.graph.output.extend(onnx.ValueInfoProto(name=o) for o in outs if o not in ("", "unread"))
    return made, given


def compared(proto: Any, given: dict[str, Any]) -> Any:
    """Return the graph of a model, after comparison of its results with those of ONNX Runtime."""
    want = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, given)
    tensors = {k: torch.from_numpy(np.array(v)) for k, v in given.items()}
    graph = capture(load_model(proto), (), tensors)
    env = {**graph.weights, **run(graph, [tensors[n] for n in graph.inputs])}
    for name, array in zip(graph.outputs, want, strict=True):
        np.testing.assert_allclose(env[name].numpy(), array, rtol=1e-4, atol=1e-5)
    return graph


@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
def test_a_fused_operator_is_read_as_its_parts(case):
    graph = compared(*model(*case, "com.microsoft"))
    assert graph.nodes and "Opaque" not in [n.op for n in graph.nodes] and not graph.notes


@pytest.mark.parametrize("negated", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("pooled", [True, False])
def test_a_layer_norm_as_tensorflow_has_it_is_one_layer(negated, scaled, pooled):
    """x k + (b - mean k) with k = w / sqrt(variance + eps), as converters of Keras models write it."""
    init = {
        "eps": np.float32(1e-3),
        "w": _OTHER.standard_normal((1, 1, 8)).astype("f4"),
        "b": _OTHER.standard_normal((1, 1, 8)).astype("f4"),
        "axes": np.array([2]),
    }

    def mean(x: str, y: str) -> str:
        return f"{y} = GlobalAveragePool({x})" if pooled else f"{y} = ReduceMean({x}, axes)"

    factor = "k" if scaled else "i"
    nodes = [mean("x", "m"), "d = Sub(x, m)", "q = Mul(d, d)", mean("q", "v")]
    nodes += ["a = Add(v, eps)", "r = Sqrt(a)", "i = Reciprocal(r)"]
    nodes += ["k = Mul(i, w)", "p = Mul(x, k)"] if scaled else ["p = Mul(x, i)"]
    nodes += ["n = Neg(m)", f"t = Mul(n, {factor})"] if negated else [f"t = Mul(m, {factor})"]
    if scaled:
        nodes += ["s = Add(t, b)" if negated else "s = Sub(b, t)", "y = Add(p, s)"]
    else:
        nodes += ["y = Add(p, t)" if negated else "y = Sub(p, t)"]
    read = compared(onnx_of(*nodes, inputs={"x": ["n", 5, 8]}, constants=init, opset=18), {"x": X})
    assert [n.op for n in read.nodes] == ["LayerNorm"] and len(read.nodes[0].inputs) == (3 if scaled else 1)


# ---------------------------------------------------------------- operators that ONNX defines by simpler ones


@pytest.mark.parametrize(
    "kind, operands, attrs, opset",
    [
        ("Celu", ["x"], {"alpha": 2.0}, 12),
        ("ThresholdedRelu", ["x"], {"alpha": 0.5}, 10),
        ("Shrink", ["x"], {"bias": 0.2, "lambd": 0.5}, 9),
        ("Softsign", ["x"], {}, 13),
        ("ReduceLogSumExp", ["x"], {"axes": [1]}, 13),
        ("MeanVarianceNormalization", ["image"], {}, 13),
        ("OneHot", ["positions", np.int64(4), np.array([-1, 2], "f4")], {"axis": 1}, 13),
        ("LRN", ["image"], {"size": 3, "alpha": 0.5, "bias": 1.5}, 13),
        ("Tan", ["x"], {}, 13),
        ("IsInf", ["x"], {"detect_negative": 0}, 13),
        ("ReverseSequence", ["x", np.array([5, 5])], {"batch_axis": 0, "time_axis": 1}, 13),
        (
            "RotaryEmbedding",
            ["x", table(np.cos)[None].repeat(2, 0), table(np.sin)[None].repeat(2, 0)],
            {"num_heads": 2},
            23,
        ),
        ("Attention", ["x", "skip", "skip"], {"q_num_heads": 2, "kv_num_heads": 2, "softcap": 2.0}, 23),
    ],
)
def test_an_operator_of_onnx_is_read_as_simpler_ones(kind, operands, attrs, opset):
    graph = compared(*model(kind, operands, attrs, 1, "", opset))
    assert graph.nodes and "Opaque" not in [n.op for n in graph.nodes]


def test_attention_of_onnx_is_one_operator():
    attrs = {"q_num_heads": 4, "kv_num_heads": 2, "is_causal": 1}
    graph = compared(*model("Attention", ["x", weight(2, 5, 4), weight(2, 5, 4)], attrs, 1, "", 23))
    assert [n.attrs["is_causal"] for n in graph.nodes if n.op == "SDPA"] == [True]


@pytest.mark.parametrize("platform, suffix", [("ort_cpu", ".onnx"), ("tflite_int8", ".tflite")])
def test_a_network_of_fused_operators_is_quantized_and_exact(platform, suffix, tmp_path):
    """Attention with a mask, the sum with its input, and two layers with a GELU, as the optimizer writes it."""
    names = {"w": weight(8, 24), "b": weight(24), "g": weight(8), "h": weight(8), "u": weight(8, 16), "v": weight(16)}
    names |= {"d": weight(16, 8), "e": weight(8)}
    nodes = [
        onnx_node("a = com.microsoft::Attention(x, w, b, mask)", num_heads=2),
        "s = com.microsoft::SkipLayerNormalization(a, x, g, h)",
        "m = MatMul(s, u)",
        "r = com.microsoft::BiasGelu(m, v)",
        "o = com.microsoft::FusedMatMul(r, d)",
        "y = com.microsoft::SkipLayerNormalization(o, s, g, h, e)",
    ]
    proto = onnx_of(*nodes, inputs={"x": ["n", 5, 8], "mask": ["n", 5]}, constants=names, types={"mask": 6})
    draw = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(2, 5, 8, generator=draw), "mask": torch.from_numpy(MASK)} for _ in range(3)]
    result = chipfit.quantize(proto, data, platform=platform, progress=False)
    result.export(tmp_path / f"net{suffix}")
    assert [n.op for n in result.graph.nodes if n.op in ("Linear", "Opaque")] == ["Linear"] * 5
    assert result.verify(data).exact


# ---------------------------------------------------------------- control flow, interpolation, indices


def test_a_loop_and_a_scan_with_a_known_number_of_steps_are_unrolled():
    """Three steps of y = y + y, then running sums over the axis of five."""
    ends = {"inputs": {"k": [], "going": [], "v": None}, "outputs": {"more": [], "w": None}}
    twice = onnx_of("more = Identity(going)", "w = Add(v, v)", **ends, types={"k": 7, "going": 9, "more": 9}).graph
    rows = {"inputs": dict.fromkeys("se", ("n", 8)), "outputs": dict.fromkeys("tu", ("n", 8))}
    add = onnx_of("t = Add(s, e)", "u = Identity(t)", **rows).graph
    axes = {"scan_input_axes": [1], "scan_output_axes": [1]}
    nodes = [
        onnx_node("y = Loop(three, -, x)", body=twice),
        onnx_node("z = ReduceSum(y, axis)", keepdims=0),
        "zero = Sub(z, z)",
        onnx_node("last, sums = Scan(zero, y)", body=add, num_scan_inputs=1, **axes),
    ]
    constants = {"three": np.int64(3), "axis": np.array([1])}
    proto = onnx_of(*nodes, inputs={"x": ["n", 5, 8]}, outputs=["last", "sums"], constants=constants)
    read = compared(proto, {"x": X})
    assert {n.op for n in read.nodes} == {"Add", "Sum", "Sub", "Select", "Unsqueeze", "Concat"}


def test_a_branch_that_inputs_of_these_sizes_cannot_take_is_left_out():
    """As in a network of speech that takes windows of one size at 16 kHz and of another one at 8 kHz."""
    branches = {
        f"{name}_branch": onnx_of(f"{w}y = MatMul(x, {w})", inputs={}, outputs=[f"{w}y"]).graph
        for name, w in (("then", "wide"), ("else", "narrow"))
    }
    nodes = "fits = Equal(rate, usual)", onnx_node("y = If(fits)", name="choice", **branches)
    init = {"wide": weight(8, 3), "narrow": weight(4, 3), "usual": np.array(16000)}
    ends = {"inputs": {"x": ["n", None], "rate": []}, "outputs": {"y": ["n", 3]}, "types": {"rate": 7}}
    given = {"x": X[:, 0], "rate": np.array(16000)}
    read = compared(onnx_of(*nodes, **ends, constants=init), given)
    assert any("else branch of If 'choice' is left out" in n for n in read.notes) and len(read.nodes) == 1


@pytest.mark.parametrize(
    "how",
    [
        {"mode": "linear", "coordinate_transformation_mode": "asymmetric"},
        {"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"},
        {"mode": "linear", "antialias": 1},
        {"mode": "cubic", "cubic_coeff_a": -0.5},
        {"mode": "cubic", "exclude_outside": 1},
    ],
)
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_an_interpolation_is_read(how, factor):
    operands = ["image", "", np.array([1, 1, factor, factor], "f4")]
    graph = compared(*model("Resize", operands, how, 1, "", 19))
    assert "Opaque" not in [n.op for n in graph.nodes]


@pytest.mark.parametrize("platform, suffix", [("ort_cpu", ".onnx"), ("tflite_int8", ".tflite")])
def test_interpolation_between_corners_of_pixels_is_exact(platform, suffix, tmp_path):
    """Upsample of opset 9, and TensorFlow 1's bilinear resizing."""
    names = {"w": weight(4, 3, 3, 3), "v": weight(3, 4, 3, 3), "scales": np.array([1, 1, 3, 2], "f4")}
    nodes = "a = Conv(x, w)", onnx_node("b = Upsample(a, scales)", mode="linear"), "y = Conv(b, v)"
    proto = onnx_of(*nodes, inputs={"x": ["n", 3, 7, 9]}, constants=names, opset=9)
    draw = torch.Generator().manual_seed(0)
    data = [torch.randn(4, 3, 7, 9, generator=draw) for _ in range(3)]
    result = chipfit.quantize(proto, data, platform=platform, progress=False)
    result.export(tmp_path / f"net{suffix}")
    assert result.verify(data).exact
