"""Modules made from a Graph and a Plan: the simulation of the chip, its training, and the device for evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chipfit.engine.kernels import call
from chipfit.engine.run import done_after
from chipfit.engine.trees import ResultStructure, flatten_call
from chipfit.errors import PlanError, UnsupportedError, check_known
from chipfit.frameworks.torch.bn_fold import SyncedOps, channels, is_recomputation, update_statistics
from chipfit.frameworks.torch.layers import layer_like
from chipfit.frameworks.torch.modules import (
    ActivationQuantizer,
    BiasQuantizer,
    Checkpointed,
    FakeQuantizer,
    LayerWeights,
    register_weight,
)
from chipfit.frameworks.torch.sharding import check_precision, gather, is_sharded, whole, whole_tensor
from chipfit.frameworks.torch.step_checks import TorchScaleBounds
from chipfit.frameworks.torch.symbolic import inputs_of, operator_node, weight_node
from chipfit.frameworks.training import trained_plan
from chipfit.graph.edit import lies_channels_last
from chipfit.graph.folds import refresh_checksums
from chipfit.graph.ir import CPU, Graph, Node
from chipfit.graph.linear import TRANSPOSED
from chipfit.plan.record import Plan
from chipfit.plan.sharing import QuantizerSharing, share_quantizers
from chipfit.plan.training import Training, before_training, check_folds
from chipfit.quantizers.algorithm import revived
from chipfit.quantizers.algorithms.ste import STE
from chipfit.quantizers.bn_fold import Norm, NormalizedLayer
from chipfit.quantizers.ops import TorchOps


@torch.inference_mode(False)  # it can train, also where an evaluation is the first to need it
def lower(graph: Graph, plan: Plan, training: Training | None = None) -> QuantizedModule:
    """Build the trainable simulation of `graph` under `plan`, in eval mode, on the device of the user's model.

    Args:
        training: what trains the quantizers; None leaves their scales where they are.

    Raises:
        UnsupportedError: An algorithm cannot train a tensor.
    """
    made = QuantizedModule(graph, plan, training)
    if graph.device != CPU:
        made.to(graph.device)
        made.tie(graph)
    return made


def _norm_of_batch(x: torch.Tensor, w: Any, b: Any, mean: Any, var: Any, *, eps: float) -> torch.Tensor:
    """Normalize by the statistics of the batch, and move the running ones by a tenth, PyTorch's default."""
    return nn.functional.batch_norm(x, mean, var, w, b, True, 0.1, eps)


