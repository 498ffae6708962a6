"""Re-estimation of the statistics of batch norms from data after training."""

from typing import Any

import torch

from chipfit.calibration.data import batches
from chipfit.errors import DataError, UnsupportedError
from chipfit.frameworks.torch.lower import as_quantized_module
from chipfit.result import Result


@torch.no_grad()
def reestimate(result: Result, data: Any) -> None:
    """Set the running statistics of every batch norm that trains to those of its layer's outputs on data.

    The outputs of a layer with rounded weights differ from the moving averages of training, above all where weights
    oscillate (Nagel et al. 2022, arXiv:2203.11086, section 2.3). Like `torch.optim.swa_utils.update_bn`, this takes the
    mean over all batches of their mean and unbiased variance; later layers get the inputs that they have in training.
    Weights stay as they are while the data run, and fold with the new statistics afterwards.

    Args:
        result: has a PyTorch model that trains with a `bn_fold` other than 0.
        data: batches as of `quantize`; larger ones are better.

    Raises:
        UnsupportedError: no batch norm trains.
        DataError: there is no batch, or a batch has a single number for a channel.
        PlanError: the model is not of PyTorch.
    """
    model = as_quantized_module(result.model)
    running = model.running_statistics()
    if not running:
        hint = "train with bn_fold 1 to 4; batch norms that were folded before have no statistics any more"
        raise UnsupportedError("No batch norm of this model trains", hint=hint)
    start, totals, count = [t.clone() for t in running], [torch.zeros_like(t) for t in running], 0
    strategy, momentum, training = model.bn_fold, model.bn_momentum, model.training
    # strategy 4 takes the statistics of rounded weights; with momentum 1 they replace the running ones
    model.bn_fold, model.bn_momentum = -1 if strategy == -1 else 4, 1.0
    try:
        model.train()
        for inputs in batches(data, result.graph):
            count += 1
            model.run_flat([x.to(running[0].device) for x in inputs])
            for total, t, before in zip(totals, running, start, strict=True):
                total += t
                t.copy_(before)
    finally:
        for t, before in zip(running, start, strict=True):
            t.copy_(before)
        model.bn_fold, model.bn_momentum = strategy, momentum
        model.train(training)
    if not count:
        raise DataError("There is no batch to estimate statistics from")
    for t, total in zip(running, totals, strict=True):
        t.copy_(total / count)
