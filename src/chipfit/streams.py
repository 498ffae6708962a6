"""Networks that run one step at a time: their states are inputs, and their next states outputs."""

import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from chipfit.calibration.data import iterate
from chipfit.engine.run import run
from chipfit.engine.torch_defaults import torch_defaults
from chipfit.engine.trees import dump_call, dump_result, with_states
from chipfit.errors import DataError, PlanError
from chipfit.frameworks import capture, load_model, lower
from chipfit.graph.edit import taken_names, unique_name
from chipfit.graph.ir import Graph, Node
from chipfit.graph.placement import device_of, inputs_on, on_cpu, placed
from chipfit.graph.states import state_pairs
from chipfit.passes.one_step import one_step
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.quantizers.noise import decibels

Step = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Streaming:
    """A network of one step.

    `model` takes the inputs of one step, without their axis of steps, and then the states [N, size]; it returns the
    outputs of the network, and then the next states in a tuple of all of them.

    Examples:
        >>> import chipfit, torch
        >>> net, sequences = torch.nn.GRU(4, 8, batch_first=True).eval(), torch.rand(16, 12, 4)
        >>> step = chipfit.streaming(net, sequences)
        >>> states = [torch.zeros(16, 8) for _ in step.states]
        >>> [tuple(x.shape) for x in step.model(sequences[:, 0], *states)][-1]  # the next state
        (16, 8)
    """

    model: nn.Module
    states: tuple[str, ...]  #: names of the inputs that hold states, for `chipfit.quantize(..., states=)`
    graph: Graph

    @torch_defaults()
    def calls(self, sequences: Any) -> list[tuple[Tensor, ...]]:
        """Return the calls of the model that compute sequences step by step in float: calibration data, on its device.

        Args:
            sequences: batches of inputs [N, T, ...] of the network over sequences.
        """
        return calls(self, sequences)


def calls(network: Any, sequences: Any) -> list[tuple[Tensor, ...]]:
    """Return the calls of a network of one step that compute sequences step by step in float.

    Args:
        network: a `Streaming`, or a result of one step, as `Result.stream` returns it.
        sequences: batches of inputs [N, T, ...] of the network over sequences.
    """
    graph, step = network.graph, _in_float(network.graph)
    return [tuple(call) for batch in iterate(sequences) for call, _ in _walk(graph, batch, step, graph.device)]


def step_by_step(graph: Graph, data: Any) -> Any:
    """Return data with the states that a network of one step computes in float, from zeros; as given without states.

    Inputs with an axis more than the network's are sequences [N, T, ...]; others are the steps of one sequence.
    Batches that hold the states already stay as they are.

    Raises (when the data are read):
        DataError: inputs do not fit the network.
    """
    pairs = state_pairs(graph)
    if not pairs:
        return data
    names, step = [i for i in graph.inputs if i not in dict(pairs)], _in_float(graph)

    def read() -> Iterator[Any]:
        states: list[Tensor] | None = None
        for batch in iterate(data):
            given = [batch[n] for n in graph.inputs if n in batch] if isinstance(batch, Mapping) else batch
            given = [torch.as_tensor(x) for x in (given if isinstance(given, (list, tuple)) else (given,))]
            if len(given) > len(names):
                yield batch
            elif given[0].dim() > len(graph.shape(names[0])):
                yield from (tuple(call) for call, _ in _walk(graph, given, step, graph.device))
            else:
                steps = _walk(graph, [x[None] for x in given], step, graph.device, states)
                calls, results = zip(*steps, strict=True)
                by_name = dict(zip(graph.outputs, results[-1], strict=True))
                states = [by_name[o] for _, o in pairs]
                yield tuple(map(torch.cat, zip(*calls, strict=True)))

    return read


@torch_defaults()
def streaming(model: Any, example: Any) -> Streaming:
    """Turn a trained network over sequences into one that computes one step of them.

    LSTM, GRU and simple recurrent layers start from zeros and keep their states as inputs and outputs. Everything else
    must compute each step by itself.

    Args:
        model: a PyTorch model, or an ONNX file or model, with inputs [N, T, ...]; or a Keras model.
        example: a batch of its inputs.

    Raises:
        UnsupportedError: a layer runs backwards, has a given initial state, or joins several steps.
        CaptureError: see `chipfit.quantize`.

    Examples:
        >>> import chipfit, torch
        >>> net, sequences = torch.nn.GRU(4, 8, batch_first=True).eval(), torch.rand(16, 12, 4)
        >>> step = chipfit.streaming(net, sequences)
        >>> len(step.states)
        1
    """
    batch = example if isinstance(example, (tuple, list)) else (example,)
    captured = capture(load_model(model), tuple(torch.as_tensor(x) for x in batch))
    step = one_step(captured)
    graph, states = step.graph, step.states
    _rename_inputs(graph, states)
    names = tuple(name for name, _ in states)
    graph = _as_model(graph, names)
    graph.notes = []
    return Streaming(_with_names(lower(graph, Plan()), graph.inputs), names, graph)


