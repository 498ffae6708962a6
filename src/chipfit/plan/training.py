"""Training algorithms of a plan's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Annotated, Any

import torch
from pydantic import Field

from chipfit.errors import ConfigError, UnsupportedError, check_known
from chipfit.graph.folds import unfold_batch_norms
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.algorithm import MOST_BITS, Algorithm, algorithm_text
from chipfit.quantizers.bn_fold import UNFOLDED
from chipfit.quantizers.grids import Grid
from chipfit.registry import create
from chipfit.validation import Number, record

#: roles of tensors -> the word for them in options
_WORDS = {"weight": "weights", "activation": "activations"}
_GATES = 4  #: of an LSTM


@record(ConfigError, frozen=True)
class Training:
    """The algorithms of a quantization-aware training.

    `Training("lsq")` trains weights and activations with LSQ; `Training(weights="dorefa", activations="pact")` gives
    each its own algorithm; options follow the name, as in "lsq(use_grad_scaling=False)". An instance of an `Algorithm`
    may replace a name. "" keeps the scales of a role as calibrated, as does None for tensors and layers in `only`.
    """

    method: str | Algorithm | type | None = None  #: of weights and activations
    weights: str | Algorithm | type | None = None
    activations: str | Algorithm | type | None = None
    #: names of tensors, or of the layers that compute or own them -> their algorithm
    only: Mapping[str, str | Algorithm | type | None] = field(default_factory=dict)
    #: folding of batch norms in training: 0, once before training; or -1, 1, 2, 3, 4 of `chipfit.quantizers.bn_fold`
    bn_fold: Annotated[int, Field(ge=-1, le=4)] = 0
    bn_momentum: Annotated[Number, Field(gt=0, le=1)] = 0.1  #: share of a step's statistics in the running statistics
    bn_sync: bool = False  #: use the statistics of all processes of a distributed training (PyTorch)

    @classmethod
    def of(cls, given: Any) -> Training | None:
        """Return a Training from None, a name, a mapping of this class's fields, or an instance.

        Raises:
            ConfigError, UnknownNameError: it is none of these, or names something unknown.
        """
        if given is None or isinstance(given, Training):
            return given
        if isinstance(given, (str, Algorithm, type)):
            return cls(given)
        if not isinstance(given, Mapping):
            allowed = 'a name such as "lsq", or {"weights": ..., "activations": ...}'
            raise ConfigError("Option 'training' must be a name or a table", got=repr(given)[:120], allowed=allowed)
        return cls(**given)

    def to_record(self) -> dict[str, Any]:
        """Return the fields as JSON data, which `of` reads.

        Raises:
            ConfigError: an algorithm is not registered.
        """
        algorithms = {k: _name_of(getattr(self, k)) for k in ("method", *_WORDS.values())}
        only = {k: _name_of(chosen) for k, chosen in self.only.items()}
        norms = {k: getattr(self, k) for k in ("bn_fold", "bn_momentum", "bn_sync")}
        return {**algorithms, "only": only, **norms}

    def __post_init__(self) -> None:
        for chosen in (self.method, self.weights, self.activations, *self.only.values()):
            algorithm_of(chosen)  # raises if it is unknown

    def algorithm(self, t: TensorPlan) -> Algorithm | None:
        """Return the algorithm that trains a quantized tensor; None if its scale stays, as the one of a gate does.

        Raises:
            UnsupportedError: the algorithm cannot round to the tensor's grid.
        """
        if t.stored is None or t.role not in _WORDS or _shares_by_gate(t):
            return None
        role = getattr(self, _WORDS[t.role])
        chosen = [self.only[key] for key in (t.name, t.layer) if key in self.only]
        found = algorithm_of(chosen[0] if chosen else self.method if role is None else role)
        if found is not None and (why := refusal(found, t.stored.grid, t.role)):
            hint = f"name another algorithm for it, or None: training={{..., 'only': {{'{t.name}': None}}}}"
            what = f"{type(found).__name__} cannot train {t.role} '{t.name}': {why}"
            raise UnsupportedError(what, where=t.layer, got=f"format {t.format}", hint=hint)
        return found


def _name_of(chosen: str | Algorithm | type | None) -> str | None:
    """Return the name, with options, of an algorithm; names as they are."""
    found = None if isinstance(chosen, str) else algorithm_of(chosen)
    return algorithm_text(found) if found is not None else chosen  # type: ignore[return-value]  # a name or None


def _shares_by_gate(t: TensorPlan) -> bool:
    """Return whether the rows of each gate of an LSTM share one scale."""
    if t.op != "LSTM" or t.role != "weight" or t.stored is None or t.stored.scale.dim() != 1:
        return False
    gates = t.stored.scale.reshape(_GATES, -1)
    return bool((gates == gates[:, :1]).all())


def check_trainable(training: Training | None, plan: Plan) -> None:
    """Check that the algorithms can train the tensors of a plan, and that names in `only` are tensors or layers.

    Raises:
        UnsupportedError: naming the tensor.
        UnknownNameError: with similar names.
    """
    if training is None:
        return
    names = {n for t in plan.tensors.values() if t.role in _WORDS for n in (t.name, t.layer)}
    for name in training.only:
        check_known("tensor or layer", name, names)
    for t in plan.tensors.values():
        training.algorithm(t)


def refusal(algorithm: Algorithm, grid: Grid, role: str) -> str:
    """Return why an algorithm cannot train a "weight" or "activation" on this grid; "" if it can."""
    if grid.bits > MOST_BITS:
        return f"{grid.bits} bits; at most {MOST_BITS} train, in float32 the steps of more are lost"
    if grid.symmetric and grid.qmax < 1 and grid.table is None:
        return f"quantized values {grid.qmin}..{grid.qmax} include none above 0"
    if grid.per == "block":
        return "its blocks have a scale each, which stay"
    return algorithm.refuses(grid, role)


def algorithm_of(chosen: str | Algorithm | type | None) -> Algorithm | None:
    """Return the algorithm of a name with options.

    Raises:
        UnknownNameError: no such algorithm, or no such option of it.
        ConfigError: it is neither a name nor an algorithm, or an option is out of bounds.
    """
    if isinstance(chosen, type) and hasattr(chosen, "hosted"):
        chosen = chosen.hosted()  # a user's class of quantizers
    if isinstance(chosen, Algorithm):
        return chosen
    if chosen is not None and not isinstance(chosen, str):
        raise ConfigError("The training algorithm must be a name or an instance of Algorithm", got=repr(chosen)[:120])
    return create("training", chosen) if chosen else None


def before_training(graph: Graph, plan: Plan, training: Training | None) -> tuple[Graph, Plan]:
    """Return the graph and plan from which training starts, with batch norms unfolded if they train.

    The plan is for folded weights; strategy -1 quantizes unfolded weights, whose scales are adapted to their range.

    Raises:
        UnsupportedError: there is no batch norm to train, its layer has changed since it was folded, or an algorithm
            cannot train with strategy 4.
    """
    if training is None or training.bn_fold == 0:
        return graph, plan
    apart, tensors = unfold_batch_norms(graph), dict(plan.tensors)
    if training.bn_fold == 4:
        _check_scales(training, [tensors[name] for name in graph.folds])
    if training.bn_fold != -1:
        return apart, plan
    for name in graph.folds:
        if (old := tensors[name].stored) is not None:
            axes = [d for d in range(apart.weights[name].dim()) if not old.scale.dim() or d != old.axis]
            now, then = (g.weights[name].detach().abs().amax(axes) for g in (apart, graph))
            ratio = torch.where((now > 0) & (then > 0), now / then, 1.0)
            tensors[name] = tensors[name].with_(scale=(old.scale * ratio).to(old.scale.dtype))
    return apart, replace(plan, tensors=tensors, limits=(), sums=())  # the limits are for folded weights


def _check_scales(training: Training, weights: Iterable[TensorPlan]) -> None:
    """Check that strategy 4 can fold the batch norms behind these weights, see `quantizers.bn_fold`.

    Raises:
        UnsupportedError: an algorithm leaves layers without a scale of their own.
    """
    for t in weights:
        algorithm = training.algorithm(t)
        if algorithm is not None and algorithm.scale_invariant:
            what = f"bn_fold=4 cannot fold a batch norm into a weight trained by {type(algorithm).__name__}"
            why = "the weight has no scale of its own, which the statistics would have to follow"
            raise UnsupportedError(
                what, where=t.layer, got=why, hint="train with bn_fold 1 to 3, or with another algorithm"
            )


def check_folds(bn_fold: int) -> None:
    """Check that a chip can run a network trained with this folding of batch norms.

    Raises:
        UnsupportedError: with the reason.
    """
    if bn_fold == -1:
        raise UnsupportedError("The trained network cannot be deployed", got=UNFOLDED, hint="train with bn_fold 1 to 4")


def check_deployable(algorithm: Algorithm, t: TensorPlan) -> None:
    """Check that a tensor trained by an algorithm can be deployed.

    Raises:
        UnsupportedError: with the reason.
    """
    why = algorithm.undeployable.get(t.role, "")
    if t.stored is not None and t.stored.grid.table is None and algorithm.grid(t.stored.grid).table is not None:
        why = "it rounds to the levels of a table, and the format stores integers"
    if why:
        got = f"{t.role} '{t.name}'"
        what = f"A tensor trained by {type(algorithm).__name__} cannot be deployed: {why}"
        raise UnsupportedError(what, where=t.layer, got=got, hint="train it with another algorithm, for example lsq")


def deployed_weight(raw: torch.Tensor, transformed: torch.Tensor, t: TensorPlan, plan: Plan) -> torch.Tensor:
    """Return the weight to store when training ends: the one that the algorithm rounded in place of the raw one.

    Raises:
        UnsupportedError: they differ, and an operator reads the raw one in float.
    """
    if torch.equal(raw, transformed):
        return raw
    reader = next((node for name, node in plan.float_edges if name == t.name), None)
    if reader is not None:
        what = f"'{t.name}' was transformed before it was quantized, and '{reader}' reads it in float"
        raise UnsupportedError(what, hint="train it with an algorithm that rounds the weight itself, for example lsq")
    return transformed.detach()
