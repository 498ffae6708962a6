"""Structured pruning in one call: read the model, choose channels, remove them, and fit what is left."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chipfit import steps
from chipfit.calibration.data import Batch, Call, IndivisibleBatch, count_samples, count_splittable, empty_data_error
from chipfit.calibration.progress import Progress
from chipfit.calibration.source import CalibrationData
from chipfit.channel_pruning.budget import Budget, budgets_of, counts_of
from chipfit.channel_pruning.channels import Channels, channels_of
from chipfit.channel_pruning.importance import METRICS
from chipfit.channel_pruning.refit import refit
from chipfit.channel_pruning.resize import kept_channels, stays, without
from chipfit.channel_pruning.select import Selection, layers_of
from chipfit.decision import Decision, decide
from chipfit.engine.process import preserve_random_state
from chipfit.engine.torch_defaults import torch_defaults
from chipfit.errors import ConfigError, ExportError, UnknownNameError, check_known
from chipfit.files import path_of
from chipfit.frameworks import adapter_of, check, rebuilt
from chipfit.graph.ir import Graph
from chipfit.graph.linear import is_linear, multiplications, out_channels
from chipfit.plan.record import Plan
from chipfit.platform.builtin import DEFAULT
from chipfit.platform.load import load_platform
from chipfit.platform.schema import Platform
from chipfit.reading import read_model
from chipfit.screen import Summary, SummaryRepr
from chipfit.search.limits import OF_FILE, Limits
from chipfit.settings import DEFAULT_SETTINGS

#: samples of the data that measure importance and fit the smaller network; samples at a time
SAMPLES, CHUNK = 512, 32
_NOT_OF_CHANNELS = {"loss": None, **OF_FILE}  #: limits that channels do not keep
#: removals between which importance is measured again
ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class PrunedLayer:
    """A linear operator before and after pruning."""

    name: str  #: the user's layer
    op: str
    channels: tuple[int, int]  #: output channels, before and after
    parameters: tuple[int, int]  #: numbers of its weight
    products: tuple[int, int]  #: multiplications for one sample
    why: str = ""  #: why no channel of it can be removed


@dataclass(frozen=True, kw_only=True, repr=False)
class Pruned(SummaryRepr):
    """A smaller network, and what was removed.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 3)).eval()
        >>> half = chipfit.Limits(weights="50%")
        >>> pruned = chipfit.prune(net, [torch.rand(8, 3, 8, 8)], limits=half, simd=1, progress=False)
        >>> pruned.model(torch.rand(1, 3, 8, 8)).shape
        torch.Size([1, 8, 4, 4])
    """

    graph: Graph  #: the smaller network
    layers: list[PrunedLayer]
    masks: Mapping[str, Tensor]  #: layer -> which of its output channels stay, [C] bool
    importance: Mapping[str, Tensor]  #: layer -> importance of its output channels before the first removal, [C]
    _source: tuple[Any, Call]  #: the user's model, and a call of it

    @cached_property
    def model(self) -> Any:
        """The smaller model of the user's framework, in evaluation mode, to train or to give to `chipfit.quantize`.

        A PyTorch model is a copy of the user's module, whose parameters have their names. Where the code of the module
        fixes sizes of its own, it is a module made from the graph, with these names.
        """
        return rebuilt(self._source[0], self.graph, *self._source[1])

    def save(self, path: str | Path) -> Path:
        """Write the smaller network as it was pruned, not trained since, as a file that `chipfit quantize` loads.

        Args:
            path: `.pt2` for a PyTorch model, `.keras` for a Keras model.

        Raises:
            UnsupportedError: another suffix, or the framework cannot write the network.
        """
        return adapter_of(self.graph.framework).save(self.graph, Plan(), path_of(path, ExportError))

    @property
    def parameters(self) -> tuple[int, int]:
        """The numbers in the weights of linear operators, before and after."""
        return _sums(x.parameters for x in self.layers)

    @property
    def products(self) -> tuple[int, int]:
        """The multiplications of linear operators for one sample, before and after."""
        return _sums(x.products for x in self.layers)

    def _summary(self) -> Summary:
        def change(pair: tuple[int, int]) -> str:
            return f"{pair[0]:,} -> {pair[1]:,} ({100 * pair[1] / max(pair[0], 1):.0f} %)"

        pruned = [x for x in self.layers if x.channels[0] != x.channels[1]]
        facts = {"weights": change(self.parameters), "multiplications": change(self.products)}
        rows = [(x.name, x.op, *x.channels, *x.parameters, x.why) for x in self.layers]
        header = ("layer", "operator", "channels", "after", "weights", "after", "why it keeps all")
        title = f"{len(pruned)} of {len(self.layers)} layers have fewer channels"
        return Summary(
            title, {**facts, "next": ".model, chipfit.quantize(pruned.model, data)"}, header, rows, ".layers"
        )


def _sums(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    before, after = zip(*pairs, strict=True)
    return sum(before), sum(after)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `prune` that say how channels are chosen."""

    importance: str = "fisher"
    keep: tuple[str, ...] = ()
    #: channels that are removed at a time, of all operators, or by operator for a graph; None: as the platform has them
    simd: int | Callable[[Graph], dict[str, int]] | None = None
    repair: bool = True
    seed: int = 0
    samples: int = SAMPLES  #: of the data

    def check(self, limits: Any) -> None:
        """Refuse options of the wrong kind.

        Raises:
            ConfigError, UnknownNameError: naming the option.
        """
        known = isinstance(limits, Limits) and not limits.to_record().keys() & _NOT_OF_CHANNELS.keys()
        wrong = (
            ("limits", limits, known, f"chipfit.Limits without {', '.join(_NOT_OF_CHANNELS)}"),
            ("simd", self.simd, self.simd is None or _is_whole(self.simd, 1), "None, or 1 or more"),
            ("repair", self.repair, isinstance(self.repair, bool), "True or False"),
            ("seed", self.seed, _is_whole(self.seed), "a whole number"),
        )
        for name, value, fits, allowed in wrong:
            if not fits:
                raise ConfigError(f"Value of option '{name}' is not allowed", got=repr(value)[:120], allowed=allowed)
        check_known("importance metric", self.importance, METRICS)


