"""Modules of the trainable simulation: fake quantization, hosts of quantizers on layers, and bounds on scales."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from chipfit.errors import PlanError, check_known
from chipfit.frameworks.torch.layers import layer_like
from chipfit.frameworks.torch.symbolic import module_node
from chipfit.graph.ir import Node
from chipfit.quantizers.algorithm import Algorithm, with_levels
from chipfit.quantizers.algorithms.ste import STE
from chipfit.quantizers.grids import Grid, quantize, shape_for
from chipfit.quantizers.hosting import ActivationHost, WeightsHost, apply, initialize
from chipfit.quantizers.inferable import ARGUMENTS, CLASSES, class_name, inferable_for
from chipfit.quantizers.ops import TorchOps
from chipfit.quantizers.pairs import bounded_codes, fake_bounded
from chipfit.quantizers.stored import Stored, scales_per_output
from chipfit.quantizers.tables import constant


class PytorchQuantizationWrapper(WeightsHost, nn.Module):
    """A layer that computes with rounded weights; its unrounded weights stay its parameters, and train.

    Args:
        layer: a layer of any class; it is copied.
        weights_quantizers: name of a parameter -> its quantizer: trainable (it registers its own parameters on this
            module), inferable, or any function.

    Raises:
        UnknownNameError: The layer has no parameter of that name.
    """

    weights_quantizers: dict[str, Any]

    def __init__(self, layer: nn.Module, weights_quantizers: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)
        self.weights_quantizers = {}
        parameters = dict(self.layer.named_parameters())
        for name, quantizer in (weights_quantizers or {}).items():
            check_known(f"parameter of {type(layer).__name__}", name, parameters)
            self.weights_quantizers[name] = quantizer
            initialize(quantizer, self.weight_of(name).shape, name, self, "weights of torch")

    def weight_of(self, name: str) -> torch.Tensor:
        """Return a parameter of the layer, unrounded."""
        return self.layer.get_parameter(name)

    def get_quantized_weights(self) -> dict[str, torch.Tensor]:
        """Return the rounded weights that the layer computes with, by name."""
        return {n: apply(q, self.weight_of(n), self.training) for n, q in self.weights_quantizers.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self.layer, self.get_quantized_weights(), args, kwargs)


class PytorchActivationQuantizationHolder(ActivationHost, nn.Module):
    """A module that rounds the result of a layer, as the chip stores it.

    Args:
        activation_holder_quantizer: trainable, inferable, or any function.
    """

    def __init__(self, activation_holder_quantizer: Any) -> None:
        super().__init__()
        self.activation_holder_quantizer = activation_holder_quantizer
        initialize(activation_holder_quantizer, None, "activation_holder_quantizer", self, "activations of torch")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return apply(self.activation_holder_quantizer, inputs, self.training)


#: the algorithm of quantizers that do not train
_STE = STE()


def fake_quantize_ste(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, axis: int | None = None) -> Tensor:
    """Fake-quantize x with a straight-through gradient for x and the LSQ gradient for the scale.

    The result is computed in float32 (float64 if x is float64) and has the dtype of x. Shapes and units are those of
    `grids.quantize`.
    """
    return _rounded(_STE, x, {"scale": scale, "zero_point": zero_point}, grid, axis)


def _rounded(
    algorithm: Algorithm, x: Tensor, p: Mapping[str, Tensor], grid: Grid, axis: int | None, training: bool = False
) -> Tensor:
    """Return x as the algorithm rounds it; the algorithm's inputs p are [] or [C] along `axis`."""
    dtype = torch.promote_types(p["scale"].dtype, x.dtype)
    given = {**_broadcast(p, x, axis, dtype, algorithm.vectors), "training": training}
    return algorithm.call(TorchOps, x.to(dtype), given, grid).to(x.dtype)  # type: ignore[no-any-return]


def _broadcast(
    p: Mapping[str, Tensor], x: Tensor, axis: int | None, dtype: torch.dtype, vectors: Collection[str] = ()
) -> dict[str, Tensor]:
    along = axis or 0 if x.dim() else None  # the axis of a vector may be None
    return {k: (v if k in vectors else shape_for(v, x, along)).to(dtype) for k, v in p.items()}


def _blended(x: Tensor, y: Tensor, share: float) -> Tensor:
    """Return (1 - share) x + share y."""
    return y if share == 1 else torch.lerp(x, y, share)


def register_weight(
    module: nn.Module, name: str, weight: Tensor, rounded: Collection[str] = ()
) -> tuple[dict[str, Any], str]:
    """Register a weight under its dotted name; return the table of its module, and its key there.

    Args:
        rounded: names of layers that compute with rounded weights.
    """
    *path, leaf = name.split(".")
    for k, p in enumerate(path, 1):
        if p not in module._modules:  # add_module would refuse names of our methods
            module._modules[p] = LayerWeights() if ".".join(path[:k]) in rounded else nn.Module()
        module = module._modules[p]  # type: ignore[assignment]  # entries are modules
    table: dict[str, Any] = module._parameters if isinstance(weight, nn.Parameter) else module._buffers
    table[leaf] = weight
    return table, leaf


