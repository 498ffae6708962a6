"""Deployment of a model that was trained in a hardware setting: its learned scales on a platform."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from chipfit import pipeline, steps
from chipfit.calibration.collect import TensorStats
from chipfit.calibration.data import as_call, first_batch, first_rows
from chipfit.calibration.progress import Progress
from chipfit.calibration.source import CalibrationData
from chipfit.decide.constraints import tie_groups
from chipfit.decide.statistics import RangeRules
from chipfit.decision import Decision, decide, scales_of
from chipfit.engine.process import preserve_random_state
from chipfit.engine.run import run
from chipfit.engine.torch_defaults import torch_defaults
from chipfit.engine.trees import flatten_call
from chipfit.errors import ChipfitError, ConfigError, PlanError, UnsupportedError
from chipfit.graph.ir import CPU, Graph, Node
from chipfit.mqbench.learned import TOLERANCE, Learned, Trained, check_on_grid
from chipfit.mqbench.prepare import PreparedModule, prepare_qat_fx
from chipfit.mqbench.quantizers import QuantizeBase, enable_calibration, enable_quantization, vanishing_note
from chipfit.mqbench.reconstruction import call_on
from chipfit.mqbench.settings import QConfig
from chipfit.plan.training import check_deployable
from chipfit.platform.load import load, names
from chipfit.platform.match import as_tuple, resolve_node
from chipfit.platform.schema import Platform
from chipfit.quantizers.stored import Stored
from chipfit.reading import read_model
from chipfit.request import Request
from chipfit.result import Result
from chipfit.settings import Settings

__all__ = ["deploy", "platforms_of"]

#: scales are given: nothing is searched, and no weight moves
_SETTINGS = Settings(repairs="off", rounding="off")
_RULES = RangeRules(rule="no_clipping", weight_rule="no_clipping")


def deploy(model: fx.GraphModule, data: Any, platform: Any) -> Result:
    """Return the result of a trained model on a platform, with the learned scales, for export and verification.

    Tensors that the platform quantizes and training did not are calibrated. Tensors that training quantized and the
    platform does not stay in float. `Result.plan.rewrites` lists both, the latter as warnings. A batch norm that
    training did not fold multiplies the scales of the weight before it, channel by channel.

    Args:
        model: the trained model that `prepare_qat_fx` returned.
        data: calibration batches, see `chipfit.quantize`.
        platform: a name, file or Platform.

    Raises:
        PlanError: the model does not come from `prepare_qat_fx`.
        UnsupportedError: the platform cannot represent the trained quantizers; the message says why.
    """
    if not isinstance(model, PreparedModule):
        raise PlanError("Model must come from prepare_qat_fx", got=type(model).__name__)
    return deployed(model, data, load(platform))


@preserve_random_state
@torch_defaults()
def deployed(model: PreparedModule, data: Any, target: Platform, strict: bool = True) -> Result:
    """Return the result of a trained model on a platform.

    Args:
        strict: refuse scales that the platform's rules do not permit; False: move them, with a warning for each.
    """
    where, trained = next(model.parameters()).device, Trained.of(model)
    call, data = first_batch(data, trained.plain)
    args, kwargs = call_on(CPU, first_rows(call))
    result = _Deployment.of(trained, args, kwargs).on(target, data, strict)
    if note := vanishing_note(model):
        result = replace(result, plan=replace(result.plan, rewrites=(*result.plan.rewrites, note)))
    result.graph.device = where
    return result


@dataclass(frozen=True)
class _Deployment:
    """A trained network, as it is and as a graph, and its tensors for a batch of inputs."""

    trained: Trained
    graph: Graph
    args: Any
    kwargs: Any
    results: list[tuple[torch.Tensor, Learned]]  #: tensors of the batch that were quantized in training

    @classmethod
    def of(cls, trained: Trained, args: Any, kwargs: Any) -> _Deployment:
        """Run the network for a batch.

        Raises:
            UnsupportedError: a quantizer does not round to equal steps.
        """
        graph = read_model(trained.plain, args, kwargs)
        with torch.no_grad():
            interpreter, results = fx.Interpreter(trained.plain, garbage_collect_values=False), []
            own = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))  # a model may change its dictionaries
            interpreter.run(*own[0], *own[1].values())
            values = {n.name: value for n, value in interpreter.env.items()}
            for node, quantizer in trained.results.items():
                x, learned = values[node], Learned.of(quantizer, is_weight=False)
                check_on_grid(node, learned, x, quantizer(x))
                results.append((x, learned))
        return cls(trained, graph, args, kwargs, results)

    def on(self, target: Platform, data: Any, strict: bool = True) -> Result:
        """Quantize the network for a platform, with the learned scales in place of calibrated ones."""
        plain = self.trained.plain
        source = CalibrationData(data, None)
        request = Request(model=plain, data=source, limits=None, training=None, progress=Progress(False))
        graph, rewrites = steps.rewrite(self.graph, target, _SETTINGS)
        d = Decision(platform=target, graph=graph, captured=self.graph, settings=_SETTINGS, rules=_RULES)
        d = replace(d, rewrites=tuple(rewrites))
        known = self._match_tensors(graph)
        d = replace(d, overrides=[(layer, "float") for layer in self.trained.floats], apart=self.trained.floats)
        d = replace(d, overrides=[*d.all_overrides, *_width_overrides(decide(d), known)])
        for stage in (pipeline.assign_formats, pipeline.collect_statistics, pipeline.choose_ranges):
            d = stage(request, d)
        given = self._stored(d, known, strict)
        plans = {name: d.tensors[name].with_(stored=s, origin="learned") for name, s in given.items()}
        ranges = {name: _range_of(s, d.stats[name]) for name, s in given.items() if name in d.stats}
        d = replace(d, stats={**d.stats, **ranges})
        d = replace(d, tensors=scales_of(d, d.graph, plans))
        moved = _moved(d, given, strict)
        result, specs = pipeline.make_plan(request, d)[0], d.assignment.tensors
        calibrated = [n for n in specs if n not in given and specs[n].role != "bias"]
        notes = [f"'{n}' was not quantized in training; it is calibrated" for n in calibrated]
        stored = {id(known[n]) for n in given if n in known}
        floats = [n for n in known if n not in specs and id(known[n]) not in stored]
        notes += [f"warning: '{n}' was quantized in training and stays in float" for n in floats]
        return replace(result, plan=replace(result.plan, rewrites=(*result.plan.rewrites, *notes, *moved)))

    def _match_tensors(self, graph: Graph) -> dict[str, Learned]:
        """Return values of a graph -> what was learned, matched by equality of the tensors for the batch."""
        inputs = flatten_call(json.loads(graph.in_spec), self.args, self.kwargs)
        with torch.no_grad():
            ours = {**dict(zip(graph.inputs, inputs)), **run(graph, inputs, keep=[o for n in graph for o in n.outputs])}
        out = {w: q for w, q in self.trained.weights.items() if w in graph.weights}
        for x, learned in self.results:
            for name, y in ours.items():
                alike = isinstance(y, torch.Tensor) and y.shape == x.shape and y.is_floating_point()
                if alike and float((x - y).abs().max()) <= TOLERANCE * float(x.abs().max()):
                    out[name] = learned
        for n in graph.nodes:  # a chip may quantize a value after it was moved
            if n.facts.moves and n.data in out and n.data not in graph.weights:
                out |= {o: out[n.data] for o in n.outputs if o not in out}
        return out

    def _stored(self, d: Decision, known: Mapping[str, Learned], strict: bool) -> dict[str, Stored]:
        """Return the tensors that the platform quantizes, with the learned numbers; tied ones have those of one.

        Raises:
            UnsupportedError: a format cannot represent them, or tensors that share a scale learned different ones.
        """
        name_of = d.platform.name
        specs, out = d.assignment.tensors, dict[str, Stored]()
        for name in (n for n in known if n in specs):
            shape = d.graph.weights[name].shape if name in d.graph.weights else torch.Size()
            out[name] = known[name].stored(specs[name], shape, name_of, strict)
            if (algorithm := known[name].algorithm) is not None:
                check_deployable(algorithm, d.tensors[name].with_(stored=out[name]))
            if known[name].is_weight and not torch.equal(d.graph.weights[name], self.trained.plain.get_parameter(name)):
                what = f"'{name}' was quantized in training without the batch norm that '{name_of}' folds into it"
                raise UnsupportedError(what, hint="train with another folding strategy: get_foldbn_config(1)")
        for group in tie_groups(d.assignment.constraints):
            first = next((t for t in group if t in out), None)
            for t in (t for t in group if first is not None and t in specs):
                mine = replace(known[first or t], is_weight=False).stored(specs[t], torch.Size(), name_of, strict)
                if not out.setdefault(t, mine).same_numbers(mine) and strict:
                    what = f"'{name_of}' requires one scale for '{first}' and '{t}', and training learned two"
                    got = f"{mine.scale.reshape(-1)[:4].tolist()} and {out[t].scale.reshape(-1)[:4].tolist()}"
                    raise UnsupportedError(what, got=got)
        return out


def _range_of(stored: Stored, seen: TensorStats) -> TensorStats:
    """Return statistics with the sign of the learned grid, from which a format with a choice derives its own."""
    low = min(seen.low, -float(stored.scale.max())) if stored.grid.signed else max(seen.low, 0.0)
    return replace(seen, low=low, high=max(seen.high, low))


def _moved(d: Decision, given: Mapping[str, Stored], strict: bool) -> list[str]:
    """Return one warning for each learned scale that the platform's rules have moved.

    Raises:
        UnsupportedError: there is one, and `strict`.
    """
    name_of = d.platform.name
    moved = [n for n, s in given.items() if (t := d.tensors[n].stored) is None or not t.same_numbers(s)]
    if moved and strict:
        raise UnsupportedError(f"The rules of '{name_of}' do not permit the learned scales", got=", ".join(moved))
    return [f"warning: the rules of '{name_of}' have moved the learned scale of '{name}'" for name in moved]


@dataclass(frozen=True)
class _Only:
    """A filter that chooses one node: overrides by filter may be without effect on it."""

    name: str

    def match(self, node: Node) -> bool:
        return node.name == self.name


def _width_overrides(found: Decision, known: Mapping[str, Learned]) -> list[tuple[Any, dict[str, int]]]:
    """Return overrides for the bit widths of training that the platform would choose differently.

    A weight may have more bits than in training if the platform does not offer fewer.
    """
    graph, specs, out = found.graph, found.assignment.tensors, list[tuple[Any, dict[str, int]]]()
    makers, readers = graph.producers(), graph.users()
    for name, learned in known.items():
        spec, bits = specs.get(name), learned.grid.bits
        if spec is None or spec.format.bits == bits:
            continue
        if learned.is_weight:
            nodes = [n for n in graph.nodes if n.operand("w") == name]
        else:
            maker = makers.get(name)
            floats = maker is None or found.assignment.nodes[maker.name].exec == "float"
            nodes = [*readers.get(name, ())] if floats or maker is None else [maker]
        for n in nodes:
            if (width := _width(found, n, learned, bits)) is not None:
                out.append((_Only(n.name), {"bits" if learned.is_weight else "activation_bits": width}))
    return out if _is_possible(found, out) else [one for one in out if _is_possible(found, [one])]


def _is_possible(found: Decision, overrides: Any) -> bool:
    """Return whether a platform accepts overrides."""
    try:
        decide(replace(found, overrides=[*found.all_overrides, *overrides]))
    except UnsupportedError:
        return False
    return True


def _width(found: Decision, node: Node, learned: Learned, bits: int) -> int | None:
    """Return the width that a platform offers for a node's weights or data and that holds the learned values."""
    formats = found.platform.formats
    offered: set[int] = set()
    for o in resolve_node(found.platform, found.graph, node).options:
        for name in as_tuple(o.w if learned.is_weight else o.in_) + (() if learned.is_weight else (o.out,)):
            if name in formats:
                offered |= {bits} if formats[name].free else {formats[name].bits}
    enough = sorted(b for b in offered if b == bits or (b > bits and learned.is_weight))
    return enough[0] if enough else None