@preserve_random_state
@torch_defaults()
def prune(
    model: Any,
    data: Any,
    platform: str | Path | Platform = DEFAULT,
    *,
    limits: Limits,
    importance: str = "fisher",
    keep: Sequence[str] = (),
    simd: int | None = None,
    repair: bool = True,
    example: Any = None,
    seed: int = 0,
    progress: bool = True,
) -> Pruned:
    """Remove channels of a trained PyTorch or Keras 3 model until it keeps the limits.

    Channels that sums, concatenations, or grouped and depthwise convolutions tie are removed together, with their batch
    norms and biases. Inputs and outputs keep their shapes.

    Args:
        model: in any mode; it is copied, never changed.
        data: batches as for `quantize`, without labels. A few hundred samples are enough.
        platform: as for `quantize`; its SIMD widths are the numbers of channels that are removed at a time.
        limits: memory or operations of the smaller network, `Limits(bops="70%")` or `Limits(weights="50%")`; shares are
            relative to the given network. Sizes count 8 bits for each number.
        importance: "fisher", "lfh" or "magnitude", see `chipfit.channel_pruning.importance`.
        keep: layers that keep all channels, by path or pattern ("features.0.*").
        simd: number of channels that are removed at a time, instead of the platform's widths.
        repair: fit the remaining weights to the outputs of the given network, by least squares on the data.
        example: as for `quantize`.
        seed: seed of all random numbers.
        progress: show progress, as `quantize` does.

    Raises:
        PruningError: a limit cannot be kept without removing whole layers; names it, and the layers that cannot shrink.
        CaptureError, DataError, UnknownNameError, ConfigError: see `chipfit.errors`.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 3)).eval()
        >>> half = chipfit.Limits(weights="50%")
        >>> pruned = chipfit.prune(net, [torch.rand(8, 3, 8, 8)], limits=half, simd=1, progress=False)
        >>> pruned.model[0].out_channels <= 8
        True
    """
    options = Options(importance=importance, keep=tuple(keep), simd=simd, repair=repair, seed=seed)
    options.check(limits)
    show = Progress(progress)
    return prune_to(model, data, platform, lambda channels: budgets_of(channels, limits), options, example, show)


def _is_whole(value: Any, least: int = -(2**63)) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) < 2**63


def prune_to(
    model: Any,
    data: Any,
    platform: Any,
    budgets: Callable[[Channels], list[Budget]],
    options: Options,
    example: Any,
    progress: Progress,
) -> Pruned:
    """Remove channels until budgets are kept; see `prune`.

    Args:
        budgets: function from the channels of a network to its budgets.
    """
    check(model)
    source = CalibrationData(data, example)
    call, of_data = source.example_call(model), source.example is None
    source.keep_batches()
    with progress.stage("capture"):
        whole = read_model(model, *call, of_data=of_data)
        batches = _samples(whole, source.batches(whole), options.samples)
        search = _Search(whole, load_platform(platform), options, batches)
    search.run(budgets, progress)
    return Pruned(graph=search.small, _source=(model, (call[0], dict(call[1]))), **search.report())


