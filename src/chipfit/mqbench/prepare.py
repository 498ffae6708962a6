"""prepare_qat_fx: a traced copy of a model with the quantizers of a hardware setting, ready to train."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from chipfit.errors import CaptureError, ConfigError, UnknownNameError, raise_bug, short_message
from chipfit.frameworks.torch.modules import Checkpointed, FakeQuantizer
from chipfit.frameworks.torch.step_checks import StepCheck
from chipfit.mct.target_platform.layers import operator_named
from chipfit.mqbench.folded_batch_norm import FoldedBatchNorm
from chipfit.mqbench.observers import ObserverBase
from chipfit.mqbench.quantizers import QuantizeBase
from chipfit.mqbench.settings import FoldBN, QConfig, is_scale_invariant
from chipfit.operators.table import OPS

__all__ = ["prepare_qat_fx"]

#: operators besides the weighted ones whose operands and results are quantized in graphs of kind 2 and 3
_ROUNDED_OPERATORS = set("Add Mul MatMul Concat Mean AvgPool AdaptiveAvgPool GlobalAvgPool Resize PRelu".split())
#: operators that run in the kernel of their producer
_FUSED_INTO_PRODUCER = set("Relu Relu6 Clamp BatchNorm".split())
#: tensor methods that return sizes
_SIZE_METHODS = ("dim", "numel", "size")


def prepare_qat_fx(
    model: nn.Module,
    qconfig_dict: Mapping[str, QConfig],
    foldbn_config: FoldBN | None = None,
    *,
    example_inputs: Any = None,
) -> PreparedModule:
    """Return a copy of a model that fake-quantizes weights and activations and trains like any other module.

    All parameters exist on return. Quantizers are initialized by the first batch of training, or by batches that run
    after `enable_calibration`. Names: `NODE_post_act_fake_quantizer` (activations), `LAYER.weight_quantizer` (weights).

    Args:
        model: a module in training or evaluation mode.
        qconfig_dict: {"": qconfig}.
        foldbn_config: how batch norms are folded; the qconfig's own strategy when omitted.
        example_inputs: a tensor or a tuple of inputs on which the copy is compared with the model.

    Raises:
        CaptureError: the model cannot be traced, or the trace computes something else.
        ConfigError, UnknownNameError: a configuration is invalid.
        UnsupportedError: a batch norm cannot be folded.
    """
    qconfig = qconfig_dict.get("") if isinstance(qconfig_dict, Mapping) else None
    if not isinstance(qconfig, QConfig):
        allowed = '{"": get_qconfig(...)}'
        raise ConfigError("qconfig_dict must hold one setting", got=repr(qconfig_dict)[:120], allowed=allowed)
    for name in set(qconfig_dict) - {""}:
        raise UnknownNameError("key of the qconfig dictionary", name, [""], hint="it holds one setting for all layers")
    if not isinstance(foldbn_config, FoldBN | None):
        allowed = "get_foldbn_config(...)"
        raise ConfigError("foldbn_config must be a folding strategy", got=repr(foldbn_config)[:120], allowed=allowed)
    traced = trace(model)
    if example_inputs is not None:
        _check_trace(traced, model, example_inputs if isinstance(example_inputs, tuple) else (example_inputs,))
    strategy = qconfig.bnfold if foldbn_config is None else foldbn_config.strategy
    return insert_quantizers(traced, qconfig, strategy).train(model.training)


class Setting(Protocol):
    """The quantizers of a model and their placement."""

    @property
    def graph(self) -> int: ...

    @property
    def outputs(self) -> bool: ...

    def quantizer(self, role: str, end: bool, axis: int = 0, layers: Collection[str] = ()) -> QuantizeBase: ...

    def quantizes(self, n: fx.Node, module: nn.Module | None) -> bool | None:
        """Return whether a node is quantized, in weights and inputs; None: the graph decides."""
        ...


def insert_quantizers(traced: fx.GraphModule, setting: Setting, strategy: int) -> PreparedModule:
    """Return a traced model, which is changed, with the quantizers of a setting.

    Raises:
        CaptureError: there is nothing to quantize.
    """
    graph = _Graph(traced, setting)
    if not graph.weighted:
        what = "The model has no convolution and no linear layer to quantize"
        raise CaptureError(what, got=type(traced).__name__)
    ends = graph.ends()
    for node in graph.weighted:
        _round_weight(graph, node, setting, strategy, any(n.target == node.target for n in ends))
    for source, (readers, reached) in _Graph(traced, setting).rounded(setting.graph, setting.outputs).items():
        layers = [str(n.target) for n in reached if n.op == "call_module"]
        quantizer = setting.quantizer("activation", bool(reached & ends), layers=layers)
        quantizer.prepare(None)
        name = f"{source.name}_post_act_fake_quantizer"
        traced.add_submodule(name, quantizer.to(next(traced.parameters()).device))
        with traced.graph.inserting_after(source):
            rounded = traced.graph.call_module(name, (source,))
        for reader in readers:
            reader.replace_input_with(source, rounded)
    traced.delete_all_unused_submodules()
    traced.graph.lint()
    traced.recompile()
    prepared = PreparedModule(traced, 0)
    prepared.meta["floats"] = graph.excluded
    return prepared


class PreparedModule(Checkpointed, fx.GraphModule):
    """A traced model with quantizers that reports NaN or infinite parameters by step and layer, also in copies."""

    def __init__(self, traced: fx.GraphModule, steps: int) -> None:
        super().__init__(traced, traced.graph)
        self.meta["steps"] = steps  # of training so far; `meta` is copied with the module
        for name, m in self.named_modules():  # in messages
            if isinstance(m, (ObserverBase, FakeQuantizer)):
                m.tensor = name.rpartition(".")[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            TrainingError: in training mode, a scale or weight is NaN or infinite.
        """
        if self.training:
            self.begin()
        if "seen" not in self.meta:
            self._remember(args, kwargs)
        return super().__call__(*args, **kwargs)

    @torch.compiler.disable
    def _remember(self, args: Any, kwargs: Any) -> None:
        """Keep the first batch that quantizers observe, for tensors that a chip quantizes and training does not."""
        if any(isinstance(m, QuantizeBase) and m.observing for m in self.modules()):
            copied = tree_map_only(torch.Tensor, lambda x: x.detach().cpu().clone(), (args, kwargs))
            self.meta["seen"] = [copied[1] or copied[0]]

    @torch.compiler.disable
    def begin(self) -> None:
        """Count a step of training and check all scales and parameters.

        Raises:
            TrainingError: one is NaN or infinite; the message names layer and step. On an accelerator it may be
                raised in the next step, so that the device is not awaited.
        """
        self.meta["steps"] += 1
        rounding = {n: m for n, m in self.named_modules() if isinstance(m, QuantizeBase) and m.fake_quant_enabled}
        scales = {n: m.numbers()[0] for n, m in rounding.items() if m.activation_post_process.batches}
        parameters = {n: p for n, p in self.named_parameters() if p.requires_grad}
        check = self.__dict__.setdefault("_check", StepCheck(str))  # copies of a traced model are not initialized
        check(self.meta["steps"], parameters, scales, later=True)

    def __reduce__(self) -> Any:
        return _unpickled, (*super().__reduce__(), {k: self.meta[k] for k in ("steps", "floats") if k in self.meta})


