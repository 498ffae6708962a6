"""ptq_reconstruction: AdaRound, BRECQ and QDrop on a model of `prepare_by_platform`.

The rounding of weights, and the scales of activations, are learned layer by layer or block by block, so that each unit
reproduces the outputs of the float network from the inputs that the quantized one gives it. The formulas are those of
`chipfit.rounding.adaround`.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from chipfit.calibration.data import as_call
from chipfit.errors import ConfigError, DataError, PlanError, check_known
from chipfit.graph.placement import device_of
from chipfit.mqbench.folded_batch_norm import FoldedBatchNorm
from chipfit.mqbench.learned import Learned
from chipfit.mqbench.prepare import PreparedModule
from chipfit.mqbench.quantizers import AlgorithmQuantizer, QuantizeBase, disable_all, enable_quantization
from chipfit.quantizers.stored import Stored
from chipfit.rounding.adaround import SoftWeight, output_error, regularizer
from chipfit.validation import Fraction, Number, Positive, PositiveInt, record

__all__ = ["ptq_reconstruction"]

#: weighted layers in a chain without a branch that make a block
_IN_A_ROW = 3


@record(ConfigError, frozen=True)
class Reconstruction:
    """The options of `ptq_reconstruction`, with the names of MQBench."""

    pattern: Literal["layer", "block"] = "block"  #: what is fitted at once: "layer" is AdaRound, "block" is BRECQ
    scale_lr: Number | None = None  #: learning rate of the scales of activations; None: they stay
    warm_up: Fraction = 0.2  #: share of the steps without a pull towards quantized values
    weight: Number = 0.01  #: of that pull in the loss
    max_count: PositiveInt = 20000  #: steps for each unit
    b_range: Sequence[Number] = (20, 2)  #: exponent of the pull at the beginning and the end
    keep_gpu: bool = True  #: accepted: tensors stay on the device of the model
    round_mode: Literal["learned_hard_sigmoid"] = "learned_hard_sigmoid"
    prob: Fraction = 1.0  #: share of the values that are quantized in a step; below 1 it is QDrop
    weight_lr: Positive = 1e-3  #: learning rate of the rounding of weights

    @classmethod
    def of(cls, given: Any) -> "Reconstruction":
        """Return the options from a mapping, or from an object with attributes.

        Raises:
            ConfigError, UnknownNameError: an option does not exist or is out of bounds.
        """
        options = dict(given) if isinstance(given, Mapping) else dict(vars(given))
        for name in options:
            check_known("option of ptq_reconstruction", name, cls.__dataclass_fields__)
        return cls(**options)


def ptq_reconstruction(
    model: fx.GraphModule, cali_data: Sequence[Any], config: Any, graph_module_list: Any = None
) -> PreparedModule:
    """Return a copy of a calibrated model with rounding of weights, and scales, learned on calibration batches.

    Args:
        model: from `prepare_by_platform`, after its quantizers have observed data.
        cali_data: batches, as arguments of the model.
        config: options of `Reconstruction`, in a dictionary or as attributes.

    Raises:
        PlanError: the model was not prepared, or not calibrated.
        DataError: there are no batches.
        ConfigError, UnknownNameError: an option is wrong.
    """
    options = Reconstruction.of(config)
    if not isinstance(model, PreparedModule):
        raise PlanError("Model must come from prepare_by_platform", got=type(model).__name__)
    if graph_module_list is not None:
        raise ConfigError("'graph_module_list' is not used", hint="prepare the part, and fit it as a model of its own")
    if blank := [
        n for n, m in model.named_modules() if isinstance(m, QuantizeBase) and not m.activation_post_process.batches
    ]:
        hint = "run batches after enable_calibration(model)"
        raise PlanError("Quantizers have observed no data", got=", ".join(blank[:4]), hint=hint)
    calls = [as_call(batch, model) for batch in cali_data]
    if not calls:
        raise DataError("There are no calibration batches", hint="pass a list of batches")
    exact, rounded = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    disable_all(exact)
    enable_quantization(rounded)
    for unit in _units(rounded, options.pattern):
        _fit(_Unit(rounded, unit), exact, calls, options)
    return rounded


# ---------------------------------------------------------------- units


def _is_weighted(model: fx.GraphModule, n: fx.Node) -> bool:
    return n.op == "call_module" and isinstance(model.get_submodule(str(n.target)), FoldedBatchNorm)


def _units(model: fx.GraphModule, pattern: str) -> Iterator[list[fx.Node]]:
    """Yield the nodes of each unit, in execution order; each has a weighted layer, and the last node its result."""
    nodes = [n for n in model.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    if pattern == "layer":
        for n in (n for n in nodes if _is_weighted(model, n)):
            unit = [n]
            while len(unit[-1].users) == 1 and _continues(model, follower := next(iter(unit[-1].users))):
                unit.append(follower)
            yield unit
        return
    unit, layers = list[fx.Node](), 0
    for piece in _between_cuts(nodes):
        count = sum(_is_weighted(model, n) for n in piece)
        if layers and count and (count > 1 or layers >= _IN_A_ROW):
            yield unit
            unit, layers = [], 0
        unit, layers = unit + piece, layers + (count if count < 2 else _IN_A_ROW)
    if layers:
        yield unit


def _continues(model: fx.GraphModule, n: fx.Node) -> bool:
    """Return whether a node belongs to the layer before it: it has one input, and no weights."""
    return n.op != "output" and len(n.all_input_nodes) == 1 and not _is_weighted(model, n)


def _between_cuts(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield parts of a network between which one tensor passes: a residual block is one part."""
    at = {n: k for k, n in enumerate(nodes)}
    inputs = [x for n in nodes for x in n.all_input_nodes if x.op == "placeholder"]
    reach = max((_last_use(x, at) for x in inputs), default=-1)  # of the tensors before the node
    piece: list[fx.Node] = []
    for k, n in enumerate(nodes):
        piece.append(n)
        if reach <= k:
            yield piece
            piece = []
        reach = max(reach, _last_use(n, at))
    if piece:
        yield piece


