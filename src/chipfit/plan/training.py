"""Which algorithm trains which tensor of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from chipfit.errors import ConfigError, UnknownNameError, UnsupportedError
from chipfit.graph.folds import unfold_batch_norms
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.algorithm import MOST_BITS, Algorithm
from chipfit.quantizers.bn_fold import UNFOLDED, strategy_of
from chipfit.quantizers.grids import Grid
from chipfit.registry import create

#: roles of tensors -> the word for them in options
_WORDS = {"weight": "weights", "activation": "activations"}


@dataclass(frozen=True)
class Training:
    """The algorithms of a quantization-aware training.

    A role takes that of both unless it says its own; "" leaves its numbers where calibration put them, as does None for
    single tensors and layers.

    `Training("lsq")` trains both with LSQ; `Training(weights="dorefa", activations="pact")` each with its own; options
    stand behind the name, as in "lsq(use_grad_scaling=False)". An instance of an `Algorithm` does as well as a name.
    """

    method: str | Algorithm | type | None = None  #: of both
    weights: str | Algorithm | type | None = None
    activations: str | Algorithm | type | None = None
    #: names of tensors, or of the layers that make or own them -> algorithm for these
    only: Mapping[str, str | Algorithm | type | None] = field(default_factory=dict)
    #: how batch norms fold while they train: 0, once and before; or -1, 1, 2, 3, 4 of `chipfit.quantizers.bn_fold`
    bn_fold: int = 0
    bn_momentum: float = 0.1  #: share of a step's statistics in what batch norms remember
    bn_sync: bool = False  #: statistics of a step are of the batches of all processes that train together (PyTorch)

    @classmethod
    def of(cls, given: Any) -> Training | None:
        """From what a user gives: None, a name, a mapping of this class's fields, or an instance.

        Raises:
            ConfigError, UnknownNameError: it is none of these, or names what does not exist.
        """
        if given is None or isinstance(given, Training):
            return given
        if isinstance(given, (str, Algorithm, type)):
            return cls(given)
        if not isinstance(given, Mapping):
            allowed = 'a name such as "lsq", or {"weights": ..., "activations": ...}'
            raise ConfigError("This says no training", got=repr(given)[:120], allowed=allowed)
        known = tuple(f.name for f in fields(cls))
        for name in given:
            if name not in known:
                raise UnknownNameError("field of a training", str(name), known)
        return cls(**given)

    def __post_init__(self) -> None:
        if not isinstance(self.only, Mapping) or not isinstance(self.bn_sync, bool):
            raise ConfigError("'only' is a table, 'bn_sync' true or false", got=repr((self.only, self.bn_sync))[:120])
        for chosen in (self.method, self.weights, self.activations, *self.only.values()):
            algorithm_of(chosen)  # refuses what it does not know
        strategy_of(self.bn_fold)
        if not (isinstance(self.bn_momentum, (int, float)) and 0 < self.bn_momentum <= 1):
            raise ConfigError("A momentum is a share", got=repr(self.bn_momentum), allowed="above 0, at most 1")

    def algorithm(self, t: TensorPlan) -> Algorithm | None:
        """What trains a quantized tensor; None for what stays where it is.

        Raises:
            UnsupportedError: the algorithm cannot round to the tensor's grid.
        """
        if t.stored is None or t.role not in _WORDS:
            return None
        role = getattr(self, _WORDS[t.role])
        chosen = [self.only[key] for key in (t.name, t.layer) if key in self.only]
        found = algorithm_of(chosen[0] if chosen else self.method if role is None else role)
        if found is not None and (why := refusal(found, t.stored.grid, t.role)):
            hint = f"name another algorithm for it, or None: training={{..., 'only': {{'{t.name}': None}}}}"
            what = f"{type(found).__name__} cannot train {t.role} '{t.name}': {why}"
            raise UnsupportedError(what, where=t.layer, got=f"format {t.format}", hint=hint)
        return found


def check_trainable(training: Training | None, plan: Plan) -> None:
    """Raise where an algorithm cannot train a tensor of the plan, or a name in `only` is none of it.

    Raises:
        UnsupportedError: naming the tensor.
        UnknownNameError: naming near ones.
    """
    if training is None:
        return
    names = {n for t in plan.tensors.values() if t.role in _WORDS for n in (t.name, t.layer)}
    for name in training.only:
        if name not in names:
            raise UnknownNameError("tensor or layer", name, names)
    for t in plan.tensors.values():
        training.algorithm(t)


def refusal(algorithm: Algorithm, grid: Grid, role: str) -> str:
    """Why an algorithm cannot train a tensor ("weight" or "activation") on this grid; "" where it can."""
    if grid.bits > MOST_BITS:
        return f"{grid.bits} bits; at most {MOST_BITS} train, in float32 the steps of more are lost"
    if grid.symmetric and grid.qmax < 1 and grid.table is None:
        return f"codes {grid.qmin}..{grid.qmax} hold nothing above 0"
    if grid.per == "block":
        return "its blocks have a scale each, which stay"
    return algorithm.refuses(grid, role)


def algorithm_of(chosen: str | Algorithm | type | None) -> Algorithm | None:
    """The algorithm that a name stands for, with its options behind it.

    Raises:
        UnknownNameError: no such algorithm, or no such option of it.
        ConfigError: neither a name nor an algorithm, or an option out of bounds.
    """
    if isinstance(chosen, type) and hasattr(chosen, "hosted"):
        chosen = chosen.hosted()  # a class of quantizers that a user wrote
    if isinstance(chosen, Algorithm):
        return chosen
    if chosen is not None and not isinstance(chosen, str):
        allowed = "the name of a training algorithm, or an instance of one"
        raise ConfigError("This is no training algorithm", got=repr(chosen)[:120], allowed=allowed)
    return create("training", chosen) if chosen else None


def before_training(graph: Graph, plan: Plan, training: Training | None) -> tuple[Graph, Plan]:
    """What a simulation starts from: with batch norms apart from the layers before them, where they train.

    The plan is for folded weights; under strategy -1 for those that are not, whose scales are to be as tight.

    Raises:
        UnsupportedError: there is no batch norm to train, or its layer was changed since.
    """
    if training is None or training.bn_fold == 0:
        return graph, plan
    apart, tensors = unfold_batch_norms(graph), dict(plan.tensors)
    if training.bn_fold != -1:
        return apart, plan
    for name in graph.folds:
        if (old := tensors[name].stored) is not None:
            axes = [d for d in range(apart.weights[name].dim()) if not old.scale.dim() or d != old.axis]
            now, then = (g.weights[name].detach().abs().amax(axes) for g in (apart, graph))
            ratio = torch.where((now > 0) & (then > 0), now / then, 1.0)
            tensors[name] = tensors[name].with_(scale=(old.scale * ratio).to(old.scale.dtype))
    return apart, replace(plan, tensors=tensors, limits=(), sums=())  # no chip stores these


def check_folds(bn_fold: int) -> None:
    """Raise where no chip computes what was trained.

    Raises:
        UnsupportedError: saying why.
    """
    if bn_fold == -1:
        raise UnsupportedError("What was trained cannot be deployed", got=UNFOLDED, hint="train with bn_fold 1 to 4")


def check_deployable(algorithm: Algorithm, t: TensorPlan) -> None:
    """Raise where what an algorithm has trained cannot be deployed.

    Raises:
        UnsupportedError: saying why.
    """
    why = algorithm.undeployable.get(t.role, "")
    if t.stored is not None and t.stored.grid.table is None and algorithm.grid(t.stored.grid).table is not None:
        why = "it rounds to the levels of a table, and the codes of the format are integers"
    if why:
        got = f"{t.role} '{t.name}'"
        what = f"What {type(algorithm).__name__} has trained cannot be deployed: {why}"
        raise UnsupportedError(what, where=t.layer, got=got, hint="train it with another algorithm, for example lsq")


def deployed_weight(raw: torch.Tensor, reals: torch.Tensor, t: TensorPlan, plan: Plan) -> torch.Tensor:
    """The weight that is stored when training ends: what the algorithm rounded in place of the raw one.

    Raises:
        UnsupportedError: they differ, and an operator reads the raw one in float.
    """
    if torch.equal(raw, reals):
        return raw
    reader = next((node for name, node in plan.float_edges if name == t.name), None)
    if reader is not None:
        what = f"'{t.name}' is rounded as something else than itself, and '{reader}' reads it in float"
        raise UnsupportedError(what, hint="train it with an algorithm that rounds the weight itself, for example lsq")
    return reals.detach()
