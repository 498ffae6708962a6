"""Run one experiment, from its configuration to its outcome: train or load, quantize, deploy and compare."""

import copy
import hashlib
import importlib.metadata
import json
import platform as machine
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import nn

import chipfit
from chipfit.bench import data
from chipfit.bench.config import Config, Optimizer, Rates, Schedule
from chipfit.bench.data import Reader, Sets
from chipfit.bench.networks import model_entry
from chipfit.bench.train import CHECKPOINT, Curves, Log, StopRule, WorkerProcess, top1, train, worker_processes
from chipfit.errors import ChipfitError, ConfigError
from chipfit.files import lock_folder, write_atomically
from chipfit.frameworks import adapter_of, facts_of, framework_of
from chipfit.graph.placement import device_of
from chipfit.mqbench.deployment import deploy, platforms_of
from chipfit.mqbench.folded_batch_norm import FoldedBatchNorm
from chipfit.mqbench.prepare import prepare_qat_fx
from chipfit.mqbench.quantizers import enable_calibration, enable_quantization
from chipfit.platform.load import load as load_platform
from chipfit.registry import entry
from chipfit.result import Result
from chipfit.verify import default_runtime

#: number of test images whose integers are compared
COMPARED_IMAGES = 128
#: seed of float networks, independent of the experiments that start from them
FLOAT_SEED = 0


@dataclass
class Deployed:
    """The accuracy of the network on a runtime, and the comparison of its integers with the simulation."""

    platform: str
    top1: float | None = None  #: [%]
    runtime: str = ""
    integers: int = 0  #: number of integers compared with the simulation
    differing: int = 0
    exact: bool = False
    why: str = ""  #: reason if it was not deployed or not compared


@dataclass
class Outcome:
    """The stored outcome of an experiment."""

    key: str
    name: str
    config: dict[str, Any]
    setting: str = ""  #: hardware setting, or platform
    float_top1: float = 0.0  #: [%]
    top1: float = 0.0  #: of the simulation [%]
    size: int = 0  #: size of the quantized weights [byte]
    tested: int = 0  #: number of test images
    deployed: list[Deployed] = field(default_factory=list)
    curves: Curves = field(default_factory=Curves)
    notes: list[str] = field(default_factory=list)
    data: str = ""  #: hash of the images
    code: str = ""  #: hash of chipfit and of the user's modules
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""  #: device of training and tests, "cuda:0"; with several processes that of the first
    hardware: str = ""
    stopped: int = 0  #: step at which training stopped early; 0: it did not
    seconds: float = 0.0  #: wall time of the last call
    cpu_seconds: float = 0.0
    memory: int | None = 0  #: greatest resident size [byte]; None on Windows

    @property
    def record(self) -> dict[str, Any]:
        """The outcome as JSON data."""
        return asdict(self)


def remove_checkpoint(config: Config, home: Path) -> None:
    """Remove the checkpoint of an experiment whose outcome is stored, so that the next run starts anew."""
    (home / "runs" / config.key / CHECKPOINT).unlink(missing_ok=True)


class Busy(ChipfitError):
    """Another process runs the experiment."""


