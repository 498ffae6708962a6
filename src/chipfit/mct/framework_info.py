"""Layers of a framework: which of them to quantize, their known ranges, and quantization functions of the user."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BeforeValidator, model_validator
from pydantic_core import ArgsKwargs

from chipfit.decide.overrides import has_weights
from chipfit.errors import ModelingError, UnsupportedError
from chipfit.frameworks import adapter_of
from chipfit.graph.config import plain
from chipfit.graph.ir import Graph, Node
from chipfit.mct.target_platform.capabilities import DefaultDict, matches, members_of
from chipfit.mct.target_platform.configs import QuantizationMethod
from chipfit.mct.target_platform.layers import layer_table, name_of, normalize_name, package_of
from chipfit.operators.table import GROUPS, OPS
from chipfit.plan.record import TensorPlan
from chipfit.quantizers.inferable import parameters
from chipfit.quantizers.stored import Stored
from chipfit.result import Result
from chipfit.validation import Number, allowed, by_name, record

__all__ = ["ActivationQuantizer", "FrameworkInfo", "WeightQuantizer"]

#: (weights, bits, signed, parameters, per channel, channel axis) -> quantized weights; arrays are tensors
WeightQuantizer = Callable[[torch.Tensor, int, bool, Mapping[str, Any], bool, int | None], torch.Tensor]
#: (bits, parameters) -> the function that quantizes a tensor
ActivationQuantizer = Callable[[int, Mapping[str, Any]], Callable[[torch.Tensor], torch.Tensor]]


def _finite(pair: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
    low, high = (None if x is None or math.isinf(x) else x for x in pair)
    if None not in pair and pair[0] > pair[1]:  # type: ignore[operator]  # both are numbers
        raise ValueError
    return low, high


Range = Annotated[
    tuple[Number | None, Number | None],
    BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given),
    AfterValidator(_finite),
    allowed("a pair (least, greatest) of numbers; None for an unknown end"),
]
_Axes = Annotated[DefaultDict, allowed("DefaultDict({layer: value}, default)")]
_Relayout = Callable[[torch.Tensor], torch.Tensor]
_Listed = Annotated[Sequence[Any], AfterValidator(list)]
_OR_EMPTY = BeforeValidator(lambda given: {} if given is None else given)
_Methods = Mapping[Annotated[QuantizationMethod, by_name(QuantizationMethod)], Callable[..., Any]]


@dataclass(frozen=True)
class _Layers:
    """A filter of overrides that matches the nodes that satisfy a test, perhaps none."""

    name: str
    match: Callable[[Node], bool] = field(compare=False)
    optional = True

    def __str__(self) -> str:
        return self.name


#: operators with results between two known numbers
BOUNDED = {op: row.bounded for op, row in OPS.items() if row.bounded}


def known_ranges() -> list[tuple[Any, Any]]:
    """Return the ranges of `BOUNDED` as overrides of `chipfit.quantize`."""
    return [
        (_Layers(f"results of {op}", lambda n, op=op: n.op == op), {"range": ends})  # type: ignore[misc]
        for op, ends in BOUNDED.items()
    ]


@record(ModelingError)
class FrameworkInfo:
    """The selection of layers to quantize: weights of `kernel_ops`, results of `activation_ops`, and known ranges.

    Layers of `no_quantization_ops` stay in float. Pass-through layers (reshape, transpose ...) keep the format of their
    input.

    Args:
        kernel_ops: layers whose kernels are quantized (classes, functions, names, or LayerFilterParams).
        activation_ops: layers whose results are quantized.
        no_quantization_ops: layers that stay in float; takes precedence over the other two lists.
        activation_quantizer_mapping: QuantizationMethod -> f(bits, parameters) that returns the function which
            quantizes a result in the trainable simulation, instead of chipfit's own.
        weights_quantizer_mapping: QuantizationMethod -> f(weights, bits, signed, parameters, per_channel, channel_axis)
            that returns quantized weights in the framework's layout: [height, width, in, out] and channel axis 3 for
            a Conv2D of Keras, [height, width, channels * multiplier, 1] with axis 2 for a depthwise kernel. Parameters
            hold "threshold", or "range_min" and "range_max", and "lut_values" for look-up tables.
        kernel_channels_mapping: layer -> (output axis, input axis) of its kernel. May be passed as the fourth argument,
            before the two tables below.
        activation_min_max_mapping: name of an activation function -> (least, greatest) result, which needs no
            calibration; None is an unknown end.
        layer_min_max_mapping: layer -> (least, greatest) result.
        kernel_ops_attributes_mapping: layer -> names of its weights; no effect: chipfit knows them.
        output_channel_index: axis of channels in results; no effect: chipfit knows it.

    Raises:
        ModelingError: an argument has the wrong type, a layer is unknown or in two lists, or kernel axes are not those
            of the framework.
    """

    kernel_ops: _Listed
    activation_ops: _Listed
    no_quantization_ops: _Listed
    activation_quantizer_mapping: Annotated[_Methods, _OR_EMPTY] = field(default_factory=dict)
    weights_quantizer_mapping: Annotated[_Methods, _OR_EMPTY] = field(default_factory=dict)
    kernel_channels_mapping: _Axes | None = None
    activation_min_max_mapping: Annotated[Mapping[str, Range], _OR_EMPTY] = field(default_factory=dict)
    layer_min_max_mapping: Annotated[Mapping[Any, Range], _OR_EMPTY] = field(default_factory=dict)
    kernel_ops_attributes_mapping: _Axes | None = None
    output_channel_index: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _published_order(cls, given: ArgsKwargs) -> ArgsKwargs:
        """Accept kernel_channels_mapping in the fourth place, where a DefaultDict can be nothing else."""
        if len(given.args) > 3 and isinstance(given.args[3], DefaultDict):
            return ArgsKwargs((*given.args[:3], None, None, *given.args[3:]), given.kwargs)
        return given

    def __post_init__(self) -> None:
        members_of([*self.kernel_ops, *self.activation_ops, *self.no_quantization_ops])  # raises for an unknown layer
        for layer in self.no_quantization_ops:
            if any(layer is other for other in (*self.kernel_ops, *self.activation_ops)):
                what = f"'{name_of(layer)}' is in no_quantization_ops and in another list"
                raise ModelingError(what, allowed="one of them")
        for layer, axes in self.kernel_channels_mapping.known_dict.items() if self.kernel_channels_mapping else ():
            package = "torch" if package_of(layer) == "torch" else "keras"
            known = layer_table()["kernel_axes"][package].get(normalize_name(name_of(layer)))
            if known is not None and list(axes) != known:
                what = f"Output and input channels of '{name_of(layer)}' are on other axes of its kernel"
                raise ModelingError(what, got=axes, allowed=tuple(known))

    # ---- selection of layers

    def in_kernel_ops(self, node: Node) -> bool:
        """Return whether the node's kernel is quantized."""
        return _in(self.kernel_ops, node) and not _in(self.no_quantization_ops, node)

    def in_activation_ops(self, node: Node) -> bool:
        """Return whether the node's result is quantized."""
        return _in(self.activation_ops, node) and not _in(self.no_quantization_ops, node)

    def known_range(self, node: Node) -> tuple[float, float] | None:
        """Return the range of the node's result, None unless both ends are known."""
        function = node.config.get("activation") if node.layer_type == "Activation" else node.layer_type
        own = normalize_name(str(plain(function)))
        by_function = (r for name, r in self.activation_min_max_mapping.items() if normalize_name(name) == own)
        by_layer = (r for layer, r in self.layer_min_max_mapping.items() if _in([layer], node))
        low, high = next(by_function, None) or next(by_layer, (None, None))
        return None if low is None or high is None else (float(low), float(high))

    def overrides(self) -> list[tuple[Any, Any]]:
        """Return the selection as overrides of `chipfit.quantize`; later overrides take precedence."""
        pick = {op for op, row in OPS.items() if row.moves and row.layout in ("spatial", "concat") and not row.view}
        moves = GROUPS["@move"] | pick  # pass-through operators, and those that select values
        no_kernel = lambda n: has_weights(n.op) and not self.in_kernel_ops(n)  # noqa: E731 -- a test of a filter
        no_result = lambda n: n.op not in moves and not self.in_activation_ops(n)  # noqa: E731 -- the same
        choices: list[tuple[Any, Any]] = [
            (_Layers("layers whose kernels are not quantized", no_kernel), {"bits": "float"}),
            (_Layers("layers whose results are not quantized", no_result), {"activation_bits": "float"}),
            (_Layers("activation_ops", self.in_activation_ops), {"activation_bits": None}),
        ]
        pairs: set[Any] = {*self.activation_min_max_mapping.values(), *self.layer_min_max_mapping.values()}
        for low, high in sorted(p for p in pairs if None not in p):
            ends = (float(low), float(high))
            in_it = lambda n, ends=ends: self.known_range(n) == ends  # noqa: E731 -- as above
            known = _Layers(f"results known to be in [{low:g}, {high:g}]", in_it)
            choices.append((known, {"range": ends}))
        return choices

    # ---- quantization functions of the user

    def apply(self, result: Result) -> Result:
        """Apply the user's quantization functions to tensors whose method is in a mapping.

        The function's result replaces a weight; activations pass through the function in `Result.model`, after which
        export raises, as no file can compute it.

        Raises:
            UnsupportedError: a function did not return a tensor of the weight's shape.
        """
        if not self.activation_quantizer_mapping and not self.weights_quantizer_mapping:
            return result
        stored = [(t, t.stored) for t in result.plan.tensors.values() if t.stored is not None]

        def named(role: str, methods: Mapping[QuantizationMethod, Any]) -> list[tuple[TensorPlan, Stored]]:
            return [(t, s) for t, s in stored if t.role == role and QuantizationMethod.of_grid(s.grid) in methods]

        weights = named("weight", self.weights_quantizer_mapping)
        results = named("activation", self.activation_quantizer_mapping)
        graph = result.graph.copy()
        for t, s in weights:
            w = graph.weights[t.name]
            rounded = self._rounded(t.name, w.detach(), s, *_layout(graph, t))
            graph.weights[t.name] = torch.nn.Parameter(rounded, requires_grad=w.requires_grad)
        counts = {"weights": len(weights), "results": len(results)}
        notes = [f"{n} {what} quantized by functions of FrameworkInfo" for what, n in counts.items() if n]
        foreign = {"foreign_quantizers": [t.name for t, _ in results]} if results else {}
        rewrites, provenance = (*result.plan.rewrites, *notes), {**result.plan.provenance, **foreign}
        plan = replace(result.plan, rewrites=rewrites, provenance=provenance)
        out = replace(result, graph=graph, plan=plan, _model=None)
        if results and not hasattr(out.model, "quantizer_of"):
            got = type(out.model).__name__
            raise UnsupportedError("activation_quantizer_mapping supports PyTorch models only", got=got)
        for t, s in results:
            function = self.activation_quantizer_mapping[QuantizationMethod.of_grid(s.grid)]
            out.model.quantizer_of(t.name).function = function(s.grid.bits, parameters(s))
        return out

    def _rounded(self, name: str, w: torch.Tensor, s: Stored, theirs: _Relayout, ours: _Relayout) -> torch.Tensor:
        function = self.weights_quantizer_mapping[QuantizationMethod.of_grid(s.grid)]
        axis, own = s.axis, theirs(w).clone()
        if axis is not None:
            axis = theirs(torch.empty([2 if d == axis % w.dim() else 1 for d in range(w.dim())])).shape.index(2)
        got = function(own, s.grid.bits, s.grid.signed, parameters(s), axis is not None, axis)
        if not isinstance(got, torch.Tensor) or got.shape != own.shape:
            raise UnsupportedError(
                f"The weights quantizer must return a tensor of the shape of '{name}'",
                got=f"a tensor {tuple(got.shape)}" if isinstance(got, torch.Tensor) else type(got).__name__,
                allowed=f"a tensor {tuple(own.shape)}",
            )
        return ours(got).to(w.dtype)


def _layout(graph: Graph, t: TensorPlan) -> tuple[_Relayout, _Relayout]:
    """Return functions that convert a weight from the graph's layout to the framework's, and back."""
    node = next((n for n in graph.nodes if t.name in n.inputs and n.facts.kind), None)
    return adapter_of(graph.framework).kernel_layout(node, t.name) if node else ((lambda w: w), (lambda w: w))


def _in(layers: Iterable[Any], node: Node) -> bool:
    return any(matches(m, node) for m in members_of(layers))