# ---------------------------------------------------------------- platforms of a setting


@preserve_random_state
@torch_defaults()
def platforms_of(setting: QConfig | fx.GraphModule, example_inputs: Any = None) -> dict[str, str]:
    """Return, by built-in platform, why `deploy` refuses a model; "" for platforms to which it can be deployed.

    A platform whose default is not its last revision is listed with both ("ort_cpu", "ort_cpu@VNNI").

    Args:
        setting: a prepared model; or a qconfig, which stands for a small network of convolutions with batch norms and
            ReLUs, a sum, a pool and a linear layer.
        example_inputs: a batch of the model, with which it is calibrated if it was not trained yet.

    Raises:
        ConfigError: a model without example inputs.
    """
    if isinstance(setting, QConfig):
        setting, example_inputs = _trained_small(setting), _Small.inputs()
    if not isinstance(setting, PreparedModule) or example_inputs is None:
        allowed = "platforms_of(qconfig), or platforms_of(prepared_model, example_inputs)"
        raise ConfigError(
            "platforms_of needs a setting, or a model with inputs", got=type(setting).__name__, allowed=allowed
        )
    setting = copy.deepcopy(setting).eval().cpu()
    args, kwargs = call_on(CPU, as_call(example_inputs, setting))
    if not all(m.activation_post_process.batches for m in setting.modules() if isinstance(m, QuantizeBase)):
        enable_calibration(setting)
        setting(*args, **kwargs)
        enable_quantization(setting)
    deployment = _Deployment.of(Trained.of(setting), args, kwargs)
    last = [f"{name}@{p.arch[-1]}" for name in names() if (p := load(name)).arch_default is not None]
    return {name: _refusal(deployment, name) for name in (*names(), *last)}


def _trained_small(qconfig: QConfig) -> PreparedModule:
    """Return a small network after one step of training in a setting, so that no two scales are equal by chance."""
    model = prepare_qat_fx(_Small().train(), {"": qconfig})
    loss = model(*_Small.inputs()).square().sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
            if g is not None:
                p.sub_(g, alpha=1e-3)
    return model


def _refusal(deployment: _Deployment, name: str) -> str:
    try:
        deployment.on(load(name), [deployment.kwargs or deployment.args])
    except ChipfitError as e:
        return str(e)
    return ""


class _Small(nn.Module):
    """The network that stands for a setting."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a, self.b, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)
        self.bn1, self.bn2, self.relu, self.pool = (
            nn.BatchNorm2d(8),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn1(self.a(x)))
        x = self.relu(self.bn2(self.b(x)) + x)
        return self.fc(torch.flatten(self.pool(x), 1))  # type: ignore[no-any-return]  # a module's call

    @staticmethod
    def inputs() -> tuple[torch.Tensor, ...]:
        """Return a batch, [4, 3, 4, 4]."""
        return (torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(0)),)
