"""What a framework's layers need: which kernels and results to quantize, known ranges, and quantization functions of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from chipfit.decide.overrides import has_weights
from chipfit.errors import ModelingError, UnsupportedError
from chipfit.facade.target_platform.capabilities import DefaultDict, LayerFilterParams, matches
from chipfit.facade.target_platform.configs import QuantizationMethod
from chipfit.facade.target_platform.layers import member_of, package_of, squash
from chipfit.graph.config import plain
from chipfit.graph.ir import Node
from chipfit.plan.record import TensorPlan
from chipfit.platform.filters import Member
from chipfit.platform.load import groups
from chipfit.quantizers.grids import Grid

__all__ = ["ActivationQuantizer", "FrameworkInfo", "WeightQuantizer"]

if TYPE_CHECKING:
    from chipfit.pipeline import Result

#: (weights, bits, signed, parameters, per channel, channel axis) -> quantized weights; arrays are tensors
WeightQuantizer = Callable[[torch.Tensor, int, bool, Mapping[str, Any], bool, int | None], torch.Tensor]
#: (bits, parameters) -> the function that quantizes a tensor
ActivationQuantizer = Callable[[int, Mapping[str, Any]], Callable[[torch.Tensor], torch.Tensor]]

#: axes (out, in) of the kernels that frameworks store
_KERNEL_AXES = {
    "torch": {
        "conv1d": (0, 1),
        "conv2d": (0, 1),
        "conv3d": (0, 1),
        "linear": (0, 1),
        "convtranspose1d": (1, 0),
        "convtranspose2d": (1, 0),
        "convtranspose3d": (1, 0),
    },
    "keras": {
        "conv1d": (2, 1),
        "conv2d": (3, 2),
        "conv3d": (4, 3),
        "depthwiseconv2d": (2, 2),
        "dense": (1, 0),
        "conv2dtranspose": (2, 3),
    },
}


@dataclass(frozen=True)
class _Layers:
    """A filter of overrides: the nodes that satisfy a test; it may be none."""

    name: str
    test: Callable[[Node], bool] = field(compare=False)
    optional = True

    def match(self, node: Node) -> bool:
        """Whether the node is meant."""
        return self.test(node)

    def __str__(self) -> str:
        return self.name


class FrameworkInfo:
    """All that is known about a framework's layers when a model is quantized.

    Where it is given, it decides what is quantized: the weights of `kernel_ops`, the results of `activation_ops`, nothing
    of `no_quantization_ops`. Layers that only move values (reshape, transpose ...) carry on whatever they are given.

    Args:
        kernel_ops: layers whose kernels are quantized (classes, functions, names, or LayerFilterParams).
        activation_ops: layers whose results are quantized.
        no_quantization_ops: layers that are left in float; they win over the other two.
        activation_quantizer_mapping: QuantizationMethod -> f(bits, parameters) that returns the function which quantizes a
            result in the trained simulation, in place of chipfit's own.
        weights_quantizer_mapping: QuantizationMethod -> f(weights, bits, signed, parameters, per_channel, channel_axis) that returns
            the quantized weights. Parameters hold "threshold", or "range_min" and "range_max", and "lut_values" for tables.
        kernel_channels_mapping: layer -> (output axis, input axis) of its kernel.
        activation_min_max_mapping: name of an activation function -> (least, greatest) result; nothing is collected for it.
        layer_min_max_mapping: the same by layer. None stands for an unknown end.
        kernel_ops_attributes_mapping: layer -> names of its weights; accepted, chipfit knows them.
        output_channel_index: axis of channels in results; accepted, chipfit knows it.

    Raises:
        ModelingError: wrong types, unknown layers, a layer in two of the lists, kernel axes that a framework does not use.
    """

    def __init__(
        self,
        kernel_ops: list[Any],
        activation_ops: list[Any],
        no_quantization_ops: list[Any],
        activation_quantizer_mapping: Mapping[QuantizationMethod, ActivationQuantizer] | None = None,
        weights_quantizer_mapping: Mapping[QuantizationMethod, WeightQuantizer] | None = None,
        kernel_channels_mapping: DefaultDict | None = None,
        activation_min_max_mapping: Mapping[str, tuple[Any, Any]] | None = None,
        layer_min_max_mapping: Mapping[Any, tuple[Any, Any]] | None = None,
        kernel_ops_attributes_mapping: DefaultDict | None = None,
        output_channel_index: int | None = None,
    ) -> None:
        self.activation_quantizer_mapping = _functions("activation_quantizer_mapping", activation_quantizer_mapping)
        self.weights_quantizer_mapping = _functions("weights_quantizer_mapping", weights_quantizer_mapping)
        self.kernel_channels_mapping = _default_dict("kernel_channels_mapping", kernel_channels_mapping)
        self.activation_min_max_mapping = _ranges("activation_min_max_mapping", activation_min_max_mapping)
        self.layer_min_max_mapping = _ranges("layer_min_max_mapping", layer_min_max_mapping)
        self.kernel_ops_attributes_mapping = _default_dict(
            "kernel_ops_attributes_mapping", kernel_ops_attributes_mapping
        )
        self.output_channel_index = output_channel_index
        self._kernel, self._activation, self._none = (
            _members(x) for x in (kernel_ops, activation_ops, no_quantization_ops)
        )
        self.kernel_ops, self.activation_ops, self.no_quantization_ops = (
            list(kernel_ops),
            list(activation_ops),
            list(no_quantization_ops),
        )
        for layer in self.no_quantization_ops:
            if any(layer is other for other in (*self.kernel_ops, *self.activation_ops)):
                raise ModelingError(
                    f"'{_name(layer)}' is in no_quantization_ops and in another list", allowed="one of them"
                )
        _check_axes(self.kernel_channels_mapping)

    # ---- what the lists mean

    def in_kernel_ops(self, node: Node) -> bool:
        """Whether the node's kernel is quantized."""
        return _is(self._kernel, node) and not _is(self._none, node)

    def in_activation_ops(self, node: Node) -> bool:
        """Whether the node's result is quantized."""
        return _is(self._activation, node) and not _is(self._none, node)

    def known_range(self, node: Node) -> tuple[float, float] | None:
        """The range of the node's result where both ends are known."""
        function = node.config.get("activation") if node.layer_type == "Activation" else node.layer_type
        found = next(
            (r for name, r in self.activation_min_max_mapping.items() if squash(name) == squash(str(plain(function)))),
            None,
        )
        if found is None:
            found = next((r for layer, r in self.layer_min_max_mapping.items() if _is(_members([layer]), node)), None)
        return None if found is None or None in found else (float(found[0]), float(found[1]))

    def _is_in(self, ends: tuple[float, float], node: Node) -> bool:
        return self.known_range(node) == ends

    def overrides(self) -> list[tuple[Any, Any]]:
        """The same as choices for `chipfit.quantize(overrides=...)`; put your own after them."""
        moves = set(groups()["@move"]) | {"MaxPool", "AdaptiveMaxPool", "Concat"}
        ranges = {
            r
            for r in (*self.activation_min_max_mapping.values(), *self.layer_min_max_mapping.values())
            if None not in r
        }
        said: list[tuple[Any, Any]] = [
            (
                _Layers(
                    "layers whose kernels are not quantized", lambda n: has_weights(n.op) and not self.in_kernel_ops(n)
                ),
                {"bits": "float"},
            ),
            (
                _Layers(
                    "layers whose results are not quantized",
                    lambda n: n.op not in moves and not self.in_activation_ops(n),
                ),
                {"activation_bits": "float"},
            ),
            (_Layers("activation_ops", self.in_activation_ops), {"activation_bits": None}),
        ]
        for low, high in sorted(ranges):
            at = (float(low), float(high))
            said.append(
                (_Layers(f"results known to be in [{low:g}, {high:g}]", partial(self._is_in, at)), {"range": at})
            )
        return said

    # ---- quantization functions of one's own

    def apply(self, result: Result) -> Result:
        """Let the user's own functions quantize, where the mappings name the method of a tensor.

        Weights are replaced by what the function returns; activations pass through the function in `Result.model`, which then
        is no longer what a file could compute: export refuses.

        Raises:
            UnsupportedError: a function returned something else than a tensor of the same shape.
        """
        if not self.activation_quantizer_mapping and not self.weights_quantizer_mapping:
            return result
        graph, own, foreign = result.graph.copy(), [], []
        for t in result.plan.tensors.values():
            function = self.weights_quantizer_mapping.get(_method(t.grid)) if t.role == "weight" and t.grid else None
            if function is not None and t.grid is not None:
                w = graph.weights[t.name].detach()
                got = function(w.clone(), t.grid.bits, t.grid.signed, parameters(t), t.axis is not None, t.axis)
                if not isinstance(got, torch.Tensor) or got.shape != w.shape:
                    raise UnsupportedError(
                        f"The weights quantizer returned no tensor like '{t.name}'",
                        got=type(got).__name__,
                        allowed=f"a tensor {tuple(w.shape)}",
                    )
                graph.weights[t.name] = torch.nn.Parameter(
                    got.to(w.dtype), requires_grad=graph.weights[t.name].requires_grad
                )
                own.append(t.name)
            if t.role == "activation" and t.grid and _method(t.grid) in self.activation_quantizer_mapping:
                foreign.append(t.name)
        notes = [
            f"{len(names)} {what} quantized by functions of FrameworkInfo"
            for names, what in ((own, "weights"), (foreign, "results"))
            if names
        ]
        plan = replace(
            result.plan,
            rewrites=(*result.plan.rewrites, *notes),
            provenance={**result.plan.provenance, **({"foreign_quantizers": foreign} if foreign else {})},
        )
        out = replace(result, graph=graph, plan=plan, _model=None)
        for name in foreign:
            t = plan.tensors[name]
            assert t.grid is not None  # chosen by its grid
            if not hasattr(out.model, "quantizer_of"):
                raise UnsupportedError(
                    "Activation quantizers of one's own work in PyTorch models", got=type(out.model).__name__
                )
            out.model.quantizer_of(name).function = self.activation_quantizer_mapping[_method(t.grid)](
                t.grid.bits, parameters(t)
            )
        return out