class FakeQuantizer(nn.Module):
    """A module that rounds a tensor to the grid of its plan, y = (clip(round(x / s) + z) - z) s, by its algorithm.

    The numbers that the algorithm trains are parameters; a `scale` that it does not train is a frozen parameter. One
    number is a parameter [1], because FSDP2 shards no scalars.
    """

    share = 1.0  #: the share of rounding in the result: y = (1 - share) x + share Q(x)
    role = "weight"  #: of the tensor that it rounds

    scale: Tensor
    zero_point: Tensor

    def __init__(self, tensor: str, stored: Stored, algorithm: Algorithm = _STE, x: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        trains = algorithm.init(stored, x)
        given = {**algorithm.constants(stored, x), **trains}
        for name, value in given.items():
            if name in trains or name == "scale":
                value = nn.Parameter(torch.atleast_1d(value.detach()).clone(), requires_grad=name in trains)
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value.clone(), persistent=name != "least")
        self._input_names, self._single = tuple(given), {name for name, value in given.items() if value.dim() == 0}
        self.tensor, self.grid, self.axis, self.algorithm = tensor, algorithm.grid(stored.grid), stored.axis, algorithm
        algorithm.start(self)
        self.input_rank = x.dim() if x is not None else None  #: dimensions of a weight
        #: replaces the algorithm, see FrameworkInfo.apply
        self.function: Callable[[Tensor], Tensor] | None = None

    def extra_repr(self) -> str:
        codes = f"codes {self.grid.qmin}..{self.grid.qmax}"
        return f"{self.tensor}, {self.grid.bits} bit, {codes}, axis={self.axis}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FakeQuantizer:
        """Keep scales in float32 under `.half()` and `.bfloat16()`: rounded scales would move all quantized values."""
        before = {name: p.detach() for name, p in self.named_parameters()}
        super()._apply(fn, recurse)
        for name, p in self.named_parameters():
            if torch.finfo(p.dtype).bits < 32:
                p.data = before[name].to(p.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):  # beside the tensors, so that the entries of the state dict stay the same
            destination._metadata[prefix[:-1]]["grid"] = repr(self.grid)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """Load numbers from a checkpoint.

        Raises:
            PlanError: The checkpoint has another grid.
        """
        if local_metadata.get("grid", repr(self.grid)) != repr(self.grid):
            grids = {"got": local_metadata["grid"], "allowed": repr(self.grid)}
            raise PlanError(f"This checkpoint belongs to another plan: the grid of '{self.tensor}' differs", **grids)
        for name in self._single & self._parameters.keys():
            if (key := prefix + name) in state_dict:  # a scalar in checkpoints of MQBench and others
                state_dict[key] = torch.atleast_1d(state_dict[key])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def algorithm_inputs(self) -> dict[str, Tensor]:
        """Return the inputs of the algorithm by name, each [] or [C]."""
        given = {name: getattr(self, name) for name in self._input_names}
        return {name: x.reshape(()) if name in self._single else x for name, x in given.items()}

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return the current scale and zero point, [] or [C]; gradients flow to the parameters that train."""
        s, z = self.algorithm.numbers(TorchOps, self.algorithm_inputs(), self.grid)
        return s, z

    @property
    def num_bits(self) -> int:
        """The bits of a quantized value."""
        return self.grid.bits

    @property
    def inferable_class(self) -> type | None:
        """The inferable quantizer that this one is like: None if it trains, or if there is none with this grid."""
        like = self.grid.kind in ("int", "lut") and not self.trainable_parameters() and self.function is None
        return CLASSES.get(class_name(self.grid, self.role)) if like else None

    def trained_grid(self) -> Grid:
        """Return the grid with the levels that training gave it."""
        table = self.algorithm.table(TorchOps, self.algorithm_inputs(), self.grid)
        return with_levels(self.grid, None if table is None else table.tolist())

    def trainable_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that train now, by name."""
        return {name: p for name, p in self.named_parameters(recurse=False) if p.requires_grad}

    @torch.no_grad()
    def rescale(self, factor: Tensor) -> None:
        """Multiply the scale by a factor, [] or [C]."""
        factor = factor.to(device=self.scale.device, dtype=self.scale.dtype)
        for name, value in self.algorithm.rescaled(TorchOps, self.trainable_parameters(), factor).items():
            getattr(self, name).copy_(value)

    def reals(self, w: Tensor) -> Tensor:
        """Return the weight [*dims] that the algorithm rounds in place of w; the plan's grid is for this weight."""
        p = _broadcast(self.algorithm_inputs(), w, self.axis, self.scale.dtype, self.algorithm.vectors)
        return self.algorithm.reals(TorchOps, w, p, self.grid).to(w.dtype)  # type: ignore[no-any-return]

    def quantize(self, x: Tensor) -> Tensor:
        """Return the integers of floats [*dims], or their indices in the grid's table; without gradients."""
        s, z = (n.detach() for n in self.numbers())
        q, limit = quantize(x.detach().to(s.dtype), s, z, self.trained_grid(), self.axis), self.grid.pair_limit
        return q if limit is None else bounded_codes(q, limit, self.axis)

    def dequantize(self, codes: Tensor) -> Tensor:
        """Return the floats of integers [*dims]; without gradients."""
        s, z = (n.detach() for n in self.numbers())
        p = _broadcast({"s": s, "z": z}, codes, self.axis, s.dtype)
        table = self.trained_grid().table
        return (codes - p["z"] if table is None else constant(table, s)[codes.long()]) * p["s"]

    def forward(self, x: Tensor) -> Tensor:
        """Return floats [*dims] rounded to the grid, with the shape and dtype of x."""
        if isinstance(x, Proxy):
            return module_node(self, x)
        if self.function is not None:
            return _blended(x, self.function(x), self.share)
        y = _rounded(self.algorithm, x, self.algorithm_inputs(), self.grid, self.axis, self.training)
        if self.grid.pair_limit is not None:
            scale = shape_for(self.numbers()[0], y, self.axis)
            y = fake_bounded(TorchOps, y, scale, self.grid.pair_limit, self.axis).to(x.dtype)
        return _blended(x, y, self.share)