def peak_memory() -> int | None:
    """Return the greatest resident size of this process [byte]; None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def run(config: Config, home: Path, log: Log = print, should_stop: StopRule | None = None) -> Outcome | None:
    """Run an experiment, or resume an interrupted one; return None in processes that are not the leader.

    Args:
        home: folder for float networks and checkpoints.

    Raises:
        Busy: another process runs it.
        ChipfitError: the experiment fails.
    """
    begun, cpu = time.perf_counter(), time.process_time()
    folder = home / "runs" / config.key
    with worker_processes(config.device) as worker:
        with lock_folder(folder, wait=False) if worker.is_leader else nullcontext(True) as alone:
            if not alone:
                raise Busy("Another process runs this experiment", where=str(folder), hint="wait for it")
            out = _run(config, home, worker, log if worker.is_leader else lambda text: None, should_stop)
        if not worker.is_leader:
            return None
    out.seconds, out.cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu
    out.memory = peak_memory()
    return out


def _run(config: Config, home: Path, worker: WorkerProcess, log: Log, should_stop: StopRule | None) -> Outcome:
    setting = config.setting_name or (config.ptq.platform if config.ptq else "")
    out = Outcome(config.key, config.name, config.resolved, setting, versions=versions())
    out.notes = config.notes
    for note in config.notes:
        log(f"note: {note}")
    sets = data.load(config.data)
    out.data = f"{sets.train.digest()}-{sets.test.digest()}"
    tests = Reader(sets.test, config.data, config.seed, worker.rank, worker.world)
    network = pretrained(config, sets, worker, home, log)
    if framework_of(network) != "torch":  # the framework itself moves the images
        worker = replace(worker, device=torch.device("cpu"))
    out.device, out.hardware = str(worker.device), f"{worker.world} x {_processor(worker.device)}"
    torch.manual_seed(config.seed)
    out.code, out.tested = source_hash(config), len(sets.test)
    out.float_top1 = top1(predictor(network), tests, worker)
    unreadable = {"training": 0, "test": len(tests.lost())}
    log(f"float: top-1 {out.float_top1:.2f} %")
    if config.qparams is not None:
        model = calibrated_copy(config, network, sets)
        model, out.curves = train(model, config, sets, worker, home / "runs" / config.key, log, should_stop)
        _record_training(out, config, model, lambda: top1(model, tests, worker))
    if worker.is_leader:  # one process does the rest
        tests = Reader(sets.test, config.data, config.seed)
        if config.qparams is None:
            _quantize(out, config, network, sets, tests, WorkerProcess(device=worker.device))
        else:
            out.deployed = list(_deploy_trained(config, model.cpu(), sets, tests))
    log(f"quantized: top-1 {out.top1:.2f} %")
    unreadable["training"] = out.curves.unreadable
    out.notes += [f"{count} {subset} images could not be read" for subset, count in unreadable.items() if count]
    return out


def _record_training(out: Outcome, config: Config, model: nn.Module, accuracy: Callable[[], float]) -> None:
    """Record accuracy and size of a trained model, and whether training stopped early."""
    assert config.lr_scheduler is not None  # for mypy: a configuration that trains has it
    last, out.top1 = out.curves.top1[-1] if out.curves.top1 else (0, accuracy())
    if last < (whole := config.lr_scheduler.kwargs.max_iter):
        out.stopped = last
        out.notes = [*out.notes, f"stopped early, at step {last} of {whole}"]
    layers: list[Any] = [m for m in model.modules() if isinstance(m, FoldedBatchNorm)]
    out.size = sum(m.layer.weight.numel() * m.weight_quantizer.bitwidth // 8 for m in layers)


def _quantize(out: Outcome, config: Config, network: Any, sets: Sets, tests: Reader, worker: WorkerProcess) -> None:
    """Quantize a network without training; record accuracy, size and what the device computes."""
    assert config.ptq is not None  # for mypy
    images, out.curves.unreadable = _calibration_images(config, sets)
    data_of = [in_layout_of(x, framework_of(network)) for x in images]
    result = chipfit.quantize(network, data_of, **config.ptq.options, seed=config.seed, progress=False)
    out.top1, out.size = top1(predictor(result.model), tests, worker), _weight_bytes(result)
    out.notes = [*out.notes, *result.plan.rewrites]
    out.deployed = list(run_on_device(result, tests))


def _processor(device: torch.device) -> str:
    """Return the name of a device's processor."""
    if device.type == "cpu":
        return machine.processor() or machine.machine()
    named = getattr(torch.get_device_module(device), "get_device_name", None)  # MPS has none
    return str(named(device)) if named is not None else device.type


