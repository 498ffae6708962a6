"""Quantizer modules: fake quantization that trains, with the numerics of `quantizers.grids`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from chipfit.errors import PlanError, UnknownNameError
from chipfit.quantizers.algorithm import Algorithm, with_levels
from chipfit.quantizers.algorithms.ste import STE
from chipfit.quantizers.grids import Grid, quantize, shape_for
from chipfit.quantizers.hosting import apply, initialize, to_inferable
from chipfit.quantizers.ops import TorchOps
from chipfit.quantizers.stored import Stored, per_output


class PytorchQuantizationWrapper(nn.Module):
    """A layer that computes with rounded weights; its own, unrounded ones are kept, and trained.

    Args:
        layer: of any class; it is copied.
        weights_quantizers: name of a parameter -> its quantizer: trainable, inferable, or any function.
    """

    weights_quantizers: dict[str, Any]

    def __init__(self, layer: nn.Module, weights_quantizers: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)
        self.weights_quantizers = {}
        for name, quantizer in (weights_quantizers or {}).items():
            self.add_weights_quantizer(name, quantizer)

    def add_weights_quantizer(self, name: str, quantizer: Any) -> None:
        """Round a parameter; a trainable quantizer puts what it trains on this module.

        Raises:
            UnknownNameError: the layer has no parameter of that name.
        """
        if name not in (known := dict(self.layer.named_parameters())):
            raise UnknownNameError(f"parameter of {type(self.layer).__name__}", name, known)
        self.weights_quantizers[name] = quantizer
        initialize(quantizer, self.weight_of(name).shape, name, self, "weights of torch")

    def weight_of(self, name: str) -> torch.Tensor:
        """A parameter of the layer, unrounded."""
        return self.layer.get_parameter(name)

    def get_quantized_weights(self) -> dict[str, torch.Tensor]:
        """The weights that the layer computes with, by name, rounded as they are now."""
        return {n: apply(q, self.weight_of(n), self.training) for n, q in self.weights_quantizers.items()}

    def convert_to_inferable_quantizers(self) -> None:
        """Leave training: every trainable quantizer becomes the inferable one that it converts to."""
        self.weights_quantizers = {n: to_inferable(q) for n, q in self.weights_quantizers.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self.layer, self.get_quantized_weights(), args, kwargs)


class PytorchActivationQuantizationHolder(nn.Module):
    """Stores the result of a layer as the chip does: rounds it.

    Args:
        activation_holder_quantizer: trainable, inferable, or any function.
    """

    def __init__(self, activation_holder_quantizer: Any) -> None:
        super().__init__()
        self.activation_holder_quantizer = activation_holder_quantizer
        initialize(activation_holder_quantizer, None, "activation_holder_quantizer", self, "activations of torch")

    def convert_to_inferable_quantizers(self) -> None:
        """Leave training: a trainable quantizer becomes the inferable one that it converts to."""
        self.activation_holder_quantizer = to_inferable(self.activation_holder_quantizer)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return apply(self.activation_holder_quantizer, inputs, self.training)


#: of quantizers that do not train
_STE = STE()


def fake_quantize_ste(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, axis: int | None = None) -> Tensor:
    """`grids.fake_quantize` with a straight-through gradient for x and the LSQ gradient for scale.

    Computed in float32, or float64 where x is, and returned in the dtype of x. Shapes and units as in `grids.quantize`.
    """
    return _rounded(_STE, x, {"scale": scale, "zero_point": zero_point}, grid, axis)


def _rounded(
    algorithm: Algorithm, x: Tensor, p: Mapping[str, Tensor], grid: Grid, axis: int | None, training: bool = False
) -> Tensor:
    """x through an algorithm whose numbers p are [] or [C] along `axis`."""
    wide = torch.promote_types(p["scale"].dtype, x.dtype)
    given = {**_broadcast(p, x, axis, wide, algorithm.vectors), "training": training}
    return algorithm.call(TorchOps, x.to(wide), given, grid).to(x.dtype)  # type: ignore[no-any-return]


def _broadcast(
    p: Mapping[str, Tensor], x: Tensor, axis: int | None, dtype: torch.dtype, vectors: Collection[str] = ()
) -> dict[str, Tensor]:
    along = axis or 0 if x.dim() else None  # a tensor of one axis may leave it out
    return {k: (v if k in vectors else shape_for(v, x, along)).to(dtype) for k, v in p.items()}


def _blended(x: Tensor, y: Tensor, share: float) -> Tensor:
    return y if share == 1 else torch.lerp(x, y, share)


def own(module: nn.Module, name: str, weight: Tensor, rounded: Collection[str] = ()) -> tuple[dict[str, Any], str]:
    """Register a weight under its dotted name; returns the table that it is in, and its key there.

    Args:
        rounded: names of layers that compute with rounded weights.
    """
    *path, leaf = name.split(".")
    for k, p in enumerate(path, 1):
        if p not in module._modules:  # not add_module: the user's names may be names of our methods
            module._modules[p] = LayerWeights() if ".".join(path[:k]) in rounded else nn.Module()
        module = module._modules[p]  # type: ignore[assignment]  # entries are modules
    table: dict[str, Any] = module._parameters if isinstance(weight, nn.Parameter) else module._buffers
    table[leaf] = weight
    return table, leaf


class FakeQuantizer(nn.Module):
    """Rounds a tensor to the grid of its plan: y = (clip(round(x / s) + z) - z) s, as its algorithm trains it.

    What the algorithm trains are parameters; a `scale` that it does not train is a frozen one, until
    `requires_grad_()`. `mode` is a plain attribute: "quantize", "bypass" (the identity), or "observe" (the identity,
    keeping the least and greatest value in `seen`).
    """

    MODES = ("quantize", "bypass", "observe")
    share = 1.0  #: of rounding in what is computed: y = (1 - share) x + share Q(x)

    scale: Tensor
    zero_point: Tensor

    def __init__(self, tensor: str, stored: Stored, algorithm: Algorithm = _STE, x: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        trains = algorithm.init(stored, x)
        given = {**algorithm.constants(stored, x), **trains}
        for name, value in given.items():
            if name in trains or name == "scale":
                value = nn.Parameter(value.detach().clone(), requires_grad=name in trains)
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value.clone(), persistent=name != "least")
        self._given = tuple(given)
        self.tensor, self.grid, self.axis, self.algorithm = tensor, algorithm.grid(stored.grid), stored.axis, algorithm
        algorithm.start(self)
        self.mode = "quantize"
        self.seen: tuple[float, float] | None = None
        #: rounds in our place, see FrameworkInfo.apply
        self.function: Callable[[Tensor], Tensor] | None = None

    def extra_repr(self) -> str:
        codes = f"codes {self.grid.qmin}..{self.grid.qmax}"
        return f"{self.tensor}, {self.grid.bits} bit, {codes}, axis={self.axis}, mode={self.mode}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FakeQuantizer:
        """`.half()` and `.bfloat16()` leave scales in float32: rounding them would move every code."""
        before = {name: p.detach() for name, p in self.named_parameters()}
        super()._apply(fn, recurse)
        for name, p in self.named_parameters():
            if torch.finfo(p.dtype).bits < 32:
                p.data = before[name].to(p.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):  # beside the tensors, whose names stay
            destination._metadata[prefix[:-1]]["grid"] = repr(self.grid)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """Take numbers from a checkpoint.

        Raises:
            PlanError: they are of another grid.
        """
        if local_metadata.get("grid", repr(self.grid)) != repr(self.grid):
            grids = {"got": local_metadata["grid"], "allowed": repr(self.grid)}
            raise PlanError(f"This checkpoint is of another plan: the grid of '{self.tensor}' differs", **grids)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def given(self) -> dict[str, Tensor]:
        """What the algorithm is given: [] or [C] each."""
        return {name: getattr(self, name) for name in self._given}

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point as they are now, [] or [C]; gradients flow to what trains."""
        s, z = self.algorithm.numbers(TorchOps, self.given(), self.grid)
        return s, z

    def learned(self) -> Grid:
        """The grid as it is now, with the levels that training gave it."""
        table = self.algorithm.table(TorchOps, self.given(), self.grid)
        return with_levels(self.grid, None if table is None else table.tolist())

    def trained(self) -> dict[str, Tensor]:
        """The parameters that train now, by name."""
        return {name: p for name, p in self.named_parameters(recurse=False) if p.requires_grad}

    @torch.no_grad()
    def rescale(self, factor: Tensor) -> None:
        """Let the scale be this factor more, [] or [C]."""
        for name, value in self.algorithm.rescaled(TorchOps, self.trained(), factor).items():
            getattr(self, name).copy_(value)

    def reals(self, w: Tensor) -> Tensor:
        """The weight [*dims] that is rounded in place of w: what the plan's grid is for when training ends."""
        p = _broadcast(self.given(), w, self.axis, self.scale.dtype, self.algorithm.vectors)
        return self.algorithm.reals(TorchOps, w, p, self.grid).to(w.dtype)  # type: ignore[no-any-return]

    def codes(self, x: Tensor) -> Tensor:
        """The codes of reals [*dims], or their entries in the grid's table; without gradients."""
        s, z = (n.detach() for n in self.numbers())
        return quantize(x.detach().to(s.dtype), s, z, self.learned(), self.axis)

    def as_reals(self, codes: Tensor) -> Tensor:
        """What codes [*dims] stand for; without gradients."""
        s, z = (n.detach() for n in self.numbers())
        p = _broadcast({"s": s, "z": z}, codes, self.axis, s.dtype)
        table = self.learned().table
        return (codes - p["z"] if table is None else torch.tensor(table, device=s.device)[codes.long()]) * p["s"]

    def forward(self, x: Tensor) -> Tensor:
        """x: reals [*dims]. Returns reals on the grid, same shape and dtype."""
        if self.mode == "quantize":
            if self.function is not None:
                return _blended(x, self.function(x), self.share)
            y = _rounded(self.algorithm, x, self.given(), self.grid, self.axis, self.training)
            return _blended(x, y, self.share)
        if self.mode == "observe" and x.numel():
            low, high = (float(v) for v in x.detach().aminmax())
            self.seen = (low, high) if self.seen is None else (min(low, self.seen[0]), max(high, self.seen[1]))
        return x


