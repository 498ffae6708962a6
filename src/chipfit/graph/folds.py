"""Batch norms as factors and addends, and folded ones: restore them for training that folds them in each step."""

import zlib
from dataclasses import replace

import torch

from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Fold, Graph, Node
from chipfit.graph.linear import scale_outputs

#: numbers of each row of a weight that enter its checksum
_SAMPLE = 64


def checksum(weight: torch.Tensor, bias: torch.Tensor) -> int:
    """Return the CRC-32 of the bias and a sample of each row of the weight, to notice changes of a folded layer."""
    rows = weight.detach().reshape(len(weight), -1)
    sample = rows[:, :: max(1, rows.shape[1] // _SAMPLE)]
    first, second = (t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in (sample, bias))
    return zlib.crc32(second, zlib.crc32(first))


def batch_norm_parameters(graph: Graph, fold: Fold) -> tuple[torch.Tensor, ...]:
    """Return gamma, beta, mean and variance, [C] float64."""
    w, mean = graph.weights, graph.weights[fold.mean].detach().double()
    absent = (fold.gamma, 1.0), (fold.beta, 0.0)
    gamma, beta = (mean * 0 + n if name is None else w[name].detach().double() for name, n in absent)
    return gamma, beta, mean, w[fold.var].detach().double()


def unfold_batch_norms(graph: Graph) -> Graph:
    """Return the graph with weights and biases as they were before batch norms were folded into them.

    A channel whose gamma is 0 was folded to zeros and keeps them. Biases that layers did not have are 0.

    Raises:
        UnsupportedError: there is no folded batch norm, or a folded layer has changed since.
    """
    out, readers = graph.copy(), graph.users()
    for name, fold in graph.folds.items():
        w, b = graph.weights[name], graph.weights[fold.bias]
        if not readers.get(name) or checksum(w, b) != fold.checksum:
            hint = 'train with bn_fold=0, or quantize with rounding="off" and no settings that equalize or correct'
            what = "A layer was changed after its batch norm was folded, so that the two cannot be told apart"
            raise UnsupportedError(what, where=name, hint=hint)
        gamma, beta, mean, var = batch_norm_parameters(graph, fold)
        k = gamma / torch.sqrt(var + fold.eps)
        safe = torch.where(k == 0, 1.0, k)
        out.weights[name] = scale_outputs(readers[name][0], w.detach().double(), 1 / safe).to(w.dtype)
        raw = torch.where(k == 0, 0.0, (b.detach().double() - beta) / safe + mean)
        out.weights[fold.bias] = (raw if fold.biased else raw * 0).to(b.dtype)
        unread = {n.bias or "" for n in readers[name]} - ({fold.bias} if fold.biased else set())
        out.trainable -= unread  # the bias that folding added follows from the batch norm
    if not graph.folds:
        raise UnsupportedError("There is no folded batch norm in this network", hint="train with bn_fold=0")
    return out


def bias_is_free(graph: Graph, weight: str) -> bool:
    """Return whether the bias of a layer may change: a batch norm that is folded into it needs a beta of its own."""
    fold = graph.folds.get(weight)
    return fold is None or (fold.beta is not None and sum(f.beta == fold.beta for f in graph.folds.values()) == 1)


def move_beta(graph: Graph, weight: str, bias: torch.Tensor) -> None:
    """Let the batch norm that is folded into a layer, if one is, add what a new bias [O] adds, in place."""
    fold = graph.folds.get(weight)
    if fold is None or fold.beta is None or not bias_is_free(graph, weight):
        return
    w, old = graph.weights[weight], graph.weights[fold.bias]
    if checksum(w, old) == fold.checksum:
        beta = graph.weights[fold.beta]
        graph.weights[fold.beta] = (beta.detach().double() + bias.double() - old.detach().double()).to(beta.dtype)
        graph.folds[weight] = replace(fold, checksum=checksum(w, bias.to(w.dtype)))


def refresh_checksums(graph: Graph) -> None:
    """Record the present weights and biases as those into which batch norms are folded, in place."""
    for name, fold in graph.folds.items():
        graph.folds[name] = replace(fold, checksum=checksum(graph.weights[name], graph.weights[fold.bias]))


def batch_norm_terms(graph: Graph, bn: Node) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return k, mean and beta of an inference batch norm y = k (x - mean) + beta, k = gamma / sqrt(var + eps).

    Each is float64, [C], or [] for an operand that it has not.
    """
    absent = (torch.tensor(v, dtype=torch.float64) for v in (1.0, 0.0, 0.0, 1.0))
    operands = zip(bn.inputs[1:5], absent, strict=True)
    gamma, beta, mean, var = (graph.weights[i].detach().double() if i else default for i, default in operands)
    return torch.rsqrt(var + bn.attrs["eps"]) * gamma, mean, beta
