"""Generate calibration data from the statistics of a network's batch norms."""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chipfit.calibration.data import NotedBatches, as_call, fixed_batch_of, split_label
from chipfit.calibration.progress import Progress
from chipfit.engine.process import preserve_random_state
from chipfit.engine.run import run
from chipfit.engine.torch_defaults import torch_defaults
from chipfit.engine.trees import batch_axes, call_with
from chipfit.engine.types import dtype_of
from chipfit.errors import ConfigError, DataError
from chipfit.frameworks import adapter_of, check, framework_of
from chipfit.generation.images import RANGES, Input, is_channels_last
from chipfit.generation.losses import Loss, untrained
from chipfit.generation.options import Generation
from chipfit.graph.edit import drop_dead
from chipfit.graph.ir import Graph
from chipfit.graph.linear import multiplications
from chipfit.graph.placement import inputs_on, on_cpu, placed
from chipfit.reading import read_model
from chipfit.registry import is_number

#: multiplications that the default number of steps may take, about a minute on two cores; and its bounds
WORK, FEWEST_STEPS, MOST_STEPS = 1e12, 20, 60
DEFAULT = Generation()
_HINT = "give one batch of any numbers: chipfit.generated(model, n, example=torch.zeros(2, 3, 224, 224))"


@preserve_random_state
@torch_defaults()
@torch.inference_mode(False)
@torch.enable_grad()
def generated(
    model: Any,
    n: int = 128,
    *,
    example: Any = None,
    options: Generation = DEFAULT,
    seed: int = 0,
    progress: bool = True,
) -> NotedBatches:
    """Make inputs for calibration from the statistics in the batch norms of a trained PyTorch or Keras 3 model.

    Noise is optimised until each channel of the input of each batch norm has the mean and the standard deviation that
    it had in training. This is mostly enough to choose ranges of activations, and to round weights to few bits. A plan
    made from such data has a warning, because only real data can measure the accuracy.

    Args:
        model: in any mode; it is copied, never changed.
        n: number of inputs (images).
        example: one batch of inputs, whose values do not matter; by default of the shape that the model declares.
        options: steps, batch, learning rate, and terms of the loss.
        seed: the same seed gives the same images on the same machine.
        progress: show percent and time left.

    Returns:
        A list of batches, as a framework's model takes them, on the CPU; `notes` says where they come from.

    Raises:
        DataError: the model has no batch norm, no known input shape, or inputs that are not floats; descent diverges.
        CaptureError: the model cannot be read.
        ConfigError: an option is invalid.

    Source: Cai et al. 2020 (ZeroQ), arXiv:2001.00281, eq. 3; Haroush et al. 2020, arXiv:1912.01274.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).eval()
        >>> options = chipfit.Generation(steps=2, batch=4)
        >>> made = chipfit.generated(net, 4, example=torch.rand(1, 3, 8, 8), options=options, progress=False)
        >>> [batch.shape for batch in made]
        [torch.Size([4, 3, 8, 8])]
    """
    if not (is_number(n) and int(n) == n and n > 0):
        raise ConfigError("Number of generated inputs must be a whole number above 0", got=repr(n))
    if not isinstance(options, Generation):
        got = type(options).__name__
        raise ConfigError("Option 'options' must be a chipfit.generation.options.Generation", got=got)
    graph = _captured(model, example)
    generator = _Generator(graph, options, int(n), int(seed), Progress(progress))
    inputs, distance = generator.run()
    batches = [_as_batch(graph, x) for x in inputs]
    split_label(batches[0], graph)  # raises if the graph does not accept its own data
    return NotedBatches(batches, [_note(generator, distance)])


def _captured(model: Any, example: Any) -> Graph:
    """Return the graph of a model.

    Raises:
        DataError: the shape of its inputs is unknown.
    """
    check(model)
    if example is None:
        example = adapter_of(framework_of(model)).example(model)
    if example is None:
        got = type(model).__name__
        raise DataError("Data cannot be generated: the shape of the inputs is unknown", got=got, hint=_HINT)
    return read_model(model, *as_call(example, model))


def _inputs(graph: Graph, options: Generation) -> list[Input]:
    """Return the shape, type and layout of the data to generate for each input of a graph.

    Raises:
        DataError: an input does not hold floats, or has its samples elsewhere than on axis 0.
    """
    out, axes = [], batch_axes(graph)
    for name, x in zip(graph.inputs, graph.example, strict=True):
        value = graph.values[name]
        if not graph.is_float(name):
            hint = "give real calibration data; numbers of words or classes have no gradient to follow"
            raise DataError(f"Input '{name}' cannot be generated", got=value.dtype, allowed="floats", hint=hint)
        if x.dim() == 0 or axes.get(name, 0) != 0:
            got = f"axis {axes.get(name)} of {list(x.shape)}"
            raise DataError(f"Input '{name}' has no samples on axis 0", got=got, hint="give real calibration data")
        last = is_channels_last(graph, name)
        out.append(Input(tuple(x.shape[1:]), dtype_of(value.dtype), last, options))
    return out


def _as_batch(graph: Graph, inputs: Sequence[Tensor]) -> Any:
    """Return inputs as the model is called with them: a tensor, a tuple, or a dict."""
    args, kwargs = call_with(graph, inputs)
    return kwargs if not args else args[0] if len(args) == 1 and not kwargs else args