def _unpickled(make: Any, given: Any, meta: dict[str, Any]) -> PreparedModule:
    """Build the model that `torch.load` returns."""
    prepared = PreparedModule(make(*given), meta["steps"])
    prepared.meta.update(meta)
    return prepared


def trace(
    model: nn.Module, tracer: fx.Tracer | None = None, concrete_args: Mapping[str, Any] | None = None
) -> fx.GraphModule:
    """Trace a copy of a model; layers replace functions that would keep the training mode of the trace.

    Raises:
        CaptureError: the model cannot be traced.
    """
    try:
        tracer, root = tracer or fx.Tracer(), copy.deepcopy(model)
        found = tracer.trace(root, concrete_args=None if concrete_args is None else dict(concrete_args))
        traced = fx.GraphModule(tracer.root, found, type(model).__name__)
    except Exception as e:  # the user's code, called with proxies, may raise anything
        raise_bug(e)
        hint = "replace a Python `if` on values by torch.where, or put the code into a layer of its own and wrap it"
        what = f"The model cannot be traced: {short_message(e)}"
        raise CaptureError(what, where=type(model).__name__, hint=hint) from e
    for n in list(traced.graph.nodes):
        if n.op == "call_function" and "training" in n.kwargs:
            if n.target is not F.dropout:
                hint = "use the layer, not the function"
                raise CaptureError(f"'{n.name}' would keep the training mode that it was traced in", hint=hint)
            traced.add_submodule(n.name, nn.Dropout(n.args[1] if len(n.args) > 1 else n.kwargs.get("p", 0.5)))
            with traced.graph.inserting_after(n):
                n.replace_all_uses_with(traced.graph.call_module(n.name, n.args[:1]))
            traced.graph.erase_node(n)
    _write_nothing_in_place(traced)
    traced.recompile()
    return traced