def parameters(t: TensorPlan) -> dict[str, Any]:
    """A quantized tensor's grid in the words of thresholds: "threshold", or "range_min" and "range_max"; float32 tensors, [] or [C]."""
    assert t.grid is not None
    assert t.scale is not None
    assert t.zero_point is not None
    if t.grid.symmetric:
        out: dict[str, Any] = {"threshold": t.scale * float(1 << t.grid.bits - int(t.grid.signed))}
        if t.grid.table is not None:
            out = {"threshold": t.scale * float(t.grid.qmax + 1), "lut_values": t.grid.table}
        return out
    return {"range_min": (t.grid.qmin - t.zero_point) * t.scale, "range_max": (t.grid.qmax - t.zero_point) * t.scale}


def _method(grid: Grid) -> QuantizationMethod:
    if grid.kind == "lut":
        return QuantizationMethod.LUT_POT_QUANTIZER if grid.pot else QuantizationMethod.LUT_SYM_QUANTIZER
    if not grid.symmetric:
        return QuantizationMethod.UNIFORM
    return QuantizationMethod.POWER_OF_TWO if grid.pot else QuantizationMethod.SYMMETRIC


# ---------------------------------------------------------------- checks


def _name(layer: Any) -> str:
    return layer if isinstance(layer, str) else getattr(layer, "__name__", repr(layer))


