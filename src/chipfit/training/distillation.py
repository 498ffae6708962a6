"""Knowledge distillation: the quantized network learns from the outputs of the float network."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from chipfit.engine.run import run
from chipfit.errors import ConfigError, UnknownNameError
from chipfit.frameworks import adapter_of
from chipfit.frameworks.torch.lower import as_quantized_module
from chipfit.graph.ir import Graph
from chipfit.graph.placement import moved
from chipfit.quantizers.ops import TorchOps
from chipfit.result import Result


def divergence(student: Any, teacher: Any, temperature: float = 1.0, axis: int = -1, ops: Any = TorchOps) -> Any:
    """Return T^2 KL(softmax(teacher / T) || softmax(student / T)), averaged over all axes but that of the classes.

    Source: Hinton et al. 2015, arXiv:1503.02531, section 2; T^2 keeps the size of gradients at every temperature.
    Student logits [0, 0] and teacher logits [ln 3, 0] at T = 1: 0.75 ln 1.5 + 0.25 ln 0.5 = 0.1308.

    Args:
        student, teacher: logits [*dims]; no gradient flows to the teacher.
        axis: of the classes.
        ops: `keras.ops` for tensors of Keras.
    """
    t = ops.stop_gradient(teacher) / temperature
    gap = ops.log_softmax(t, axis) - ops.log_softmax(student / temperature, axis)
    return temperature**2 * ops.mean(ops.sum(ops.softmax(t, axis) * gap, axis))


def teacher(result: Result) -> Any:
    """Return the float network as a model of the user's framework, on the CPU, without gradients.

    It shares the weights of `result`; they are not copied.
    """
    graph = _float(result)

    def run_flat(inputs: Sequence[torch.Tensor]) -> list[Any]:
        with torch.no_grad():
            done = run(graph, inputs)
        return [done[o] for o in graph.outputs]

    return adapter_of(graph.framework).device(graph, run_flat, graph.outputs)


class Distillation(nn.Module):
    """The quantized network with its float network as teacher: called like the model, it returns (outputs, loss).

    The outputs are those of `result.model`. The loss is the `divergence` of every float output (of its logarithm if a
    softmax computes it) plus the mean squared error of the named layers. It takes the place of the model in
    DistributedDataParallel or a trainer.

    Args:
        result: of a PyTorch model, as it came from `quantize`, so that it has the weights from before training.
        temperature: softens both distributions.
        layers: names of layers or tensors -> weight of their error; a sequence weighs each by 1.
        axis: of the classes, in every output.

    Raises:
        PlanError: the model is not of PyTorch.
        UnknownNameError: there is no such layer.
        ConfigError: the temperature is not positive.
    """

    def __init__(
        self, result: Result, temperature: float = 1.0, layers: Mapping[str, float] | Iterable[str] = (), axis: int = -1
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ConfigError("Temperature of distillation must be positive", got=temperature, allowed="above 0")
        self.student, self.float_graph = as_quantized_module(result.model), _float(result)
        self.temperature, self.axis = temperature, axis
        given = layers if isinstance(layers, Mapping) else dict.fromkeys(layers, 1.0)
        made = {key: o for n in self.float_graph.nodes for o in n.outputs[::-1] for key in (n.layer, n.name, o)}
        if unknown := [name for name in given if name not in made]:
            raise UnknownNameError("layer", unknown[0], made)
        self.layers = {made[name]: weight for name, weight in given.items()}
        self._softmax = {o for n in self.float_graph.nodes if n.op == "Softmax" for o in n.outputs}

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        """Return the outputs of the model for its arguments, and the loss []."""
        inputs = self.student.flatten_call(args, kwargs)
        outputs, kept = self.float_graph.outputs, list(self.layers)
        if self.training:
            self.student.begin_step()
        found, where = self.student.run_flat(inputs, kept), inputs[0].device
        with torch.no_grad():
            if any(w.device != where for w in self.float_graph.weights.values()):
                self.float_graph = moved(self.float_graph, where)
            known = run(self.float_graph, inputs, keep=kept)
        loss = torch.zeros((), device=where)
        for name, y in zip(outputs, found, strict=False):
            if y.is_floating_point():
                pair = [v.clamp_min(1e-12).log() if name in self._softmax else v for v in (y, known[name])]
                loss = loss + divergence(pair[0], pair[1], self.temperature, self.axis)
        for name, y in zip(kept, found[len(outputs) :], strict=True):
            loss = loss + self.layers[name] * nn.functional.mse_loss(y, known[name])
        return self.student._results(found[: len(outputs)]), loss


def _float(result: Result) -> Graph:
    """Return the float network before corrections for rounding."""
    return result.decision.graph if result.uncorrected else result.graph
