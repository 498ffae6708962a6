"""Codes wider than a runtime's integer kernels take: it computes in float, and so does the simulation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit

CHIP = """
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


class Net(nn.Module):
    """One of each kind of operator that ONNX Runtime computes in 8-bit integers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.conv(x).relu()
        y = nn.functional.avg_pool2d(y, 2) + 0.5 * nn.functional.max_pool2d(y, 2)
        z = self.linear(y.mean((2, 3)))
        return z.softmax(-1), z.unsqueeze(1) @ z.unsqueeze(2)


def test_16_bit_codes_are_computed_in_float_by_onnx_runtime(tmp_path):
    pytest.importorskip("onnxruntime")
    (tmp_path / "chip.yaml").write_text(CHIP)
    torch.manual_seed(0)
    result = chipfit.quantize(Net(), [torch.randn(4, 3, 8, 8)], tmp_path / "chip.yaml", progress=False)
    check = result.verify([torch.randn(4, 3, 8, 8)])
    assert check.sound and check.integers, check.summary()
    assert {"Conv2D", "Softmax", "MatMul", "AvgPool"} <= {op for r in check.rows for op in r.float_ops}