def _members(layers: Any) -> tuple[Member, ...]:
    if not isinstance(layers, (list, tuple)):
        raise ModelingError("Layers are given as a list", got=f"{layers!r} of type {type(layers).__name__}")
    return tuple(x.member if isinstance(x, LayerFilterParams) else member_of(x) for x in layers)


def _is(members: tuple[Member, ...], node: Node) -> bool:
    return any(matches(m, node) for m in members)


def _functions(name: str, given: Any) -> dict[QuantizationMethod, Any]:
    for method, function in _mapping(name, given).items():
        if not isinstance(method, QuantizationMethod) or not callable(function):
            raise ModelingError(f"{name} maps a QuantizationMethod to a function", got=f"{method!r}: {function!r}")
    return dict(given or {})


def _ranges(name: str, given: Any) -> dict[Any, tuple[Any, Any]]:
    for key, pair in _mapping(name, given).items():
        numbers = (
            isinstance(pair, (tuple, list))
            and len(pair) == 2
            and all(x is None or isinstance(x, (int, float)) for x in pair)
        )
        if not numbers or (None not in pair and pair[0] > pair[1]):
            raise ModelingError(
                f"{name}['{_name(key)}'] is a pair (least, greatest)",
                got=repr(pair),
                allowed="numbers, or None for an unknown end",
            )
    finite = lambda x: x if x is not None and abs(x) != float("inf") else None  # noqa: E731 -- one line
    return {k: (finite(low), finite(high)) for k, (low, high) in (given or {}).items()}


def _mapping(name: str, given: Any) -> Mapping[Any, Any]:
    if not isinstance(given or {}, Mapping):
        raise ModelingError(f"{name} is a dictionary", got=f"{given!r} of type {type(given).__name__}")
    return given or {}


def _default_dict(name: str, given: Any) -> DefaultDict | None:
    if given is not None and not isinstance(given, DefaultDict):
        raise ModelingError(
            f"{name} is a DefaultDict",
            got=f"{given!r} of type {type(given).__name__}",
            hint="DefaultDict({layer: value}, default)",
        )
    return given


def _check_axes(mapping: DefaultDict | None) -> None:
    for layer, axes in (mapping.known_dict if mapping else {}).items():
        known = _KERNEL_AXES.get({"torch": "torch"}.get(package_of(layer), "keras"), {}).get(squash(_name(layer)))
        if known is not None and tuple(axes) != known:
            raise ModelingError(
                f"The kernel of '{_name(layer)}' has its output and input channels elsewhere", got=axes, allowed=known
            )
