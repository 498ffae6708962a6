"""From Graph and Plan to an `nn.Module` that simulates the chip and still trains."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chipfit.engine.kernels import call
from chipfit.engine.run import done_after
from chipfit.engine.trees import Results, flatten_call
from chipfit.errors import UnknownNameError
from chipfit.frameworks.torch.bn_fold import SyncedOps, channels, repeated, step
from chipfit.frameworks.torch.bounds import Checkpointed, ScaleBounds
from chipfit.frameworks.torch.modules import ActivationQuantizer, BiasQuantizer, FakeQuantizer, LayerWeights, own
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import TRANSPOSED
from chipfit.plan.record import Plan
from chipfit.plan.sharing import QuantizerSharing, share_quantizers
from chipfit.plan.training import Training, before_training
from chipfit.quantizers.algorithms.ste import STE
from chipfit.quantizers.bn_fold import Channels, Norm, folded, forward
from chipfit.quantizers.ops import TorchOps


def lower(graph: Graph, plan: Plan, training: Training | None = None) -> QuantizedModule:
    """The trainable simulation of `graph` under `plan`; in eval mode, as it came from calibration.

    Args:
        training: what trains the quantizers; None leaves their scales where they are.

    Raises:
        UnsupportedError: an algorithm cannot train a tensor.
    """
    return QuantizedModule(graph, plan, training)


class QuantizedModule(Checkpointed):
    """A model as the chip computes it, in float: every stored tensor is rounded to its grid.

    It takes and returns what the original model does. Parameters and buffers have the original state-dict names;
    quantizers live under `quant.` (`quant_.` where the model has a `quant` of its own), one for all tensors that a tie
    holds together. Batch norms that were folded keep their entries, frozen, which nothing reads; the weights before
    them hold the folded numbers. Where `training` folds them in each step, both hold what they did before folding, and
    train. Batch norms that were not folded keep their statistics in training. Dropout is active in training mode.

    `segments` is how many parts of the network keep their results for the backward pass, which computes the rest again
    (gradient checkpointing): 1 keeps all of them.
    """

    segments = 1

    def __init__(self, graph: Graph, plan: Plan, training: Training | None = None) -> None:
        super().__init__()
        as_planned = graph
        graph, plan = before_training(graph, plan, training)
        self.bn_fold = training.bn_fold if training is not None else 0  #: set to 1, statistics of batch norms stay
        self._folds = graph.folds if self.bn_fold else {}
        found = share_quantizers(graph, plan)
        self._own_all(graph, found.rounded)
        taken = {name.partition(".")[0] for name in graph.weights}
        self._prefix = "quant"
        while self._prefix in taken:  # a name in state dicts, which `builder.unique` would number
            self._prefix += "_"
        self._modules[self._prefix] = nn.Module()
        #: tensor -> its module under `quant`
        self._keys: dict[str, str] = {}
        for name, owner in found.owner.items():
            if owner not in self._keys:
                factors = tuple(self.quantizer_of(i) for i in found.products.get(owner, ()))
                known = graph if self.bn_fold == -1 else as_planned
                own = None if factors else _quantizer(known, plan, found, training, owner)
                self._keys[owner] = self._add(owner, own or BiasQuantizer(owner, plan[owner], factors))
            self._keys[name] = self._keys[owner]
        self._rounded = found.rounded  #: tensors that pass through their quantizer
        for path, leaf in (name.rpartition(".")[::2] for name in found.rounded & set(graph.weights)):
            if path:
                layer: LayerWeights = self._module(path.split("."))
                layer.weights_quantizers[leaf] = self.quantizer_of(f"{path}.{leaf}")

        self._inputs, self._outputs = tuple(graph.inputs), tuple(graph.outputs)
        self._float_reads = frozenset(plan.float_edges)
        self._unrounded = frozenset(name for name, _ in plan.float_edges) & self._rounded
        normed = [n for n in graph.nodes if n.operand("w") in self._folds]
        self._behind = frozenset(n.name for n in normed)  #: nodes whose batch norm is folded in each step
        #: their weights -> the groups of a transposed layer
        self._groups = {n.weight: n.attrs["groups"] if n.op in TRANSPOSED else None for n in normed}
        self._momentum = training.bn_momentum if training is not None else 0.0
        self._ops = SyncedOps if training is not None and training.bn_sync else TorchOps
        self._before: dict[str, dict[str, torch.Tensor]] = {}  #: weight -> what its batch norm remembered a step ago
        self._nodes, self._done = tuple(graph.nodes), done_after(graph)
        self._in_spec, self._results = json.loads(graph.in_spec), Results(graph)
        all_own = {o: q for o in found.owner.values() if isinstance(q := self.quantizer_of(o), FakeQuantizer)}
        self._bounds = ScaleBounds(found, plan, all_own)
        self._live = tuple(name for name in graph.weights if self.weight(name).requires_grad)
        self.eval()

    # ---- construction

    def _own_all(self, graph: Graph, rounded: set[str]) -> None:
        """Register every weight under its dotted name; entries that were tied stay one tensor."""
        layers = {name.rpartition(".")[0] for name in rounded & set(graph.weights)}
        made: dict[int, torch.Tensor] = {}
        used = {i for n in graph.nodes for i in n.inputs} | set(graph.outputs)
        used |= {name for f in self._folds.values() for name in (f.gamma, f.beta)}
        live = {id(t) for name, t in graph.weights.items() if name in used}
        for name, tensor in graph.weights.items():
            if id(tensor) not in made:
                copy = tensor.detach().clone()
                trains = name in graph.trainable
                made[id(tensor)] = nn.Parameter(copy, requires_grad=id(tensor) in live) if trains else copy
            own(self, name, made[id(tensor)], layers)

    def _add(self, name: str, quantizer: nn.Module) -> str:
        """Register a quantizer; returns its key."""
        key = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
        while hasattr(self._quant, key):  # taken, or an attribute of nn.Module
            key += "_"
        self._quant.add_module(key, quantizer)
        return key

    # ---- use

    @property
    def _quant(self) -> nn.Module:
        return self._modules[self._prefix]  # type: ignore[return-value]  # set in __init__

    def quantizer_of(self, name: str) -> FakeQuantizer | BiasQuantizer:
        """The quantizer of one value or weight, by its name in the Graph and the Plan.

        Raises:
            UnknownNameError: the tensor is not quantized.
        """
        if name not in self._keys:
            raise UnknownNameError("quantized tensor", name, self._keys)
        return getattr(self._quant, self._keys[name])

    def set_mode(self, mode: str) -> None:
        """Switch every quantizer: "quantize", "bypass" for the float network after rewrites, or "observe".

        Raises:
            UnknownNameError: another word.
        """
        if mode not in FakeQuantizer.MODES:
            raise UnknownNameError("quantizer mode", mode, FakeQuantizer.MODES)
        for m in self._quant.children():
            m.mode = mode  # type: ignore[assignment]  # both kinds of quantizer have it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same arguments and result as the original model.

        Raises:
            TrainingError: in training mode, a number is none.
        """
        if self.training and not torch.compiler.is_exporting():  # here, where a compiler can go on behind it
            self.begin()
        return self._results(self.run_flat(flatten_call(self._in_spec, args, kwargs)))

    def run_flat(self, inputs: Sequence[torch.Tensor], keep: Sequence[str] = ()) -> list[Any]:
        """Run on flat inputs; returns the outputs, then the values named in `keep` (quantized where they are)."""
        env: dict[str, Any] = {}  # after the quantizer
        floats: dict[str, Any] = {}  # before it, where someone reads that
        for name, given in zip(self._inputs, inputs, strict=True):
            self._put(env, floats, name, given)
        walk = list(zip(self._nodes, self._done, strict=True))
        size = max(1, -(-len(walk) // self.segments))
        for k in range(0, len(walk), size):
            state = (walk[k : k + size], env, floats, keep, inputs[0].device if inputs else None)
            again = self.segments > 1 and torch.is_grad_enabled()
            env, floats = checkpoint(self._walk, *state, use_reentrant=False) if again else self._walk(*state)
        return [self._get(env, floats, n) for n in (*self._outputs, *keep)]

    def _put(self, env: dict[str, Any], floats: dict[str, Any], name: str, x: Any) -> None:
        if name in self._unrounded:
            floats[name] = x
        env[name] = getattr(self._quant, self._keys[name])(x) if name in self._rounded else x

    def _get(self, env: dict[str, Any], floats: dict[str, Any], name: str) -> Any:
        if name not in env:
            self._put(env, floats, name, self.weight(name))
        return env[name]

    def _walk(self, part: Sequence[Any], env: dict[str, Any], floats: dict[str, Any], keep: Any, where: Any) -> Any:
        """What `env` and `floats` hold after some nodes; both stay as they are."""
        env, floats = dict(env), dict(floats)
        for node, done in part:
            xs: list[Any] = []
            normed = node.name in self._behind
            for i in node.inputs[:1] if normed else node.inputs:
                x = None if i is None else self._get(env, floats, i)
                xs.append(floats[i] if i in floats and (i, node.name) in self._float_reads else x)
            f, args, attrs = (self._normed, [node, *xs], {}) if normed else call(node, xs)
            if node.op == "Dropout":
                attrs = {**attrs, "training": self.training}
            elif "device" in attrs and where:  # a tensor made on the device of capture follows the model to another
                attrs = {**attrs, "device": where}
            out = f(*args, **attrs)
            del xs, args
            for name, x in zip(node.outputs, out if isinstance(out, (tuple, list)) else (out,), strict=False):
                self._put(env, floats, name, x)
            for name in done:
                if name not in keep:
                    floats.pop(name, None)
                    env.pop(name, None)
        return env, floats

    @torch.compiler.disable
    def begin(self) -> None:
        """Count a step of training, and `settle`.

        Raises:
            TrainingError: see `settle`.
        """
        if not repeated():
            self._bounds.steps += 1
            self.settle()

    @torch.compiler.disable
    def settle(self) -> None:
        """Bring scales to where the platform's rules hold, as each step of training does, and as `eval()` does.

        Raises:
            TrainingError: a number is none; names layer and step.
        """
        if self._bounds.quantizers:
            self._bounds.hold({n: self.weight(n) for n in self._live}, self._stored)

    def train(self, mode: bool = True) -> QuantizedModule:
        super().train(mode)
        if not mode:
            self.settle()
        return self

    def _normed(self, node: Node, x: torch.Tensor) -> torch.Tensor:
        """A layer and the batch norm that is folded into it."""

        def rounding_of(name: str | None) -> Any:
            rounds = name in self._rounded and (name, node.name) not in self._float_reads
            return self.quantizer_of(name) if rounds else lambda t: t

        def layer(w: torch.Tensor, b: torch.Tensor | None) -> Any:
            f, args, attrs = call(node, [x, w, b])
            return f(*args, **attrs)

        w, bias = node.weight, self._folds[node.weight].bias
        (norm, at), again = self._norm(w), repeated()
        if again and self.training and self.bn_fold != 1 and w in self._before:
            norm = replace(norm, **self._before[w])
        given = (layer, self.weight(w), self.weight(bias), norm, at, rounding_of(w), rounding_of(node.bias))
        y, batch = forward(self._ops, self.bn_fold, self.training, *given)
        if batch is not None and not again:
            self._before[w] = {"mean": norm.mean.clone(), "var": norm.var.clone()}
            step(norm.mean, norm.var, batch, self._momentum)
        return y  # type: ignore[no-any-return]  # of what the layer gives

    def _norm(self, weight: str) -> tuple[Norm, Channels]:
        """The batch norm behind a weight, and where that has its channels."""
        fold = self._folds[weight]
        mean, var = self.weight(fold.mean), self.weight(fold.var)
        absent = (fold.gamma, 1.0), (fold.beta, 0.0)
        gamma, beta = (torch.full_like(mean, n) if name is None else self.weight(name) for name, n in absent)
        return Norm(gamma, beta, mean, var, fold.eps), channels(self.weight(weight), self._groups[weight])

    def folded(self, weight: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and bias that inference computes with, of a layer whose batch norm trains."""
        norm, at = self._norm(weight)
        return folded(TorchOps, self.weight(weight), self.weight(self._folds[weight].bias), norm, at)

    def _stored(self, name: str) -> torch.Tensor:
        """The weight that is rounded."""
        return self.folded(name)[0] if name in self._folds and self.bn_fold != -1 else self.weight(name)

    def scale(self, name: str) -> torch.Tensor:
        """The scale of a quantized tensor as it is now; that of a bias follows from its input and its weight."""
        return self.quantizer_of(name).numbers()[0]

    def weight(self, name: str) -> torch.Tensor:
        """A parameter or buffer by its name in the Graph."""
        *path, leaf = name.split(".")
        module = self._module(path)
        return module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]

    def _module(self, path: Sequence[str]) -> Any:
        module: Any = self
        for p in path:
            module = module._modules[p]
        return module


def _quantizer(
    graph: Graph, plan: Plan, found: QuantizerSharing, training: Training | None, name: str
) -> FakeQuantizer:
    """The quantizer of a tensor with a scale of its own; numbers that the platform dictates do not train."""
    t, weight, stored = plan.tensors[name], graph.weights.get(name), found.start(plan, name)
    algorithm = (training.algorithm(t) if training is not None and name not in found.fixed else None) or STE()
    shape = tuple(weight.shape) if weight is not None else graph.values[name].shape
    kind = ActivationQuantizer if t.role == "activation" else FakeQuantizer
    return kind(name, stored, algorithm.for_tensor(stored, t.role, shape), weight)


class DeviceModel(nn.Module):
    """Takes and returns what the original model does; what it returns is what the device would.

    Where the runtime itself computes in float, at the operators in `float_operators`, the last bit is the runtime's.
    It has no parameters and gives no gradients.
    """

    def __init__(self, graph: Graph, run_flat: Callable[[Sequence[torch.Tensor]], list[Any]], floats: Sequence[str]):
        super().__init__()
        self.float_operators = tuple(floats)
        self._in_spec, self._results, self.run_flat = json.loads(graph.in_spec), Results(graph), run_flat
        self._types = [getattr(torch, graph.values[i].dtype) for i in graph.inputs]
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same arguments and result as the original model, on the inputs' device."""
        flat = flatten_call(self._in_spec, args, kwargs)
        outs = self.run_flat([x.detach().to("cpu", kind) for x, kind in zip(flat, self._types, strict=True)])
        return self._results([x.to(flat[0].device) if flat and isinstance(x, torch.Tensor) else x for x in outs])

    def extra_repr(self) -> str:
        return f"in float: {', '.join(self.float_operators) or 'nothing'}"