class ActivationQuantizer(FakeQuantizer, PytorchActivationQuantizationHolder):
    """Stores results as the chip does: rounds them."""

    @property
    def activation_holder_quantizer(self) -> Any:  # type: ignore[override]  # of other holders it is an attribute
        """What rounds: the user's own quantizer, or this one."""
        return getattr(self.algorithm, "quantizer", self)


class LayerWeights(PytorchQuantizationWrapper):
    """The weights of a layer, some of which are rounded when the model computes with them."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weights_quantizers = {}

    def weight_of(self, name: str) -> Tensor:
        table: dict[str, Any] = self._parameters if name in self._parameters else self._buffers
        return table[name]


class BiasQuantizer(nn.Module):
    """Rounds a bias to int32 at s_in * s_w, taken from the live quantizers, so that it follows scales in training.

    Args:
        factors: quantizers of the input and the weight.
    """

    def __init__(self, tensor: str, stored: Stored, factors: tuple[FakeQuantizer, ...]) -> None:
        super().__init__()
        self.tensor, self.grid = tensor, stored.grid
        self.share = 1.0
        self._channels = stored.scale.numel()
        self._factors = factors  # in a tuple, so that they are registered in one place only
        self.mode = "quantize"

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point as they are now, [] or [C]."""
        of_input, of_weight = (f.numbers()[0] for f in self._factors)
        scale = per_output(of_input * of_weight, self._channels)
        return scale, torch.zeros_like(scale)

    def extra_repr(self) -> str:
        return f"{self.tensor}, {self.grid.bits} bit at input scale x weight scale, mode={self.mode}"

    def forward(self, b: Tensor) -> Tensor:
        """b: [C]. Returns reals on the grid, [C]."""
        if self.mode != "quantize":
            return b
        return _blended(b, fake_quantize_ste(b, *self.numbers(), self.grid, 0), self.share)
