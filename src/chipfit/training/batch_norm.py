"""Statistics of batch norms, estimated again from data when training has ended."""

from __future__ import annotations

from typing import Any

import torch

from chipfit.calibration.data import batches
from chipfit.errors import DataError, UnsupportedError
from chipfit.frameworks.torch.train import as_quantized_module
from chipfit.result import Result


@torch.no_grad()
def reestimate(result: Result, data: Any) -> None:
    """Give every batch norm of `result.model` that folds in each step the statistics that its layer has on these data.

    What a layer returns with rounded weights is not what the moving averages of training remember, least of all where
    weights oscillate (Nagel et al. 2022, arXiv:2203.11086, section 2.3). As `torch.optim.swa_utils.update_bn` does, it
    takes the mean, over the batches, of mean and unbiased variance of each; layers behind see what training would show
    them. Weights are rounded as they are while the data run, and folded with the new statistics afterwards.

    Args:
        result: with a PyTorch model that trains under a `bn_fold` other than 0.
        data: batches as of `quantize`; larger ones are better.

    Raises:
        UnsupportedError: there is no batch norm that trains.
        DataError: no batch, or one with a single number for a channel.
        PlanError: the model is not one of PyTorch.
    """
    model = as_quantized_module(result.model)
    running = [model.weight(name) for f in model._folds.values() for name in (f.mean, f.var)]
    if not running:
        hint = "train with bn_fold 1 to 4; batch norms that were folded before have no statistics any more"
        raise UnsupportedError("There is no batch norm that trains", hint=hint)
    start, found, count = [t.clone() for t in running], [torch.zeros_like(t) for t in running], 0
    kept = model.bn_fold, model._momentum, model.training
    model.bn_fold, model._momentum = -1 if kept[0] == -1 else 4, 1.0  # 4: statistics of what is rounded
    try:
        model.train()
        for inputs in batches(data, result.graph):
            count += 1
            model.run_flat([x.to(running[0].device) for x in inputs])
            for total, t, before in zip(found, running, start, strict=True):
                total += t
                t.copy_(before)
    finally:
        for t, before in zip(running, start, strict=True):
            t.copy_(before)
        model.bn_fold, model._momentum = kept[:2]
        model.train(kept[2])
    if not count:
        raise DataError("There is no batch to estimate statistics from")
    for t, total in zip(running, found, strict=True):
        t.copy_(total / count)