def _write_nothing_in_place(traced: fx.GraphModule) -> None:
    """Let in-place layers return new tensors, which later nodes read: gradients need what quantizers rounded."""
    nodes = list(traced.graph.nodes)
    layers: dict[fx.Node, Any] = {n: traced.get_submodule(str(n.target)) for n in nodes if n.op == "call_module"}
    for k, n in enumerate(nodes):
        if n.kwargs.get("inplace") or getattr(layers.get(n), "inplace", False):
            n.args[0].replace_all_uses_with(n, delete_user_cb=set(nodes[k + 1 :]).__contains__)
    for n in nodes:
        n.kwargs = {k: v for k, v in n.kwargs.items() if k != "inplace"}
    for layer in layers.values():
        if hasattr(layer, "inplace"):
            layer.inplace = False


def _check_trace(traced: nn.Module, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    with torch.no_grad():
        results = [copy.deepcopy(m).eval()(*inputs) for m in (model, traced)]
    leaves = [torch.utils._pytree.tree_leaves(r) for r in results]
    if not all(torch.equal(a, b) for a, b in zip(*leaves, strict=True) if isinstance(a, torch.Tensor)):
        hint = "does it draw numbers, or keep state?"
        raise CaptureError("The trace of the model computes something else", hint=hint)


class _Graph:
    """The operators of a trace and the tensors between them."""

    def __init__(self, traced: fx.GraphModule, setting: Setting) -> None:
        self.traced, self.modules = traced, dict(traced.named_modules())
        self.nodes = list(traced.graph.nodes)
        self.ops = {n: self._op(n) for n in self.nodes}
        #: nodes that compute sizes, not tensors
        self.sizes = set[fx.Node]()
        for n in self.nodes:
            of_sizes = n.op == "call_function" and n.all_input_nodes and self.sizes.issuperset(n.all_input_nodes)
            if of_sizes or n.target is getattr or (n.op == "call_method" and n.target in _SIZE_METHODS):
                self.sizes.add(n)
        chosen = {n: setting.quantizes(n, self._layer(n)) for n in self.nodes if n.op.startswith("call")}
        weighted = [n for n, how in chosen.items() if self.ops[n] in OPS and OPS[self.ops[n]].kind and how is not False]
        self.weighted = [n for n in weighted if n.op == "call_module"]
        #: weighted layers that the setting leaves in float, and modules that are not traced
        self.excluded = [
            str(n.target)
            for n, how in chosen.items()
            if (how is False and self._is_weighted_layer(n)) or (not how and self._is_users_leaf(n))
        ]
        others = {n for n, how in chosen.items() if how or (how is None and self.ops[n] in _ROUNDED_OPERATORS)}
        self.rounding = (others - self.sizes) | set(self.weighted)
        #: weighted layers, and what the setting names besides
        self.always = set(self.weighted) | {n for n, how in chosen.items() if how}
        for n in set(weighted) - set(self.weighted):
            hint = "use the layer, not the function"
            raise CaptureError(f"Weight of '{n.name}' does not belong to a layer", got=n.target, hint=hint)

    def _layer(self, n: fx.Node) -> nn.Module | None:
        """Return the user's layer that a node calls."""
        layer = self.modules.get(str(n.target)) if n.op == "call_module" else None
        return layer.layer if isinstance(layer, FoldedBatchNorm) else layer

    def _op(self, n: fx.Node) -> str:
        """Return the canonical operator of a node; "" for others, as for the selection of a tuple's entry."""
        if n.op == "call_module":
            return operator_named(type(self._layer(n)).__name__)
        index = n.target is operator.getitem and isinstance(n.args[1], int | str)
        is_call = n.op in ("call_function", "call_method") and not index
        return operator_named(n.target if isinstance(n.target, str) else n.target.__name__) if is_call else ""

    def _is_weighted_layer(self, n: fx.Node) -> bool:
        return n.op == "call_module" and self.ops[n] in OPS and bool(OPS[self.ops[n]].kind)

    def _is_users_leaf(self, n: fx.Node) -> bool:
        """Return whether a node calls a module of the user's own that was not traced, in which nothing is rounded."""
        outside = not type(self._layer(n)).__module__.startswith("torch.")
        return n.op == "call_module" and self.ops[n] not in OPS and outside

    def moves(self, n: fx.Node) -> bool:
        """Return whether a node only moves values (pass-through operator)."""
        op = OPS.get(self.ops[n])
        return op is not None and op.moves and set(op.slots) <= {"in0", "sizes*"}

    def operands(self, n: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield the producer of each operand, before pass-through operators, with the node that reads the producer."""
        for x in n.all_input_nodes:
            reader = n
            while x not in self.sizes and self.moves(x):
                reader, x = x, x.all_input_nodes[0]
            if x not in self.sizes and x.op != "get_attr":
                yield x, reader

    def result(self, n: fx.Node) -> fx.Node:
        """Return the last node of the kernel that begins with n: activations and batch norms behind it are fused."""
        while len(n.users) == 1 and self.ops[user := next(iter(n.users))] in _FUSED_INTO_PRODUCER:
            n = user
        return n

    def is_returned(self, x: fx.Node) -> bool:
        """Return whether x is an output of the model, perhaps through pass-through operators."""
        return any(u.op == "output" or (self.moves(u) and self.is_returned(u)) for u in x.users)

    def of_convolution(self, x: fx.Node) -> bool:
        """Return whether a convolution, perhaps with its batch norm, computes x."""
        x = x.all_input_nodes[0] if self.ops[x] == "BatchNorm" else x
        return x in self.weighted and OPS[self.ops[x]].kind != "linear"

    def ends(self) -> set[fx.Node]:
        """Return the weighted layers without a weighted layer before them, and those without one behind them."""
        before, behind = set[fx.Node](), set[fx.Node]()  # nodes with a weighted layer before, or behind them
        for n in self.nodes:
            if any(m in before or m in self.weighted for m in n.all_input_nodes):
                before.add(n)
        for n in reversed(self.nodes):
            if any(m in behind or m in self.weighted for m in n.users):
                behind.add(n)
        return set(self.weighted) - (before & behind)

    def rounded(self, kind: int, outputs: bool) -> dict[fx.Node, tuple[list[fx.Node], set[fx.Node]]]:
        """Return quantized tensors -> (the nodes that read them quantized, the operators that their values reach)."""
        found: dict[fx.Node, tuple[list[fx.Node], set[fx.Node]]] = {}
        apart: set[tuple[fx.Node, fx.Node]] = set()
        if kind == 2:
            for add in (n for n in self.rounding if self.ops[n] == "Add"):
                made = [x for x, reader in self.operands(add) if reader is add and self.of_convolution(x)]
                apart |= {(x, add) for x in made[:1]}
        for n in (n for n in self.nodes if n in (self.always if kind == 1 else self.rounding)):
            for x, reader in self.operands(n):
                if (x, reader) not in apart:
                    readers, reached = found.setdefault(x, ([], set()))
                    readers += [reader] if reader not in readers else []
                    reached.add(n)
            out = self.result(n)
            if kind != 1 and (outputs or not self.is_returned(out)) and not any((out, u) in apart for u in out.users):
                found.setdefault(out, ([], set()))
        if kind != 1:  # a stored tensor is quantized for all its readers
            found = {x: ([u for u in x.users if (x, u) not in apart], reached) for x, (_, reached) in found.items()}
        return found


def _round_weight(graph: _Graph, node: fx.Node, setting: Setting, strategy: int, end: bool) -> None:
    """Wrap a layer, with the batch norm behind it if that is folded, in a module that quantizes its weight."""
    path = str(node.target)
    layer, calls = graph.modules[path], Counter(n.target for n in graph.nodes if n.op == "call_module")
    if isinstance(layer, FoldedBatchNorm):  # the layer is called twice
        return
    quantizer = setting.quantizer("weight", end, OPS[graph.ops[node]].weight_axis, layers=[path])
    quantizer.prepare(layer.weight)
    strategy = -1 if strategy == 4 and is_scale_invariant(quantizer) else strategy  # see `quantizers.bn_fold`
    user = next(iter(node.users), node)
    folds = len(node.users) == 1 and graph.ops[user] == "BatchNorm" and calls[path] == calls[user.target] == 1
    bn = graph.modules[str(user.target)] if folds and strategy != -1 else None
    host = FoldedBatchNorm(layer, bn, strategy, quantizer.to(layer.weight.device))
    graph.modules[path] = host
    graph.traced.add_submodule(path, host)
    if bn is not None:
        user.replace_all_uses_with(node)
        graph.traced.graph.erase_node(user)