def _last_use(x: fx.Node, at: Mapping[fx.Node, int]) -> int:
    """Return the position of the last node that reads a value; outputs of the model are behind all nodes."""
    return max((at.get(u, len(at)) for u in x.users), default=-1)


class _Unit:
    """A part of a model, which runs on its own."""

    def __init__(self, model: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
        self.model, self.nodes, self.result = model, nodes, nodes[-1].name
        inside = set(nodes)
        outside = dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in inside)
        self.inputs = [x.name for x in outside]
        self.hosts: list[Any] = [model.get_submodule(str(n.target)) for n in nodes if _is_weighted(model, n)]

    def quantizers(self) -> list[AlgorithmQuantizer]:
        """Return the quantizers of activations."""
        modules = [self.model.get_submodule(str(n.target)) for n in self.nodes if n.op == "call_module"]
        return [m for m in modules if isinstance(m, AlgorithmQuantizer)]

    def run(self, inputs: Mapping[str, Any], share: float) -> Any:
        """Run the part; quantizers of activations round a share of the values."""
        env, runner = dict(inputs), fx.Interpreter(self.model)

        def value(x: fx.Node) -> Any:
            return env[x.name]

        for n in self.nodes:
            args, kwargs = fx.map_arg(n.args, value), fx.map_arg(n.kwargs, value)
            y = getattr(runner, n.op)(n.target, args, kwargs)
            if (
                share < 1
                and n.op == "call_module"
                and isinstance(self.model.get_submodule(str(n.target)), QuantizeBase)
            ):
                y = _mixed(y, args[0], share)
            env[n.name] = y
        return env[self.result]


def _mixed(y: Any, x: Any, share: float) -> Any:
    """Return y where a random number is below `share`, and x elsewhere."""
    return torch.where(torch.rand_like(x) < share, y, x) if isinstance(x, torch.Tensor) and x.is_floating_point() else y


def call_on(device: torch.device, call: Any) -> Any:
    """Return (args, kwargs) with their tensors on a device."""
    return tree_map_only(torch.Tensor, lambda x: x.to(device), call)


def values_of(model: fx.GraphModule, names: Sequence[str], call: Any) -> dict[str, Any]:
    """Return the values of nodes for a batch, which may lie anywhere."""
    runner, (args, kwargs) = fx.Interpreter(model, garbage_collect_values=False), call_on(device_of(model), call)
    with torch.no_grad():
        runner.run(*args, *kwargs.values())
    return {n.name: value for n, value in runner.env.items() if n.name in names}


# ---------------------------------------------------------------- the fit


class _SoftRounding(nn.Module):
    """A weight quantizer that returns the weight between two quantized values."""

    def __init__(self, soft: SoftWeight) -> None:
        super().__init__()
        self.soft = soft

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return self.soft.soft()


def _fit(unit: _Unit, exact: fx.GraphModule, calls: Sequence[Any], options: Reconstruction) -> None:
    """Learn the rounding of a unit's weights, and the scales of its activations."""
    given = [values_of(unit.model, unit.inputs, c) for c in calls]
    floats = [values_of(exact, [*unit.inputs, unit.result], c) for c in calls]
    quantizers, soft = [host.weight_quantizer for host in unit.hosts], [_soft_weight(host) for host in unit.hosts]
    for host, s in zip(unit.hosts, soft, strict=True):
        host.weight_quantizer = _SoftRounding(s)
    rounding = torch.optim.Adam([s.v for s in soft], options.weight_lr)
    optimizers: list[Any] = [rounding]
    scales = [p for q in unit.quantizers() for p in q.parameters() if p.requires_grad] if options.scale_lr else []
    if scales:
        optimizers.append(torch.optim.Adam(scales, options.scale_lr or 0))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[1], options.max_count)
    for step in range(options.max_count):
        k = int(torch.randint(len(calls), ()))
        inputs = (
            given[k] if options.prob == 1 else {n: _mixed(x, floats[k][n], options.prob) for n, x in given[k].items()}
        )
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = output_error(unit.run(inputs, options.prob), floats[k][unit.result])
        after = max(step / options.max_count - options.warm_up, 0) / max(1 - options.warm_up, 1e-9)
        if step >= options.warm_up * options.max_count:
            first, last = options.b_range
            loss = loss + options.weight * sum(regularizer(s.share(), first + (last - first) * after) for s in soft)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if scales:
            schedule.step()
    for host, quantizer, s in zip(unit.hosts, quantizers, soft, strict=True):
        host.weight_quantizer = quantizer
        host.set_folded_weight(s.hard())


def _soft_weight(host: FoldedBatchNorm) -> SoftWeight:
    """Return the folded weight of a layer between its two nearest quantized values."""
    folded: Any = host.fold()
    w, learned = folded.weight.detach(), Learned.of(host.weight_quantizer, is_weight=True)  # type: ignore[arg-type]
    numbers = {"scale": learned.scale.to(w.device).float(), "zero_point": learned.zero_point.to(w.device)}
    stored = Stored(format="", grid=learned.grid, axis=learned.axis, **numbers)
    return SoftWeight(stored, w, w)