class QuantizedModule(Checkpointed):
    """A model as the chip computes it, in float: every stored tensor is rounded to its grid.

    Arguments and result are those of the original model. Parameters and buffers have the original names in the state
    dict. Quantizers are in `quant` (`quant_` if the model has a `quant` of its own); tied tensors share one quantizer.
    Batch norms that were folded before training keep their entries, frozen and unused; the weights before them are
    folded. If `training` folds batch norms in each step, weights and batch norms are unfolded, and train. Other batch
    norms keep their statistics in training. Dropout is active in training mode.

    `segments` is the number of parts of the network whose inputs are stored for the backward pass, which computes the
    rest again (gradient checkpointing); 1 stores everything.
    """

    segments = 1
    #: batch norms use and update their statistics in training, as of a float network
    batch_statistics = False
    #: further attributes, with other tools' names: a submodule by its path, an operator as the layer that it comes from
    #: unless a quantizer is on it, or a module. Submodules that compute nothing give way to them.
    aliases: Mapping[str, str | Node | nn.Module] = MappingProxyType({})

    def __init__(self, graph: Graph, plan: Plan, training: Training | None = None) -> None:
        super().__init__()
        training, as_planned = training or Training(), graph
        graph, plan = before_training(graph, plan, training)
        self.bn_fold = training.bn_fold  #: setting it to 1 freezes the statistics of batch norms
        self._folds = graph.folds if self.bn_fold else {}
        sharing = share_quantizers(graph, plan)
        self._add_weights(graph, sharing.rounded)
        self._channels_last = frozenset(name for name, w in graph.weights.items() if lies_channels_last(w))
        first_parts = {name.partition(".")[0] for name in graph.weights}
        self._prefix = "quant"
        while self._prefix in first_parts:  # not `unique_name`, whose number would appear in state dicts
            self._prefix += "_"
        self._modules[self._prefix] = nn.Module()
        self._keys: dict[str, str] = {}  #: tensor -> its module under `quant`
        self._add_quantizers(graph if self.bn_fold == -1 else as_planned, plan, sharing, training)
        self._rounded = sharing.rounded  #: tensors that pass through a quantizer
        for path, leaf in (name.rpartition(".")[::2] for name in sharing.rounded & set(graph.weights)):
            if path:
                layer: LayerWeights = self._module(path.split("."))
                layer.weights_quantizers[leaf] = self.quantizer_of(f"{path}.{leaf}")
                layer.node = next((n for n in graph.nodes if f"{path}.{leaf}" in n.inputs), layer.node)

        self._name_float_layers(graph)

        self._inputs, self._outputs = tuple(graph.inputs), tuple(graph.outputs)
        self._float_reads = frozenset(plan.float_edges)
        self._unrounded = frozenset(name for name, _ in plan.float_edges) & self._rounded
        folding = [n for n in graph.nodes if n.operand("w") in self._folds]
        self._folding = frozenset(n.name for n in folding)  #: nodes whose batch norm is folded in each step
        #: weights of these nodes -> groups, None unless transposed
        self._groups = {n.weight: n.attrs["groups"] if n.op in TRANSPOSED else None for n in folding}
        self.bn_momentum, self._ops = training.bn_momentum, SyncedOps if training.bn_sync else TorchOps
        self._previous: dict[str, dict[str, torch.Tensor]] = {}  #: weight -> running statistics one step before
        self._nodes, self._done = tuple(graph.nodes), done_after(graph)
        self._in_spec, self._results = json.loads(graph.in_spec), ResultStructure(graph)
        with_scale = {o: q for o in sharing.owner.values() if isinstance(q := self.quantizer_of(o), FakeQuantizer)}
        self._bounds = TorchScaleBounds(sharing, plan, with_scale)
        self._trainable = tuple(name for name in graph.weights if self.weight(name).requires_grad)
        self.eval()

    # ---- construction

    def _add_weights(self, graph: Graph, rounded: set[str]) -> None:
        """Register every weight under its dotted name; tied entries stay one tensor."""
        layers = {name.rpartition(".")[0] for name in rounded & set(graph.weights)}
        registered: dict[int, torch.Tensor] = {}
        used = {i for n in graph.nodes for i in n.inputs} | set(graph.outputs)
        used |= {name for f in self._folds.values() for name in (f.gamma, f.beta)}
        live = {id(t) for name, t in graph.weights.items() if name in used}
        for name, tensor in graph.weights.items():
            if id(tensor) not in registered:
                copy = tensor.detach().clone(memory_format=torch.contiguous_format)  # FSDP2 shards no others
                trains = name in graph.trainable
                registered[id(tensor)] = nn.Parameter(copy, requires_grad=id(tensor) in live) if trains else copy
            register_weight(self, name, registered[id(tensor)], layers)

    def _name_float_layers(self, graph: Graph) -> None:
        """Let layers without quantizers be modules of their classes, with the same tensors; none of them is called.

        The tensors of a module may be arguments of a function: that module has the class of a layer that computes it.
        """
        for node in graph.nodes:
            own = {i.rpartition(".")[0] for i in node.inputs if i in graph.weights}
            if len(own) != 1 or own & {""} or node.layer not in {"", *own}:
                continue
            *path, name = own.pop().split(".")
            modules = self._module(path)._modules
            held = modules[name]
            if type(held) is nn.Module and not held._modules:
                tensors = [*held._parameters.items(), *held._buffers.items()]
                known = {leaf: t for leaf, t in tensors if t is not None}
                modules[name] = layer_like(node, known, len(graph.shape(node.data)))

    def tie(self, graph: Graph) -> None:
        """Let tied weights be one tensor again, which `to` makes two for devices that live outside PyTorch."""
        first: dict[int, str] = {}
        for name, tensor in graph.weights.items():
            if (own := first.setdefault(id(tensor), name)) != name:
                *path, leaf = name.split(".")
                module = self._module(path)
                table = module._parameters if leaf in module._parameters else module._buffers
                table[leaf] = self.weight(own)

    def _add_quantizers(self, graph: Graph, plan: Plan, sharing: QuantizerSharing, training: Training) -> None:
        """Register the quantizer of every tensor; tied tensors share one."""
        for name, owner in sharing.owner.items():
            if owner not in self._keys:
                factors = tuple(self.quantizer_of(i) for i in sharing.products.get(owner, ()))
                own = None if factors else _quantizer(graph, plan, sharing, training, owner)
                self._keys[owner] = self._add_quantizer(owner, own or BiasQuantizer(owner, plan[owner], factors))
            self._keys[name] = self._keys[owner]

    def _add_quantizer(self, name: str, quantizer: nn.Module) -> str:
        """Register a quantizer; return its key."""
        key = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
        while hasattr(self._quant, key):  # used already, or an attribute of nn.Module
            key += "_"
        self._quant.add_module(key, quantizer)
        return key

    # ---- use

    def __getattr__(self, name: str) -> Any:
        part, own = self.__dict__.get("aliases", {}).get(name), self._modules.get(name)
        if part is None or (own is not None and (type(own) is not nn.Module or own._modules)):
            return super().__getattr__(name)
        if isinstance(part, nn.Module):
            return part
        if isinstance(part, str):
            return self.get_submodule(part)
        held: Any = own or self  # the weights of the layer or function, if it has any
        for step in part.layer.split(".") if own is None else ():
            held = held._modules.get(step) or nn.Module()
        return layer_like(part, {**held._parameters, **held._buffers})

    def path_of_quantizer(self, name: str) -> str:
        """Return the path of the submodule that quantizes a tensor; raises as `quantizer_of`."""
        self.quantizer_of(name)
        return f"{self._prefix}.{self._keys[name]}"

    @property
    def quantizers(self) -> Iterable[Any]:
        """All quantizers, each once."""
        return self._quant.children()

    @property
    def steps(self) -> int:
        """Steps of training so far."""
        return self._bounds.steps

    @property
    def _quant(self) -> nn.Module:
        return self._modules[self._prefix]  # type: ignore[return-value]  # set in __init__

    def quantizer_of(self, name: str) -> FakeQuantizer | BiasQuantizer:
        """Return the quantizer of a value or weight, by its name in Graph and Plan.

        Raises:
            UnknownNameError: The tensor is not quantized.
        """
        check_known("quantized tensor", name, self._keys)
        return getattr(self._quant, self._keys[name])

    def rounded_weights(self) -> Iterator[tuple[str, FakeQuantizer]]:
        """Yield names and quantizers of the weights that train and are rounded."""
        for name in self._trainable:
            if name in self._rounded and self._bounds.plan.tensors[name].role == "weight":
                yield name, self.quantizer_of(name)  # type: ignore[misc]  # biases have the other kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with the arguments of the original one; in training mode, first count a step.

        Floats of any type are taken, and results have the types that the original model returns. A symbolic trace of
        torch.fx has one node for each operator, quantizer and weight.

        Raises:
            UnsupportedError: torch.fx traces a model whose batch norms are folded in each step.
            TrainingError: In training mode, a number is not finite or a scale not positive.
        """
        if not isinstance(args, tuple):  # a proxy of torch.fx
            return self._results(self._trace(args, kwargs))
        if is_sharded(self):  # layers with a group of their own, whose `forward` does not run
            gather(self)
        if self.training and not torch.compiler.is_exporting():  # in `forward`, where a compiler can continue after it
            self.begin_step()
        return self._results(self.run_flat(self.flatten_call(args, kwargs)))

    def flatten_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the inputs of a call, tensors or arrays, in the order of the graph's, floats in the type of weights.

        Raises:
            DataError: The structure differs from that of the captured call.
        """
        like = next((p for p in self.parameters() if p.is_floating_point()), torch.empty(0))
        flat = flatten_call(self._in_spec, args, kwargs)
        flat = [torch.as_tensor(x, device=like.device) if isinstance(x, np.ndarray) else x for x in flat]
        return [x.to(like.dtype) if torch.is_tensor(x) and x.is_floating_point() else x for x in flat]

    def run_flat(self, inputs: Sequence[torch.Tensor], keep: Sequence[str] = ()) -> list[Any]:
        """Run on flat inputs; return the outputs, then the values named in `keep`, quantized if the plan says so."""
        env: dict[str, Any] = {}  # values after their quantizer
        floats: dict[str, Any] = {}  # values before their quantizer, if a node reads them
        for name, given in zip(self._inputs, inputs, strict=True):
            self._store(env, floats, name, given)
        nodes = list(zip(self._nodes, self._done, strict=True))
        size = max(1, -(-len(nodes) // self.segments))
        for k in range(0, len(nodes), size):
            state = (nodes[k : k + size], env, floats, keep, inputs[0].device if inputs else None)
            recompute = self.segments > 1 and torch.is_grad_enabled()
            run: Any = partial(checkpoint, self._run_part, use_reentrant=False) if recompute else self._run_part
            env, floats = run(*state)
        return [self._load(env, floats, n) for n in (*self._outputs, *keep)]

    def _trace(self, args: Any, kwargs: Any) -> list[Any]:
        """Return the outputs of a call with proxies of torch.fx.

        Raises:
            UnsupportedError: Batch norms are folded in each step, which is not an operator of the network.
        """
        if self._folding:
            hint = "trace the model of the result, `result.model`, or train with bn_fold=0"
            raise UnsupportedError("torch.fx cannot trace batch norms that are folded in each step", hint=hint)
        env, floats = dict[str, Any](), dict[str, Any]()
        for name, x in zip(self._inputs, inputs_of(self._in_spec, args, kwargs), strict=True):
            self._store(env, floats, name, x)
        for node in self._nodes:
            for name in (i for i in node.inputs if i is not None and i not in env):
                self._store(env, floats, name, weight_node(args, name))
            attrs = {**node.attrs, "training": self.training} if node.op == "Dropout" else node.attrs
            outputs = operator_node(args, node, self._operands(node, env, floats), attrs)
            for name, x in zip(node.outputs, outputs, strict=True):
                self._store(env, floats, name, x)
        return [self._load(env, floats, n) for n in self._outputs]

    def _operands(self, node: Node, env: dict[str, Any], floats: dict[str, Any], count: int | None = None) -> list[Any]:
        """Return the first inputs of a node, rounded unless it reads them in float."""
        xs: list[Any] = []
        for i in node.inputs[:count]:
            x = None if i is None else self._load(env, floats, i)
            xs.append(floats[i] if i in floats and (i, node.name) in self._float_reads else x)
        return xs

    def _store(self, env: dict[str, Any], floats: dict[str, Any], name: str, x: Any) -> None:
        if name in self._unrounded:
            floats[name] = x
        env[name] = getattr(self._quant, self._keys[name])(x) if name in self._rounded else x

    def _load(self, env: dict[str, Any], floats: dict[str, Any], name: str) -> Any:
        if name not in env:
            w = self.weight(name)
            last = name in self._channels_last
            self._store(env, floats, name, w.contiguous(memory_format=torch.channels_last) if last else w)
        return env[name]

    def _run_part(self, part: Sequence[Any], env: dict[str, Any], floats: dict[str, Any], keep: Any, where: Any) -> Any:
        """Run some nodes; return `env` and `floats` after them, as copies."""
        env, floats = dict(env), dict(floats)
        for node, done in part:
            folds = node.name in self._folding
            xs = self._operands(node, env, floats, 1 if folds else None)
            if node.facts.steep and torch.is_grad_enabled() and xs[-1].requires_grad:
                # rounding makes zeros, at which an infinite slope would spoil every gradient
                xs[-1] = torch.where(xs[-1] == 0, xs[-1].detach(), xs[-1])
            f, args, attrs = (self._run_with_batch_norm, [node, *xs], {}) if folds else call(node, xs)
            if node.op == "Dropout":
                attrs = {**attrs, "training": self.training}
            elif node.op == "BatchNorm" and self.batch_statistics and self.training:
                f = _norm_of_batch
            elif "device" in attrs and where:  # a tensor created on the device of capture moves with the model
                attrs = {**attrs, "device": where}
            out = f(*args, **attrs)
            del xs, args
            for name, x in zip(node.outputs, out if isinstance(out, (tuple, list)) else (out,), strict=False):
                self._store(env, floats, name, x)
            for name in done:
                if name not in keep:
                    floats.pop(name, None)
                    env.pop(name, None)
        return env, floats

    @torch.compiler.disable
    def begin_step(self) -> None:
        """Count a step of training, and enforce its bounds.

        Raises:
            TrainingError: See `enforce_bounds`.
            ConfigError: FSDP2 casts the scales.
        """
        if not is_recomputation():
            check_precision(self, (q.scale for q in self.quantizers if isinstance(q, FakeQuantizer)))
            self._bounds.steps += 1
            self.enforce_bounds(begins=True)

    @torch.compiler.disable
    def enforce_bounds(self, begins: bool = False) -> None:
        """Project scales into the platform's bounds, as each step of training and `eval()` do.

        Args:
            begins: whether a training step begins, see `TorchScaleBounds.enforce`.

        Raises:
            TrainingError: A number is not finite or a scale not positive; names layer and step.
        """
        if self._bounds.quantizers:
            with whole(self):
                self._bounds.enforce({n: self.weight(n) for n in self._trainable}, self.weight_to_round, begins)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        self._bounds.settled = False
        return super().load_state_dict(state_dict, strict, assign)

    def train(self, mode: bool = True) -> QuantizedModule:
        super().train(mode)
        if not mode:
            self.enforce_bounds()
        return self

    def _run_with_batch_norm(self, node: Node, x: torch.Tensor) -> torch.Tensor:
        """Run a layer with the batch norm that is folded into it."""

        def rounding_of(name: str | None) -> Any:
            rounds = name in self._rounded and (name, node.name) not in self._float_reads
            return self.quantizer_of(name) if rounds else lambda t: t

        def layer(w: torch.Tensor, b: torch.Tensor | None) -> Any:
            f, args, attrs = call(node, [x, w, b])
            return f(*args, **attrs)

        w, again = node.weight, is_recomputation()
        own = replace(self.normalized_layer(w), ops=self._ops)
        if again and self.training and self.bn_fold != 1 and w in self._previous:
            own = replace(own, norm=replace(own.norm, **self._previous[w]))
        y, batch = own.run(self.bn_fold, self.training, layer, rounding_of(w), rounding_of(node.bias))
        if batch is not None and not again:
            mean, var = own.norm.mean, own.norm.var
            self._previous[w] = {"mean": mean.clone(), "var": var.clone()}
            update_statistics(mean, var, batch, self.bn_momentum, y.numel())
        return y  # type: ignore[no-any-return]  # the result of `run` has no type

    def folds_in_each_step(self, weight: str) -> bool:
        """Return whether a batch norm is folded into a weight in each step."""
        return weight in self._folds and self.bn_fold != -1

    def running_statistics(self) -> list[torch.Tensor]:
        """Return mean and variance of every batch norm that trains."""
        return [self.weight(name) for f in self._folds.values() for name in (f.mean, f.var)]

    def normalized_layer(self, weight: str) -> NormalizedLayer:
        """Return the layer of a weight with the batch norm behind it, which trains."""
        fold = self._folds[weight]
        mean, var = self.weight(fold.mean), self.weight(fold.var)
        with_default = (fold.gamma, 1.0), (fold.beta, 0.0)
        gamma, beta = (torch.full_like(mean, n) if name is None else self.weight(name) for name, n in with_default)
        w, norm = self.weight(weight), Norm(gamma, beta, mean, var, fold.eps)
        return NormalizedLayer(TorchOps, w, self.weight(fold.bias), norm, channels(w, self._groups[weight]))

    def folded(self, weight: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the folded weight and bias of a layer whose batch norm trains."""
        return self.normalized_layer(weight).folded()

    def weight_to_round(self, name: str) -> torch.Tensor:
        """Return the tensor that the quantizer of a weight rounds: the folded weight where a batch norm trains."""
        return self.folded(name)[0] if self.folds_in_each_step(name) else self.weight(name)

    def scale(self, name: str) -> torch.Tensor:
        """Return the current scale of a quantized tensor; the scale of a bias follows from its input and its weight."""
        return self.quantizer_of(name).numbers()[0]

    def weight(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer by its name in the Graph."""
        *path, leaf = name.split(".")
        module = self._module(path)
        return module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]

    def _module(self, path: Sequence[str]) -> Any:
        module: Any = self
        for p in path:
            module = module._modules[p]
        return module


def _quantizer(graph: Graph, plan: Plan, sharing: QuantizerSharing, training: Training, name: str) -> FakeQuantizer:
    """Return the quantizer of a tensor with a scale of its own; numbers that the platform dictates do not train."""
    t, weight, stored = plan.tensors[name], graph.weights.get(name), sharing.start(plan, name)
    chosen = None if name in sharing.fixed else training.algorithm(t)
    stored = stored if chosen is None else revived(stored, weight)
    algorithm = chosen or STE()
    shape = tuple(weight.shape) if weight is not None else graph.values[name].shape
    kind = ActivationQuantizer if t.role == "activation" else FakeQuantizer
    return kind(name, stored, algorithm.for_tensor(stored, t.role, shape), weight)


class DeviceModel(nn.Module):
    """A model that takes the arguments of the original one and returns the device's results.

    The runtime computes `float_operators` in float, so that their last bit may differ on a device. The model has no
    parameters and no gradients.
    """

    def __init__(self, graph: Graph, run_flat: Callable[[Sequence[torch.Tensor]], list[Any]], floats: Sequence[str]):
        super().__init__()
        self.float_operators = tuple(floats)
        self._in_spec, self._results, self.run_flat = json.loads(graph.in_spec), ResultStructure(graph), run_flat
        self._types = [getattr(torch, graph.values[i].dtype) for i in graph.inputs]
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on tensors or arrays; the result is on the device of the inputs."""
        flat = [torch.as_tensor(x) for x in flatten_call(self._in_spec, args, kwargs)]
        outs = self.run_flat([x.detach().to("cpu", kind) for x, kind in zip(flat, self._types, strict=True)])
        return self._results([x.to(flat[0].device) if flat and isinstance(x, torch.Tensor) else x for x in outs])

    def extra_repr(self) -> str:
        return f"in float: {', '.join(self.float_operators) or 'nothing'}"


Step = Callable[[Sequence[torch.Tensor], torch.Tensor], float]


def stepper(model: QuantizedModule, rate: float, steps: int, probabilities: bool) -> Step:
    """Return a function that trains one step on flat inputs and labels [N], and returns the loss.

    The loss is cross-entropy; the optimizer is gradient descent with momentum 0.9 and a learning rate that falls to 0
    along a cosine. A step whose loss is not finite is skipped.

    Args:
        steps: number of steps of the whole training.
        probabilities: whether the model ends with a softmax.
    """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def step(inputs: Sequence[torch.Tensor], labels: torch.Tensor) -> float:
        model.train()
        model.begin_step()
        out = model.run_flat(inputs)[0]
        loss = torch.nn.functional.cross_entropy(out.clamp_min(1e-12).log() if probabilities else out, labels)
        if math.isfinite(value := loss.item()):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        return value

    return step


def state_arrays(model: torch.nn.Module) -> Iterator[np.ndarray]:
    """Yield the bytes of everything that training may change; tensors on the meta device have none."""
    for t in model.state_dict().values():
        if not t.is_meta:
            yield whole_tensor(t).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def as_quantized_module(model: torch.nn.Module) -> QuantizedModule:
    """Return the model with its type.

    Raises:
        PlanError: The model is not a quantized model of PyTorch.
    """
    if not isinstance(model, QuantizedModule):
        hint = "unwrap it first, for example `.module` of DistributedDataParallel"
        raise PlanError(f"A {type(model).__name__} is not a quantized model of PyTorch", hint=hint)
    return model


def _transformed(q: FakeQuantizer, w: torch.Tensor) -> torch.Tensor:
    """Return the weight that the algorithm rounds in place of w; it is computed where training computed it."""
    return q.reals(w.to(q.scale.device)).to(w.device)


def read_back(model: torch.nn.Module, graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """Return Graph and Plan with the numbers that `model` holds now, ready to be exported, verified or saved.

    Tied tensors stay tied; bias scales follow from their input and weight scales.

    Args:
        model: result of `lower(graph, plan)`, trained or loaded since.
        graph, plan: the graph and plan that the model was made from; they are not changed.

    Raises:
        PlanError: `model` was not made by `lower`, or training left a scale that is not positive and finite.
        UnsupportedError: An algorithm trained something that cannot be deployed.
    """
    model = as_quantized_module(model)
    with whole(model):
        return _read_back(model, graph, plan)


def _read_back(model: QuantizedModule, graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """Read a model whose parameters are whole back; see `read_back`."""
    if (share := min((q.share for q in model.quantizers), default=1.0)) < 1:
        what = "The trained model cannot be deployed: it is not fully rounded yet"
        raise UnsupportedError(what, got=f"a share of {share:g}", hint="`finish()` the schedule, and train on")
    check_folds(model.bn_fold)
    model.enforce_bounds()  # after an optimizer step that no forward pass has followed
    new = graph.copy()
    copies: dict[int, torch.Tensor] = {}
    for name, old in graph.weights.items():
        now = model.weight(name)
        if id(now) not in copies:
            copies[id(now)] = torch.empty_like(old).copy_(now.detach())
        new.weights[name] = copies[id(now)]
    with torch.no_grad():
        for node in (n for n in graph.nodes if model.bn_fold and n.operand("w") in graph.folds):
            folded = zip((node.weight, node.bias or ""), model.folded(node.weight), strict=True)
            new.weights |= {name: t.to(graph.weights[name]) for name, t in folded}
        trained: dict[str, Any] = {}
        for name in (name for name, t in plan.tensors.items() if t.quantized):
            q = model.quantizer_of(name)
            trained[name] = (*q.numbers(), q) if isinstance(q, FakeQuantizer) else (q.numbers()[0], None, None)
        plan = trained_plan(new, plan, trained, lambda name: _transformed(trained[name][2], new.weights[name]))
    if model.bn_fold:
        refresh_checksums(new)
    return new, plan
