"""A plan is data: read it, change the range of one tensor, and run the network with the change.

python examples/plan_editing.py
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import chipfit
from chipfit.errors import PlanError
from chipfit.plan.diff import diff


def main() -> tuple[float, float]:
    """Returns the mean squared error of the outputs under the plan as made and as edited."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    x = torch.randn(256, 16)
    result = chipfit.quantize(model, x, platform="ort_cpu")

    hidden = result.plan["relu"]
    most = 4 * hidden.grid.qmax * float(hidden.scale)
    edited = result.edit({"1": {"range": (0.0, most)}})  # the bias of the next layer follows the scale
    for difference in diff(result.plan, edited.plan):
        print(difference)
    print(edited.verify(x).summary())

    coarse = result.plan.tensors["relu"].with_(scale=hidden.scale * 4)
    try:
        replace(result, plan=replace(result.plan, tensors={**result.plan.tensors, "relu": coarse}))
    except PlanError as e:
        print(e)  # by hand, the scale no longer agrees with that of the bias

    with torch.inference_mode():
        errors = [float((r.model(x) - model(x)).square().mean()) for r in (result, edited)]
    print(f"mean squared error {errors[0]:.2e} -> {errors[1]:.2e}")
    return errors[0], errors[1]


if __name__ == "__main__":
    main()