def _note(generator: "_Generator", distance: float) -> str:
    """Return the warning of plans that are made with generated data."""
    targets = generator.loss.targets
    layers = f"{len(targets)} batch norm{'s' * (len(targets) > 1)}"
    stale = "; they have the statistics of an untrained network" if untrained(targets) else ""
    return (
        f"warning: the calibration data are {generator.count} inputs generated from {layers} "
        f"({generator.steps} steps), whose statistics they miss by {distance:.2g} of a deviation{stale}: measure the "
        "accuracy on real data before use"
    )


class _Generator:
    """One run of the generation: the graph up to the values that the loss reads, the inputs, and the optimization."""

    def __init__(self, graph: Graph, options: Generation, count: int, seed: int, progress: Progress) -> None:
        self.loss, self.options, self.progress = Loss(graph, options), options, progress
        self.inputs, self.outputs = _inputs(graph, options), list(graph.outputs) if options.output != "none" else []
        self.generator = torch.Generator().manual_seed(seed)
        fixed = fixed_batch_of(graph)
        size = fixed or min(options.batch, count)
        self.sizes = [size] * -(-count // size) if fixed else [min(size, count - k) for k in range(0, count, size)]
        self.count = sum(self.sizes)
        self.steps = options.steps or default_steps(graph, self.count)
        part = graph.copy()
        part.outputs = [*self.outputs, *self.loss.values]
        drop_dead(part)
        self.graph = placed(part)
        self.weights = {name: w.detach() for name, w in self.graph.weights.items()}

    def run(self) -> tuple[list[list[Tensor]], float]:
        """Return the inputs of each batch, and the root mean square distance from the learned statistics."""
        self._choose_ranges()
        noise = [[x.requires_grad_() for x in self._initial_noise(size)] for size in self.sizes]
        optimizers = [self.options.optimizer(batch, lr=self.options.rate) for batch in noise]
        schedules = [schedule_of(o, self.options.schedule, self.steps) for o in optimizers]
        with closing(self.progress.count("generate", self._order(), self.steps * len(noise))) as order:
            for k in order:
                total, _ = self._loss(noise[k], k, self.generator)
                optimizers[k].zero_grad()
                total.backward()
                optimizers[k].step()
                schedules[k](float(total.detach()))
        with torch.no_grad():
            squared = float(torch.stack([self._loss(batch, k, None)[1] for k, batch in enumerate(noise)]).mean())
            made = [on_cpu(self._images(batch, None)) for batch in noise]
        if not math.isfinite(squared) or not all(bool(x.isfinite().all()) for batch in made for x in batch):
            got, hint = f"rate {self.options.rate:g}", "a lower learning rate: Generation(rate=...)"
            raise DataError("Data generation has diverged", got=got, hint=hint)
        return made, math.sqrt(squared / 2)

    def _order(self) -> Iterator[int]:
        """Yield the numbers of batches, all of them in each step in a new order."""
        for _ in range(self.steps):
            yield from torch.randperm(len(self.sizes), generator=self.generator).tolist()

    def _initial_noise(self, size: int) -> list[Tensor]:
        return inputs_on(self.graph.device, [i.start(size, self.generator) for i in self.inputs])

    def _images(self, noise: Sequence[Tensor], generator: torch.Generator | None) -> list[Tensor]:
        return [make(x, generator) for make, x in zip(self.inputs, noise, strict=True)]

    def _loss(self, noise: Sequence[Tensor], batch: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return the loss, and the squared distance from the learned statistics, of the batch with this number."""
        env = run(self.graph, self._images(noise, generator), weights=self.weights)
        return self.loss(env, [env[o] for o in self.outputs], batch)

    def _choose_ranges(self) -> None:
        """Choose the range of the first noise: the one nearest to the statistics that the batch norms have learned."""
        noise, scored = self._initial_noise(self.sizes[0]), list[tuple[float, list[Input]]]()
        for offset, deviation in RANGES:
            self.inputs = [replace(i, offset=offset, deviation=deviation) for i in self.inputs]
            with torch.no_grad():
                scored.append((float(self._loss(noise, 0, None)[1]), self.inputs))
        self.inputs = min(scored, key=lambda pair: pair[0] if math.isfinite(pair[0]) else math.inf)[1]


def default_steps(graph: Graph, count: int) -> int:
    """Return the number of steps that `WORK` multiplications allow, between `FEWEST_STEPS` and `MOST_STEPS`."""
    once = 3 * count * sum(multiplications(graph, n) for n in graph.nodes)  # backward takes two of three
    return int(min(max(WORK / max(once, 1.0), FEWEST_STEPS), MOST_STEPS))


def schedule_of(optimizer: torch.optim.Optimizer, kind: str, steps: int) -> Any:
    """Return a function that is called with the loss after each step and sets the next learning rate."""
    if kind == "cosine":
        found: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return lambda _: found.step()
    if kind == "step":
        found = torch.optim.lr_scheduler.StepLR(optimizer, max(steps // 3, 1))
        return lambda _: found.step()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=steps // 50, min_lr=1e-4)
    if kind == "plateau":
        return plateau.step

    def restarts(loss: float) -> None:
        before = optimizer.param_groups[0]["lr"]
        plateau.step(loss)
        if optimizer.param_groups[0]["lr"] < before:  # improvement is measured afresh
            plateau.best = math.inf

    return restarts
