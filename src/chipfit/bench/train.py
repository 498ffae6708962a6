"""Training of an experiment, in one process or under torchrun, resumable after a crash."""

import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from chipfit.bench.config import Config, Rates
from chipfit.bench.data import Reader, Sets
from chipfit.errors import ConfigError, TrainingError, short_message
from chipfit.files import write_atomically
from chipfit.frameworks.torch.device import device_named
from chipfit.mqbench.folded_batch_norm import FoldedBatchNorm

Log = Callable[[str], None]
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class WorkerProcess:
    """This process among those that train together: rank, number of processes, device."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_leader(self) -> bool:
        """True if this process writes files and messages."""
        return self.rank == 0

    def broadcast(self, answer: bool) -> bool:
        """Return the answer of the leader in all processes."""
        decision = torch.tensor([float(answer)], device=self.device)
        if self.world > 1:
            dist.broadcast(decision, 0)
        return bool(decision)


@contextmanager
def worker_processes(device: str) -> Iterator[WorkerProcess]:
    """Join the process group that torchrun started, each process with a device; yield a single one without torchrun.

    Raises:
        ConfigError: there is no such device, or it is one device for several processes.
    """
    chosen = device_named(device)
    if not dist.is_torchelastic_launched():
        yield WorkerProcess(device=chosen)
        return
    dist.init_process_group(dist.get_default_backend_for_device(chosen))
    try:
        if chosen.type != "cpu":
            if ":" in device and dist.get_world_size() > 1:
                hint = f"device: {chosen.type}, of which each process takes one"
                raise ConfigError("Several processes cannot train on one device", got=device, hint=hint)
            chosen = torch.device(chosen.type, dist.get_node_local_rank(0) % torch.accelerator.device_count())
            torch.accelerator.set_device_index(chosen)
        yield WorkerProcess(dist.get_rank(), dist.get_world_size(), chosen)
    finally:
        dist.destroy_process_group()


def rate(step: int, rates: Rates) -> float:
    """Return the learning rate of a step, counted from 0.

    >>> rates = Rates(base_lr=1.0, warmup_lr=0.5, warmup_steps=2, max_iter=4)
    >>> [round(rate(k, rates), 6) for k in range(4)]
    [0.5, 0.75, 1.0, 0.5]
    """
    if step < rates.warmup_steps:
        return rates.warmup_lr + (rates.base_lr - rates.warmup_lr) * step / rates.warmup_steps
    done = (step - rates.warmup_steps) / (rates.max_iter - rates.warmup_steps)
    return rates.min_lr + (rates.base_lr - rates.min_lr) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def top1(model: Callable[[Tensor], Tensor], reader: Reader, worker: WorkerProcess) -> float:
    """Return the top-1 accuracy over the images of all processes [%]."""
    right = total = 0
    for x, y in reader.batches(0, shuffled=False):
        with torch.no_grad():
            right += int((model(x.to(worker.device)).argmax(1).cpu() == y).sum())
        total += len(y)
    both = torch.tensor([right, total], device=worker.device)
    if worker.world > 1:
        dist.all_reduce(both)
    right, total = both.tolist()
    return 100 * (right / total)


@dataclass
class Curves:
    """Loss and accuracy by step."""

    loss: list[tuple[int, float]] = field(default_factory=list)
    top1: list[tuple[int, float]] = field(default_factory=list)
    unreadable: int = 0  #: number of images that could not be read


#: called with the curves at every test; True stops training early
StopRule = Callable[[Curves], bool]


def train(
    model: nn.Module,
    config: Config,
    sets: Sets,
    worker: WorkerProcess,
    folder: Path,
    log: Log = print,
    should_stop: StopRule | None = None,
) -> tuple[nn.Module, Curves]:
    """Train a model; return it, or its moving average if the configuration enables that, and the curves.

    Resumes from the checkpoint in `folder`; on a CPU the numbers are those of an uninterrupted run.

    Args:
        should_stop: see `StopRule`.

    Raises:
        TrainingError: the loss is NaN or infinite.
        DataError: the data have no batch for every process, or cannot be read.
        ConfigError: the checkpoint is that of another experiment, or dist.sync is not supported.
    """
    assert config.lr_scheduler is not None  # for mypy: a configuration that trains has it
    rates, accumulate = config.lr_scheduler.kwargs, config.dist.accumulate
    readers = [Reader(s, config.data, config.seed, worker.rank, worker.world) for s in (sets.train, sets.test)]
    in_epoch = readers[0].steps() // accumulate
    if not in_epoch:
        got, need = len(sets.train), config.data.batch_size * worker.world * accumulate
        raise ConfigError("Training images do not fill one step", got=got, allowed=f"at least {need}")
    run = _Run(model, config, worker, folder)
    step, curves = run.resume(readers[0])
    if step:
        log(f"resumes at step {step}")
    batches = _batches_from(step, readers[0], in_epoch, accumulate)
    while step < rates.max_iter:
        loss = run.take_step(step, islice(batches, accumulate))
        step += 1
        if step % config.saver.print_freq == 0 or step == rates.max_iter:
            curves.loss.append((step, loss))
            log(f"step {step} of {rates.max_iter}: loss {loss:.4f}")
        if step % config.saver.val_freq == 0 or step == rates.max_iter:
            curves.top1.append((step, top1(run.result.eval(), readers[1], worker)))
            run.model.train()
            log(f"step {step}: top-1 {curves.top1[-1][1]:.2f} %")
            lost = {"unreadable": sorted(readers[0].lost())}
            if worker.is_leader:
                run.save(step, {"step": step, **vars(curves), **lost})
            if worker.broadcast(should_stop is not None and worker.is_leader and should_stop(curves)):
                log("stopped early: accuracy is below the median of the study")
                break
    curves.unreadable = len(readers[0].lost())
    return run.result.eval(), curves


class _Run:
    """A model in training, with its optimizer and its moving average."""

    def __init__(self, model: nn.Module, config: Config, worker: WorkerProcess, folder: Path) -> None:
        model.to(worker.device).train()
        self.config, self.device, self.folder = config, worker.device, folder
        self.model = _synced(model, worker) if config.dist.sync else model
        self.optimizer = _optimizer(self.model, config)
        update, averages = get_ema_multi_avg_fn(config.ema.kwargs.decay), config.ema.enable
        self.average = AveragedModel(self.model, multi_avg_fn=update, use_buffers=True) if averages else None
        self._modules = {k: m for k, m in (("model", self.model), ("average", self.average)) if m is not None}
        self._runs: Any = nn.parallel.DistributedDataParallel(self.model) if worker.world > 1 else self.model

    @property
    def result(self) -> nn.Module:
        """The moving average if there is one, else the model."""
        return self.model if self.average is None else self.average.module

    def resume(self, reader: Reader) -> tuple[int, Curves]:
        """Continue from the checkpoint, if there is one; return the number of steps before it and their curves."""
        place = self.folder / CHECKPOINT
        if not place.exists():
            return 0, Curves()
        facts = read_checkpoint(place, self._modules, self.optimizer)
        reader.unreadable.update(facts["unreadable"])
        return facts["step"], Curves(list(map(tuple, facts["loss"])), list(map(tuple, facts["top1"])))

    def take_step(self, step: int, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
        """Change the model by the gradients of some batches; return their mean loss.

        Raises:
            TrainingError: the loss is NaN or infinite.
        """
        config = self.config
        assert config.lr_scheduler is not None  # for mypy: a configuration that trains has it
        if config.freeze_step is not None and step >= config.freeze_step:
            _freeze_statistics(self.model)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(step, config.lr_scheduler.kwargs)
        self.optimizer.zero_grad(set_to_none=True)
        loss = _backward(self._runs, batches, config, self.device)
        if not math.isfinite(loss):
            hint = "lower lr_scheduler.kwargs.base_lr, or warm up for longer"
            raise TrainingError(f"The loss is {loss}", where=f"step {step}", hint=hint)
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        return loss

    def save(self, step: int, facts: Mapping[str, Any]) -> None:
        """Write the checkpoint to resume from, and one of this step alone if the configuration keeps them."""
        write_checkpoint(self.folder / CHECKPOINT, self._modules, self.optimizer, facts)
        if self.config.saver.save_many:
            write_checkpoint(self.folder / f"step-{step}.pt", self._modules, self.optimizer, {"step": step})


def _backward(runs: Any, batches: Iterator[tuple[Tensor, Tensor]], config: Config, device: torch.device) -> float:
    """Add the gradients of the batches of one step to those of a model; return the loss, the mean over them."""
    total = torch.zeros((), device=device)
    for batch in batches:
        x, y = (t.to(device) for t in batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dist.amp):
            out = runs(x)
        loss = F.cross_entropy(out.float(), y, label_smoothing=config.label_smooth) / config.dist.accumulate
        loss.backward()
        total += loss.detach()
    return float(total)  # waits for the device, once a step


def _batches_from(step: int, reader: Reader, in_epoch: int, accumulate: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one epoch after another, from a step on."""
    for epoch in count(step // in_epoch):
        done = step % in_epoch if epoch == step // in_epoch else 0
        batches = reader.batches(epoch, shuffled=True, first=done * accumulate)
        yield from islice(batches, (in_epoch - done) * accumulate)


def _optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return the optimizer of PyTorch; its first parameter group has weight decay."""
    rest, alone = list[nn.Parameter](), list[nn.Parameter]()
    for p in model.parameters():
        if p.requires_grad:
            (alone if config.optimizer.no_wd and p.dim() <= 1 else rest).append(p)
    groups = [{"params": rest}, *([{"params": alone, "weight_decay": 0.0}] if alone else [])]
    try:
        return getattr(torch.optim, config.optimizer.type)(groups, lr=0.0, **config.optimizer.kwargs)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as e:
        raise ConfigError(f"Invalid options of the optimizer: {e}", where="optimizer.kwargs") from e


def _freeze_statistics(model: nn.Module) -> None:
    for m in model.modules():
        if isinstance(m, FoldedBatchNorm) and m.strategy > 1:
            m.strategy = 1
        elif isinstance(m, _BatchNorm):
            m.eval()


def _synced(model: nn.Module, worker: WorkerProcess) -> nn.Module:
    """Return the model with batch norms synchronized over processes."""
    folded = [m for m in model.modules() if isinstance(m, FoldedBatchNorm) and m.bn is not None]
    if folded or (worker.world > 1 and worker.device.type == "cpu"):
        got = "batch norms that fold" if folded else "processors without GPU"
        raise ConfigError("dist.sync is not supported here", got=got, hint="dist: {sync: false}")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model) if worker.world > 1 else model


def write_checkpoint(path: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer, facts: Any) -> None:
    """Write everything that the next step depends on, atomically, as a file that runs no code when it is read.

    Args:
        modules: name -> module.
        facts: numbers, texts, lists and tables.

    Raises:
        ExportError: the file cannot be written.
    """
    states = {name: m.state_dict() for name, m in modules.items()}
    rest = {"optimizer": optimizer.state_dict()["state"], "random": torch.get_rng_state(), "facts": facts}
    content = io.BytesIO()
    torch.save({"modules": states, **rest}, content)
    write_atomically(path, content.getvalue())


def read_checkpoint(path: Path, modules: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore modules, optimizer and random numbers; return the facts that `write_checkpoint` stored.

    Raises:
        ConfigError: the file is damaged, or belongs to another experiment.
    """
    try:
        known = torch.load(path, map_location="cpu", weights_only=True)
        for name, module in modules.items():
            module.load_state_dict(known["modules"][name])
        optimizer.load_state_dict({**optimizer.state_dict(), "state": known["optimizer"]})
        torch.set_rng_state(known["random"])
        facts: dict[str, Any] = known["facts"]
    except (OSError, EOFError, UnpicklingError, ValueError, TypeError, KeyError, RuntimeError) as e:
        hint = "remove it to start the experiment anew"
        raise ConfigError(f"The checkpoint cannot be read: {short_message(e)}", where=str(path), hint=hint) from e
    return facts