class ActivationQuantizer(FakeQuantizer, PytorchActivationQuantizationHolder):
    """A quantizer of the result of a layer."""

    role = "activation"

    @property
    def activation_holder_quantizer(self) -> Any:  # type: ignore[override]  # of other holders it is an attribute
        """The quantizer that rounds: the user's own, or this module."""
        return getattr(self.algorithm, "quantizer", self)


def _of_inferable(name: str) -> property:
    """Return the property that is an attribute of the inferable quantizer with the present numbers."""

    def read(self: FakeQuantizer) -> Any:
        s, z = (n.detach() for n in self.numbers())
        stored = Stored(format="", grid=self.trained_grid(), scale=s, zero_point=z, axis=self.axis)
        try:
            fixed = inferable_for(stored, self.role)
        except KeyError:  # no inferable quantizer has this grid
            raise AttributeError(name) from None
        return getattr(fixed, name)

    return property(read)


for _name in ARGUMENTS - {"num_bits", "input_rank"}:
    setattr(FakeQuantizer, _name, _of_inferable(_name))


class LayerWeights(PytorchQuantizationWrapper):
    """The weights of a layer, some of which have quantizers."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weights_quantizers = {}
        self.node: Node | None = None  #: an operator that reads the weights

    @property
    def layer(self) -> nn.Module:  # type: ignore[override]  # of other wrappers it is a submodule
        """The user's layer with the unrounded weights of this module; made anew at each access, and no submodule."""
        return layer_like(self.node, {**self._parameters, **self._buffers})  # type: ignore[dict-item]  # none is None

    @property
    def weight_values(self) -> dict[int, Tensor]:
        """The unrounded constants of a function, by their places among its operands; none of a layer with names."""
        if self.node is None or self.node.layer:
            return {}
        held = {**self._parameters, **self._buffers}
        leaves = enumerate(str(i).rpartition(".")[2] for i in self.node.inputs)
        return {k: t for k, leaf in leaves if (t := held.get(leaf)) is not None}

    def weight_of(self, name: str) -> Tensor:
        table: dict[str, Any] = self._parameters if name in self._parameters else self._buffers
        return table[name]


class BiasQuantizer(nn.Module):
    """A module that rounds a bias to int32 at s_in * s_w; the scales come from live quantizers, which may train.

    Args:
        factors: the quantizers of the input and of the weight.
    """

    def __init__(self, tensor: str, stored: Stored, factors: tuple[FakeQuantizer, ...]) -> None:
        super().__init__()
        self.tensor, self.grid = tensor, stored.grid
        self.share = 1.0
        self._channels = stored.scale.numel()
        self._factors = factors  # in a tuple, so that they are not registered here a second time

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return the current scale and zero point, [] or [C]."""
        of_input, of_weight = (f.numbers()[0] for f in self._factors)
        scale = scales_per_output(of_input * of_weight, self._channels)
        return scale, torch.zeros_like(scale)

    def extra_repr(self) -> str:
        return f"{self.tensor}, {self.grid.bits} bit at input scale x weight scale"

    def forward(self, b: Tensor) -> Tensor:
        """Return a bias [C] rounded to the grid."""
        if isinstance(b, Proxy):
            return module_node(self, b)
        return _blended(b, fake_quantize_ste(b, *self.numbers(), self.grid, 0), self.share)


class Checkpointed(nn.Module):
    """A model that refuses checkpoints of other plans."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a checkpoint, as `nn.Module` does.

        Raises:
            PlanError: The checkpoint is of a model with other tensors, shapes or grids.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as e:
            got = " ".join(line.strip() for line in str(e).splitlines()[1:4])[:400]
            hint = "load it into the model of the result that it was saved from; "
            hint += "names that begin with 'module.' come from DistributedDataParallel"
            raise PlanError("This checkpoint belongs to another plan", got=got, hint=hint) from e
