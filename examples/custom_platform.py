"""Quantize for a chip of your own: one YAML file beside this script, and nothing else.

python examples/custom_platform.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import chipfit

CHIP = Path(__file__).with_name("tiny_npu.yaml")


def main() -> chipfit.Result:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, stride=3), nn.ReLU()),  # the chip has no stride 3: stays float, and says why
        *(nn.Flatten(), nn.Linear(32, 4)),
    ).eval()
    for row in chipfit.lint(model, torch.randn(2, 1, 16, 16), platform=CHIP).rows:
        print(f"{row.layer:6} {row.op:10} {row.exec:7} {row.why}")

    result = chipfit.quantize(model, [torch.randn(16, 1, 16, 16) for _ in range(4)], platform=CHIP)
    for t in result.plan.tensors.values():
        if t.stored is not None and t.role == "activation":
            print(f"{t.name:16} {t.format:4} scale {float(t.stored.scale):.4g}  {t.origin}")
    return result


if __name__ == "__main__":
    main()