class _Search:
    """The rounds of a search: measure importance, remove channels, fit what is left."""

    def __init__(self, whole: Graph, platform: Platform, options: Options, batches: list[Batch]) -> None:
        self.whole = self.small = whole
        self.options, self.batches = options, batches
        self.first = self.channels = channels_of(whole)
        self.masks = {axis: units == units for axis, units in self.channels.units.items()}
        self.simd = _simd_widths(whole, platform, options.simd)
        self.kept_whole = _named_layers(whole, options.keep)
        self.importance: dict[int, float] = {}

    def run(self, budgets: Callable[[Channels], list[Budget]], progress: Progress) -> None:
        """Remove channels in rounds, so that importance is measured again with those that are left.

        Raises:
            PruningError: a budget cannot be kept.
        """
        goals = budgets(self.channels)
        start = [b.used(counts_of(self.channels)) for b in goals]
        rounds = ROUNDS if self.options.repair else 1
        self._check_reachable(goals)
        for k in range(1, rounds + 1):
            shares = (min(1.0, b.limit / max(used, 1e-9)) ** (k / rounds) for b, used in zip(goals, start, strict=True))
            limits = [used * share for used, share in zip(start, shares, strict=True)]
            stage = zip(budgets(self.channels), limits, goals, strict=True)
            with progress.stage(f"prune, round {k} of {rounds}"):
                self._round([replace(b, limit=goal.limit if k == rounds else limit) for b, limit, goal in stage])

    def _check_reachable(self, goals: list[Budget]) -> None:
        """Check before anything is measured that the budgets can be kept.

        Raises:
            PruningError: one cannot.
        """
        Selection(self.channels, layers_of(self.channels, self.simd, self.kept_whole), goals, {}).removed()

    def _round(self, goals: list[Budget]) -> None:
        found = METRICS[self.options.importance](self.channels, self.batches, self.options.seed)
        self.importance = self.importance or found
        layers = layers_of(self.channels, self.simd, self.kept_whole)
        removed = Selection(self.channels, layers, goals, found).removed()
        if not removed:
            return
        stay = stays(self.channels.units, removed)
        for axis, mask in stay.items():
            places = self.masks[axis].nonzero()[:, 0]
            self.masks[axis][places[~mask]] = False
        self.small = without(self.small, self.channels.units, removed)
        if self.options.repair:
            kept = kept_channels(self.whole, self.masks)
            self.small = refit(self.whole, self.small, kept, self.batches, self.options.seed)
        self.channels = channels_of(self.small)

    def report(self) -> dict[str, Any]:
        """Return the layers, masks and importance of a `Pruned`."""
        layers, masks, scores = list[PrunedLayer](), dict[str, Tensor](), dict[str, Tensor]()
        after = {n.name: n for n in self.small.nodes}
        for n in (n for n in self.whole.nodes if is_linear(self.whole, n)):
            now = after[n.name]
            weights = [g.weights[n.weight] for g in (self.whole, self.small)]
            counts = [out_channels(m, w) for m, w in zip((n, now), weights, strict=True)]
            layers.append(
                PrunedLayer(
                    name=n.display_name,
                    op=n.op,
                    channels=(counts[0], counts[1]),
                    parameters=(weights[0].numel(), weights[1].numel()),
                    products=(int(multiplications(self.whole, n)), int(multiplications(self.small, now))),
                    why=self.first.fixed.get(n.name, ""),
                )
            )
            if n.name in self.first.producers:
                axis = self.first.producers[n.name]
                name = n.display_name if n.display_name not in masks else n.name
                masks[name] = self.masks[axis]
                units = self.first.units[axis].tolist()
                scores[name] = torch.tensor([self.importance.get(u, math.inf) for u in units])
        return {"layers": layers, "masks": masks, "importance": scores}


def _samples(graph: Graph, batches: Iterable[Batch], left: int) -> list[Batch]:
    """Return the first `left` samples in chunks; a batch that cannot be cut counts as a whole."""
    out = list[Batch]()
    for batch in batches:
        if isinstance(batch, IndivisibleBatch) or not count_splittable(graph, batch):
            out.append(batch)
            left -= count_samples(graph, batch)
        else:
            out += [list(parts) for parts in zip(*(x[:left].split(CHUNK) for x in batch), strict=True)]
            left -= len(batch[0])
        if left <= 0:
            break
    if not out:
        raise empty_data_error()
    return out


def _simd_widths(graph: Graph, platform: Platform, simd: Any) -> dict[str, int]:
    """Return for each linear operator how many channels one instruction of the platform computes."""
    if simd is not None:
        widths: dict[str, int] = simd(graph) if callable(simd) else {n.name: simd for n in graph.nodes}
        return widths
    rewritten, _ = steps.rewrite(graph.copy(), platform, DEFAULT_SETTINGS)
    plans = decide(Decision(platform=platform, graph=rewritten)).assignment.nodes
    return {name: plan.simd for name, plan in plans.items() if plan.simd}


def _named_layers(graph: Graph, patterns: Sequence[str]) -> set[str]:
    """Return the operators of layers that match a pattern.

    Raises:
        UnknownNameError: a pattern matches no layer.
    """
    names = {n.name: n.display_name for n in graph.nodes if is_linear(graph, n)}
    out: set[str] = set()
    for pattern in patterns:
        found = {name for name, layer in names.items() if fnmatchcase(layer, pattern)}
        if not found:
            raise UnknownNameError("layer with channels", pattern, set(names.values()))
        out |= found
    return out
