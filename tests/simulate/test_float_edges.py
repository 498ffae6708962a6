"""A result that one operator stores in codes and another reads as it was before: both get what is theirs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit

CHIP = """
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


class Both(nn.Module):
    """A sum that a concatenation reads in codes, and a ReLU in float."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.a(x) + self.b(x)
        return y.relu(), torch.cat([x, y], 1)


@pytest.mark.parametrize("runtime", ["onnxruntime", "litert_reference"])
def test_what_is_read_before_rounding_is_kept_beside_its_codes(tmp_path, runtime):
    pytest.importorskip("ai_edge_litert" if "litert" in runtime else runtime)
    (tmp_path / "chip.yaml").write_text(CHIP)
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    result = chipfit.quantize(Both(), [x], tmp_path / "chip.yaml", progress=False)
    assert ("add", "relu") in result.plan.float_edges and result.plan.quantized("add")
    check = result.verify([2 * torch.randn(16, 4)], runtime=runtime)
    assert check.sound and check.integers, check.summary()
    y, _, *sums = result.model.eval().run_flat([2 * torch.randn(16, 4)], ["linear", "linear_1", "add"])
    assert torch.equal(y, (sums[0] + sums[1]).relu()) and not torch.equal(y, sums[2].relu())