def _weight_bytes(result: Result) -> int:
    """Return the size of the quantized weights [byte]."""
    weights = ((t.name, t.stored) for t in result.plan.tensors.values() if t.role == "weight")
    return sum(result.graph.weights[name].numel() * s.grid.bits // 8 for name, s in weights if s is not None)


def predictor(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from images [N, C, H, W] to logits [N, classes], for any framework."""
    framework = framework_of(model)
    return lambda x: adapter_of(framework).run(model, in_layout_of(x, framework))


def in_layout_of(x: torch.Tensor, framework: str) -> torch.Tensor:
    """Return images [N, C, H, W] in the layout of a framework: [N, H, W, C] if channels are last."""
    return x.permute(0, 2, 3, 1) if facts_of(framework).channels_last else x


def pretrained(config: Config, sets: Sets, worker: WorkerProcess, home: Path, log: Log) -> Any:
    """Return the float network, with weights from a file, or trained once for all experiments that start from it."""
    pretrain = config.saver.pretrain
    kwargs = {"classes": sets.classes, **config.model.kwargs} if ":" not in config.model.type else config.model.kwargs
    model = config.model.model_copy(update={"kwargs": kwargs})
    torch.manual_seed(FLOAT_SEED)
    network: Any = model_entry(model, pretrained=pretrain.epochs is None, path=pretrain.path)
    is_torch = framework_of(network) == "torch"
    if not is_torch and (config.qparams is not None or pretrain.epochs is not None):
        got, hint = type(network).__name__, "ptq in the place of qparams, and no saver.pretrain.epochs"
        raise ConfigError("Training requires a PyTorch network", where=config.model.type, got=got, hint=hint)
    if is_torch:
        network.to(worker.device)
    elif config.device != "auto":
        adapter_of(framework_of(network)).device_named(config.device)  # raises
    if pretrain.epochs is not None:
        network.load_state_dict(load_file(_trained_weights(config, network, sets, worker, home, log)))
    return network.eval() if is_torch else network


def _trained_weights(
    config: Config, network: nn.Module, sets: Sets, worker: WorkerProcess, home: Path, log: Log
) -> Path:
    """Return the file with the weights of the trained float network; train it first if the file does not exist."""
    pretrain = config.saver.pretrain
    assert pretrain.epochs is not None  # for mypy
    steps = pretrain.epochs * (len(sets.train) // (config.data.batch_size * worker.world))
    rates = Rates(base_lr=pretrain.lr, warmup_lr=pretrain.lr / 10, warmup_steps=steps // 10, max_iter=max(steps, 1))
    saver = config.saver.model_copy(update={"val_freq": max(steps // 4, 1)})
    sgd = Optimizer(kwargs={"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4})
    own = {"lr_scheduler": Schedule(kwargs=rates), "optimizer": sgd, "seed": FLOAT_SEED, "saver": saver}
    plain = config.model_copy(update={**own, "freeze_step": None})
    relevant = {k: plain.resolved[k] for k in "model data lr_scheduler optimizer saver label_smooth ema".split()}
    name = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]
    file = home / "float" / f"{name}.safetensors"
    if not worker.broadcast(file.exists()):
        log(f"training the float network: {steps} steps")
        with lock_folder(home / "float" / name, wait=True) if worker.is_leader else nullcontext():
            if not worker.broadcast(file.exists()):
                network, _ = train(network, plain, sets, worker, home / "float" / name, log)
                if worker.is_leader:
                    write_atomically(file, save({k: v.contiguous() for k, v in network.state_dict().items()}))
                worker.broadcast(True)  # wait until the file exists
    return file


def _calibration_images(config: Config, sets: Sets) -> tuple[list[torch.Tensor], int]:
    """Return training images without random transforms, and the number of images that could not be read."""
    images = copy.copy(sets.train)
    if hasattr(images, "transforms"):
        images.transforms = "ONECROP"
    reader = Reader(images, config.data, config.seed)
    wanted = -(-config.data.calibration // config.data.batch_size)
    batches = [x for x, _ in islice(reader.batches(0, shuffled=True), wanted)]
    return batches, len(reader.unreadable)


def calibrated_copy(config: Config, network: nn.Module, sets: Sets) -> nn.Module:
    """Return the network with the quantizers of its hardware setting, calibrated, on the device of the network."""
    device = device_of(network)
    model = prepare_qat_fx(network, {"": config.setting()}).eval()
    enable_calibration(model)
    with torch.no_grad():
        for x in _calibration_images(config, sets)[0]:
            model(x.to(device))
    enable_quantization(model)
    return model


def _deploy_trained(config: Config, model: Any, sets: Sets, tests: Reader) -> Iterator[Deployed]:
    """Yield the results of the trained model on every platform that supports it and has a runtime here."""
    names = config.deploy
    if names is None:
        names = tuple(n for n, why in platforms_of(config.setting()).items() if not why and load_platform(n).runtimes)
    for name in names:
        try:
            result = deploy(model, _calibration_images(config, sets)[0], name)
        except ChipfitError as e:
            yield Deployed(name, why=str(e))
            continue
        yield from run_on_device(result, tests)


def run_on_device(result: Result, tests: Reader) -> Iterator[Deployed]:
    """Yield the accuracy of a result on each runtime of its platform, and the comparison of integers."""
    framework = result.graph.framework
    for name in result.platform.runtimes or (default_runtime(result.platform),):
        out = Deployed(result.platform.name, runtime=name)
        try:
            images = [in_layout_of(x, framework) for x in _first_images(tests, COMPARED_IMAGES)]
            found = result.verify(images, runtime=name, end_to_end_samples=None)
            out.exact, out.integers, out.differing = found.exact, found.integers, found.differing
            with TemporaryDirectory() as folder:
                runtime = entry("runtime", name)
                device = runtime.thing(result.export(Path(folder, f"model{runtime.declares.suffix}")))

            def logits(x: torch.Tensor) -> torch.Tensor:
                return torch.from_numpy(next(iter(device.run([in_layout_of(x, framework).numpy()]).values())))  # noqa: B023

            out.top1 = top1(logits, tests, WorkerProcess())
        except ChipfitError as e:
            out.why = str(e)
        yield out


def _first_images(reader: Reader, count: int) -> Iterator[torch.Tensor]:
    for x, _ in reader.batches(0, shuffled=False):
        yield x[:count]
        count -= len(x)
        if count <= 0:
            return


def source_hash(config: Config) -> str:
    """Return a hash of chipfit's source and of modules that the configuration names."""
    home = Path(chipfit.__file__).parent
    files = sorted(p for p in home.rglob("*") if p.suffix in (".py", ".yaml"))
    named = [config.model.type, config.data.type]
    named += [config.qparams.w_method, config.qparams.a_method] if config.qparams is not None else []
    modules = [sys.modules.get(name.partition(":")[0]) for name in named if ":" in name]
    files += [Path(m.__file__) for m in modules if m is not None and m.__file__ is not None]
    return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()[:16]


@cache
def versions() -> dict[str, str]:
    """Return the versions of software that results may depend on."""
    names = ("chipfit", "torch", "numpy", "onnxruntime", "ai-edge-litert", "openvino", "keras", "timm", "transformers")
    out = {"python": machine.python_version()}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            out[name] = importlib.metadata.version(name)
    return out
