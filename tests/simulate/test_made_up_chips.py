"""Made-up chips whose values a runtime reads before they are rounded, or computes in float for their width."""

import pytest
import torch
from torch import nn

from tests.build import model_of, platform_file, quantized

READER_PLACED = """
name: reader_placed
formats:
  a8: {bits: 8, zero: 0}
  w8: {bits: 8, zero: 0}
  b: {kind: float, bits: 32, float: fp32}
  b32: {bits: 32, zero: 0}
ops:
  - {match: [Linear], use: [{in: a8, w: w8, b: b32, out: a8}], src: [S], conf: I}
  - {match: [Add], use: [{in: a8}], src: [S], conf: I}
  - {match: [Concat], use: [{in: a8, out: a8}], src: [S], conf: I}
unlisted: float
math: {requant: {form: float, round: half_even}, acc: [{bits: 32}]}
runtimes: [onnxruntime]
sources: {S: "a made-up chip"}
"""


def both(m, x):
    """A sum that a concatenation reads in codes, and a ReLU in float."""
    y = m.a(x) + m.b(x)
    return y.relu(), torch.cat([x, y], 1)


@pytest.mark.parametrize("runtime", ["onnxruntime", "litert_reference"])
def test_what_is_read_before_rounding_is_kept_beside_its_codes(tmp_path, runtime):
    pytest.importorskip("ai_edge_litert" if "litert" in runtime else runtime)
    net = model_of(both, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    result = quantized(net, torch.randn(16, 4), platform_file(tmp_path, READER_PLACED))
    assert ("add", "relu") in result.plan.float_edges and result.plan.quantized("add")
    check = result.verify([2 * torch.randn(16, 4)], runtime=runtime)
    assert check.sound and check.integers, check.summary()
    y, _, *sums = result.model.eval().run_flat([2 * torch.randn(16, 4)], ["linear", "linear_1", "add"])
    assert torch.equal(y, (sums[0] + sums[1]).relu()) and not torch.equal(y, sums[2].relu())


SIXTEEN = """
name: sixteen
formats: {a16: {bits: 16, zero: any}, w8: {bits: 8, zero: 0}, b32: {bits: 32, zero: 0}}
ops:
  - match: ["@conv", Linear]
    use: [{in: a16, w: w8, b: b32, out: a16}]
    rules: [{mono: {b: 1, in0: -1, w: -1}, eq: 1}]
    src: [S]
    conf: I
  - {match: [Relu, MatMul, Add, Mul, Softmax, AvgPool, Mean], use: [{in: a16, out: a16}], src: [S], conf: I}
  - {match: ["@move", MaxPool], exec: follow, use: [{in: a16, out: a16}], rules: [{tie: [in0, out]}], src: [S], conf: I}
unlisted: float
math: {kernels: onnxruntime}
runtimes: [onnxruntime]
sources: {S: "a made-up chip"}
"""


def of_every_kind(m, x):
    """One of each kind of operator that ONNX Runtime computes in 8-bit integers."""
    y = m.conv(x).relu()
    y = nn.functional.avg_pool2d(y, 2) + 0.5 * nn.functional.max_pool2d(y, 2)
    z = m.linear(y.mean((2, 3)))
    return z.softmax(-1), z.unsqueeze(1) @ z.unsqueeze(2)


def test_16_bit_codes_are_computed_in_float_by_onnx_runtime(tmp_path):
    """Its integer kernels take 8 bits."""
    pytest.importorskip("onnxruntime")
    net = model_of(of_every_kind, conv=nn.Conv2d(3, 4, 3), linear=nn.Linear(4, 4))
    result = quantized(net, torch.randn(4, 3, 8, 8), platform_file(tmp_path, SIXTEEN))
    check = result.verify([torch.randn(4, 3, 8, 8)])
    assert check.sound and check.integers, check.summary()
    assert {"Conv2D", "Softmax", "MatMul", "AvgPool"} <= {op for r in check.rows for op in r.float_ops}