def step_of(graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """Return the network of one step of a quantized network over sequences, with the same numbers, and its plan.

    Step by step it computes the integers that the network over sequences computes.

    Raises:
        UnsupportedError: a layer runs backwards, has a given initial state, or joins several steps.
        PlanError: a state and its next value differ in scale, because the plan was edited or is of an older version.
    """
    step = one_step(graph, {name for name, t in plan.tensors.items() if t.quantized})
    out, nodes = step.graph, {n.name: n for n in step.graph.nodes}
    read = {*out.values, *(i for n in out.nodes for i in n.inputs if i is not None)}
    tensors = {name: t for name, t in plan.tensors.items() if name in read}
    for name, source in step.stored.items():
        if source in plan.tensors:
            tensors[name] = replace(plan.tensors[source], name=name, layer="", op="")
    for name, following in step.states:
        before, after = (tensors[v].stored if v in tensors else None for v in (name, following))
        if (before is None) != (after is None) or (before and after and not before.same_numbers(after)):
            what = f"State '{name}' and its next value differ in scale, so that no step can follow another"
            raise PlanError(what, hint="quantize the network over sequences again")
    planned = {name: plan.nodes.get(name) or _plan_of_new(n, tensors) for name, n in nodes.items()}
    kept = replace(
        plan,
        tensors=tensors,
        nodes=planned,
        groups=tuple(g for g in plan.groups if nodes.keys() >= {*g}),
        float_edges=frozenset(e for e in plan.float_edges if e[1] in nodes),
        ties=tuple(g for group in plan.ties if len(g := tuple(t for t in group if t in tensors)) > 1)
        + tuple(pair for pair in step.states if pair[0] in tensors),
        limits=tuple(b for b in plan.limits if all(t in tensors for t, _ in b.terms)),
        fixed=tuple(t for t in plan.fixed if t in tensors),
        zeros=tuple(t for t in plan.zeros if t in tensors),
        sums=tuple(s for s in plan.sums if s[0] in tensors),
    )
    return _as_model(out, [name for name, _ in step.states]), kept


def _plan_of_new(n: Node, tensors: Mapping[str, TensorPlan]) -> NodePlan:
    """Return the plan of a node that only one step has: it moves numbers, in the format of its operand."""
    moves = n.data in tensors and tensors[n.data].quantized
    return NodePlan(name=n.name, op=n.op, layer=n.layer, exec="follow" if moves else "float")


def _as_model(graph: Graph, states: Sequence[str]) -> Graph:
    """Return the graph of a model that takes its inputs in their order, and returns a tuple of its outputs."""
    results = [{"output": k} for k in range(len(graph.outputs))]
    inputs = tuple(torch.zeros(0) for _ in graph.inputs)
    graph.in_spec = dump_call(inputs, {}, graph.inputs)
    graph.out_spec = dump_result(tuple(range(len(results))), results)
    graph.framework, graph.example = "torch", ()
    return with_states(graph, states)


def _with_names(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return the module with parameters of these names, by which readers call the inputs of a graph."""
    base: Any = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return base.forward(self, *args, **kwargs)

    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("self", *names)]
    setattr(forward, "__signature__", inspect.Signature(parameters))  # noqa: B010 -- functions declare no such field
    module.__class__ = type("StepModule", (base,), {"forward": forward})
    return module


def _rename_inputs(graph: Graph, states: list[tuple[str, str]]) -> None:
    """Give the inputs names that Python's parameters may have."""
    taken, names = taken_names(graph), dict[str, str]()
    for name in graph.inputs:
        wanted = re.sub(r"\W", "_", name)
        wanted = wanted if wanted.isidentifier() and not keyword.iskeyword(wanted) else f"x_{wanted}"
        names[name] = name if wanted == name else unique_name(wanted, taken)
        graph.values[names[name]] = replace(graph.values.pop(name), name=names[name])
    graph.nodes = [n.reading(names) for n in graph.nodes]
    graph.inputs = [names[i] for i in graph.inputs]
    graph.outputs = [names.get(o, o) for o in graph.outputs]
    states[:] = [(names[i], o) for i, o in states]


@dataclass(frozen=True)
class Drift:
    """The loss of a quantized network of one step, which adds up in its states, over the steps of a sequence.

    Examples:
        >>> import chipfit, torch
        >>> net, sequences = torch.nn.GRU(4, 8, batch_first=True).eval(), torch.rand(16, 12, 4)
        >>> result = chipfit.quantize(net, [sequences], "tflite_int8", progress=False)
        >>> min(chipfit.drift(result, [sequences]).states) > 20  # [dB]
        True
    """

    outputs: tuple[float, ...]  #: signal-to-noise ratio of the outputs of each step [dB]
    states: tuple[float, ...]  #: of the next states [dB]

    def __str__(self) -> str:
        places = sorted({0, len(self.outputs) // 4, len(self.outputs) // 2, len(self.outputs) - 1})
        rows = [f"{k + 1:>6} {self.outputs[k]:>9.1f} {self.states[k]:>9.1f}" for k in places]
        return "\n".join([f"{'step':>6} {'outputs':>9} {'states':>9}  [dB]", *rows])


@torch_defaults()
def drift(result: Any, sequences: Any) -> Drift:
    """Run a quantized network of one step and its float network over sequences, each on its own states.

    Args:
        result: of a network over sequences, or of one step (`states` of `chipfit.quantize`).
        sequences: batches of inputs [N, T, ...], as `Streaming.calls` takes them.

    Raises:
        DataError: inputs do not fit the network.
        UnsupportedError, PlanError: it is not a network of one step, and cannot become one; see `Result.stream`.

    Examples:
        >>> import chipfit, torch
        >>> net, sequences = torch.nn.GRU(4, 8, batch_first=True).eval(), torch.rand(16, 12, 4)
        >>> result = chipfit.quantize(net, [sequences], "tflite_int8", progress=False)
        >>> len(chipfit.drift(result, [sequences]).outputs)  # noise of each step [dB]
        12
    """
    result = result.stream()
    graph, model = result.graph, result.model
    signal, noise = dict[tuple[int, bool], float](), dict[tuple[int, bool], float]()
    first, step = len(graph.outputs) - len(state_pairs(graph)), _in_float(graph)  # an output may be a state too
    for batch in iterate(sequences):
        floats = _walk(graph, batch, step, graph.device)
        rounded = _walk(graph, batch, model.run_flat, device_of(model))
        for t, ((_, want), (_, got)) in enumerate(zip(floats, rounded, strict=True)):
            for k, (x, y) in enumerate(zip(on_cpu(want), on_cpu(got), strict=True)):
                key = t, k >= first
                signal[key] = signal.get(key, 0.0) + float(x.double().square().sum())
                noise[key] = noise.get(key, 0.0) + float((x.double() - y.double()).square().sum())
    steps = range(1 + max(t for t, _ in signal))
    return Drift(*(tuple(decibels(signal[t, k], noise[t, k]) for t in steps) for k in (False, True)))


def _in_float(graph: Graph) -> Step:
    """Return the function that runs one step of a graph in float, on the device of the graph."""
    graph = placed(graph)

    def step(call: list[Tensor]) -> list[Tensor]:
        values = run(graph, call)
        return [values[o] for o in graph.outputs]

    return step


def _walk(
    graph: Graph, batch: Any, step: Step, device: torch.device, states: list[Tensor] | None = None
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield inputs and outputs, on a device, of each step of a batch of sequences; states start from zeros by default.

    Raises:
        DataError: inputs are missing, have no axis of steps, or other sizes than those of the network.
    """
    pairs = state_pairs(graph)
    count = len(graph.inputs) - len(pairs)
    given = [torch.as_tensor(x) for x in (batch if isinstance(batch, (tuple, list)) else (batch,))]
    shapes = {i: graph.shape(i)[1:] for i in graph.inputs[:count]}
    fits = [
        x.dim() == len(s) + 2 and all(n in (None, m) for n, m in zip(s, x.shape[2:]))
        for s, x in zip(shapes.values(), given)
    ]
    if len(given) != count or not all(fits) or len({x.shape[:2] for x in given}) > 1 or not given[0].numel():
        allowed = ", ".join(f"'{i}' [{', '.join(['N', 'T', *map(str, s)])}]" for i, s in shapes.items())
        got = ", ".join(str(list(x.shape)) for x in given)
        raise DataError("Sequences do not fit the network", got=got, allowed=allowed)
    given = inputs_on(device, given)
    sizes = [[s or len(given[0]) for s in graph.shape(i)] for i, _ in pairs]
    states = states or [given[0].new_zeros(size) for size in sizes]
    for inputs in zip(*(x.unbind(1) for x in given), strict=True):
        call = [*inputs, *states]
        with torch.no_grad():  # not around `yield`, where the caller's code runs
            outputs = step(call)
        yield call, outputs
        by_name = dict(zip(graph.outputs, outputs, strict=True))
        states = [by_name[o] for _, o in pairs]
