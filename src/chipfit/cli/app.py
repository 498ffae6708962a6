"""The command line. Heavy modules are imported by the commands that use them."""

from __future__ import annotations  # evaluated, `chipfit.Platform` would import torch

import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

import chipfit
from chipfit.cli import documents
from chipfit.cli.bench import bench
from chipfit.cli.images import MEAN, SIDE, STD
from chipfit.cli.output import OUTPUT, command, error_facts, print_document, print_error
from chipfit.errors import CaptureError, ChipfitError, ConfigError, DataError, Interrupted, PlanError, UnsupportedError
from chipfit.files import (
    MANIFEST,
    check_replaceable,
    check_writable,
    names_object,
    near_path,
    package_data,
    read_text,
    replace_folder,
)
from chipfit.platform.builtin import DEFAULT, built_in
from chipfit.registry import entries, entry, require_modules

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
_ABOUT_PLATFORMS = "Descriptions of chips: built-in ones and your own."
platforms = typer.Typer(name="platforms", help=_ABOUT_PLATFORMS, invoke_without_command=True)
app.add_typer(platforms, name="platforms")
app.add_typer(bench, name="bench")


def _platform(text: str) -> chipfit.Platform:
    """Load the platform that an option names."""
    _announce()
    from chipfit.import_by_name import load_target

    return load_target(text)


def _announce() -> None:
    """Print that PyTorch is imported, which takes seconds, before it is."""
    if "torch" not in sys.modules and not (OUTPUT.quiet or OUTPUT.json):
        typer.echo("chipfit: loading PyTorch", err=True)


def _present(error: type[ChipfitError], what: str, hint: str = "check the path") -> Any:
    """Return a check that an argument which can only be a path exists; it runs before anything heavy is imported."""

    def check(given: Any) -> Any:
        path, text = Path(given or ""), str(given or "")
        named = isinstance(given, Path) or (not names_object(text) and (path.suffix or os.sep in text))
        if text and named and not os.path.exists(text):
            raise error(f"{what} cannot be read: it does not exist", where=text, hint=near_path(path) or hint)
        return given

    return {"callback": check, "is_eager": True}


_MODEL = _present(CaptureError, "The model file")
_DATA = _present(DataError, "The data file")
#: shared option or argument -> its help
_HELP: dict[str, str] = package_data("chipfit.cli", "options.yaml")
Model = Annotated[str, Argument(help=_HELP["model"], **_MODEL)]
Calibration = Annotated[str, Option("--data", help=_HELP["calibration"], **_DATA)]
Data = Annotated[str, Option("--data", help=_HELP["data"], **_DATA)]
_PLATFORM: dict[str, Any] = {"parser": _platform, "metavar": "PLATFORM", "autocompletion": built_in}
_PLATFORM["help"] = _HELP["platform"]
Chip = Annotated[Any, Option("--platform", "-p", **_PLATFORM)]
ChipArgument = Annotated[Any, Argument(**_PLATFORM)]
Out = Annotated[Path, Option("--out", "-o", help=_HELP["out"])]
Requantize = Annotated[bool, Option("--requantize", help=_HELP["requantize"])]
Weights = Annotated[Path | None, Option("--weights", help=_HELP["weights"])]
_SIZE: dict[str, Any] = {"min": 1, "max": 1 << 14, "show_default": str(SIDE), "help": _HELP["input size"]}
InputSize = Annotated[int | None, Option("--input-size", **_SIZE)]
_SEED: dict[str, Any] = {"min": -(1 << 63), "max": (1 << 64) - 1, "help": _HELP["seed"]}
Seed = Annotated[int, Option("--seed", **_SEED)]
Mean = Annotated[str | None, Option("--mean", show_default=MEAN, help=_HELP["mean"])]
Std = Annotated[str | None, Option("--std", show_default=STD, help=_HELP["std"])]
_SAVED = _present(PlanError, "The saved result", _HELP["how to save"])
Saved = Annotated[Path, Argument(help=_HELP["saved"], **_SAVED)]
Device = Annotated[str | None, Option("--device", help=_HELP["device"])]
Rule = Annotated[str | None, Option("--rule", help=_HELP["rule"])]
WeightRule = Annotated[str | None, Option("--weight-rule", help=_HELP["weight rule"])]
KeepFloat = Annotated[list[str] | None, Option("--float", help=_HELP["float"])]
Bits = Annotated[list[str] | None, Option("--bits", help=_HELP["bits"])]
Config = Annotated[
    Path | None, Option("--config", help=_HELP["config"], **_present(ConfigError, "The file of --config"))
]
Format = Annotated[str | None, Option("--format", help=_HELP["format"])]
IoTypes = Annotated[str | None, Option("--io", help=_HELP["io"])]
KeepLayout = Annotated[bool, Option("--keep-layout", help=_HELP["keep layout"])]
Labels = Annotated[
    Path | None, Option("--labels", help=_HELP["labels"], **_present(ConfigError, "The file of --labels"))
]
Check = Annotated[bool | None, Option("--verify/--no-verify", help=_HELP["verify"])]
Runtime = Annotated[str | None, Option("--runtime", help=_HELP["runtime"])]
Deployed = Annotated[Path | None, Option("--file", help=_HELP["file"], **_present(ConfigError, "The deployed file"))]
ReportFile = Annotated[Path | None, Option("--report", help=_HELP["report"])]
Shape = Annotated[list[str] | None, Option("--input-shape", help=_HELP["shape"])]
_GENERATED_SHAPE = f"shape of generated data: {_HELP['shape']}"
GeneratedShape = Annotated[list[str] | None, Option("--input-shape", help=_GENERATED_SHAPE)]
Compared = Annotated[Path, Argument(help=_HELP["compared"], **_SAVED)]
_OUTPUT = "the output of `chipfit quantize`"
_CALIBRATION = 16  #: number of training batches used for calibration
#: exit status of an internal error (EX_SOFTWARE of sysexits.h), and of Ctrl-C (as in shells)
BUG_STATUS, INTERRUPTED_STATUS = 70, 130
#: `click.UsageError`, of which recent versions of typer have their own
_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]


@dataclass(frozen=True)
class ImageOptions:
    """The options that say how images of a folder become inputs."""

    input_size: InputSize = None
    mean: Mean = None
    std: Std = None

    def load(self, data: str, **facts: Any) -> Any:
        """Return the batches of --data; `facts` are those of the network, see `cli.inputs.inputs_of`."""
        from chipfit.cli.inputs import load_data

        return load_data(data, self.input_size, self.mean, self.std, **facts)


@dataclass(frozen=True)
class DecisionOptions:
    """The options that become arguments of `chipfit.quantize`."""

    rule: Rule = None
    weight_rule: WeightRule = None
    keep_float: KeepFloat = None
    bits: Bits = None
    limit: Annotated[list[str] | None, Option("--limit", help=_HELP["limit"])] = None
    rounding: Annotated[str | None, Option("--rounding", help="rounding of weights: gptq, or nearest")] = None
    sets: Annotated[list[str] | None, Option("--set", help="NAME=VALUE, any of chipfit.Settings (repeatable)")] = None
    config: Config = None
    seed: Annotated[int | None, Option("--seed", **_SEED)] = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `chipfit.quantize`."""
        from chipfit.cli.choices import arguments, read_choices
        from chipfit.cli.inputs import parse_limits

        own = {"rule": self.rule, "weight_rule": self.weight_rule, "rounding": self.rounding, "seed": self.seed}
        limits = parse_limits(self.limit) if self.limit else None
        return arguments(
            read_choices(self.config), self.sets or [], _overrides(self.keep_float, self.bits), limits, **own
        )


def _overrides(keep_float: list[str] | None, bits: list[str] | None) -> dict[str, Any]:
    """Return the overrides of --float and --bits."""
    from chipfit.cli.inputs import parse_bits

    return {**dict.fromkeys(keep_float or (), "float"), **parse_bits(bits or [])}


@dataclass(frozen=True)
class TrainingOptions:
    """The options of training."""

    method: Annotated[str, Option("--method", help="training algorithm (with options), or module:Class")] = "lsq"
    epochs: Annotated[int, Option("--epochs", min=1, max=1 << 20, help="passes over the data")] = 1
    rate: Annotated[float, Option("--rate", help="initial learning rate, with cosine decay to 0")] = 0.001
    batch_size: Annotated[int, Option("--batch-size", min=1, max=1 << 20, help="images per step")] = 32
    loop: Annotated[str | None, Option("--loop", help="your training loop, module:function(model, data)")] = None

    def algorithms(self) -> Any:
        """Return the `Training` of --method.

        Raises:
            ConfigError: the method or the learning rate is out of bounds.
        """
        from chipfit.cli.train import parse_method
        from chipfit.plan.training import Training

        if not 0 < self.rate < 1e38:  # steps are computed in float32
            raise ConfigError("Learning rate must be above 0 and below 1e38", got=self.rate)
        return Training.of(parse_method(self.method))

    def train(self, result: chipfit.Result, batches: Any, seed: int) -> None:
        """Train the model of a result with the user's loop, or as a classifier."""
        from chipfit.cli.train import train_classifier, train_with_loop

        if self.loop is not None:
            train_with_loop(result, self.loop, batches)
        else:
            train_classifier(result, batches, self.epochs, self.rate, self.batch_size, seed, _tell)


@dataclass(frozen=True)
class FileOptions:
    """The options of the model file."""

    wanted: Format = None
    io: IoTypes = None
    keep_layout: KeepLayout = False
    labels: Labels = None
    check: Check = None

    def writer(self, platform: chipfit.Platform, out: Path, model: str, data: str) -> OutputWriter:
        """Return the writer of a folder, after everything is refused that cannot be written.

        Raises:
            ConfigError: a type does not exist, or the file of labels cannot be read.
            UnsupportedError, UnknownNameError: see `_suffix`.
            RuntimeUnavailable: a library is missing.
        """
        from chipfit.export.io_spec import io_types

        (suffix, form), io = _suffix(platform, self.wanted), self.io
        options: dict[str, Any] = {"keep_layout": True} if self.keep_layout else {}
        if io is not None:
            options["io"] = io_types(tuple(io.split(",")) if "," in io else io)
        if self.labels is not None:
            options["labels"] = read_text(self.labels, ConfigError).splitlines()
        check_replaceable(out, _OUTPUT)
        check_writable(out)
        _check_installed(platform, suffix, form, model, data, self.check)
        return OutputWriter(out, suffix, {**options, "format": form}, self.check)


@dataclass(frozen=True)
class OutputWriter:
    """The folder of a result: plan, model file and report."""

    out: Path
    suffix: str
    options: dict[str, Any]  #: of `Result.export`
    check: bool | None  #: whether to verify; None: if the platform has a runtime

    def write(self, result: chipfit.Result, batches: Any, status: int = 0) -> NoReturn:
        """Write plan, model file and report, verify, and exit with `status`, or 1 if the runtime differs."""
        from chipfit.plan.saved import manifest

        file, page = self.out / f"model{self.suffix}", self.out / "report.html"
        with replace_folder(self.out, _OUTPUT) as new:  # all files, or none
            result.save(new / "plan")
            result.export(new / file.name, **self.options)
            result.report.save(new / page.name)
            (new / MANIFEST).write_text(manifest(dict.fromkeys(os.listdir(new))), encoding="utf-8")
        runtimes, found = _runtimes(result.platform, self.suffix), None
        if self.check or (self.check is None and runtimes):
            runtime = next(iter(runtimes), "onnxruntime")
            own = entry("runtime", runtime).declares.suffix == self.suffix and not self.options["format"]
            delivered = file if own else None
            found = result.verify(batches, batches=4, runtime=runtime, path=delivered)
            result.report.save(page)
            result.save(self.out / "plan")  # with a report that knows the verification
        files = {"model": file, "plan": self.out / "plan", "report": page}
        _show(result, files, found)
        raise typer.Exit(status or int(found is not None and found.verdict == "departs"))


def main() -> None:
    """Run the command line. Exit status 2 with a panel for an error of the user, 70 for a bug of chipfit."""
    for name in vars(OUTPUT):  # before an option is read: an error in one is printed as these demand
        setattr(OUTPUT, name, f"--{name}" in sys.argv[1:])
    try:
        try:
            _run()
        finally:
            sys.stdout.flush()  # raise BrokenPipeError here rather than at Python's exit
    except ChipfitError as e:
        _refuse(e)
        raise SystemExit(2) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED_STATUS) from None
    except MemoryError:
        hint = "use smaller batches, fewer samples, or another machine"
        _refuse(ChipfitError("Not enough memory for this model and data", hint=hint))
        raise SystemExit(2) from None
    except Exception:
        traceback.print_exc()
        what = "This is a bug of chipfit, not a mistake of yours"
        hint = "please report it with the lines above, this command, and what is needed to reproduce it"
        _panel(ChipfitError(what, got=f"chipfit {chipfit.__version__}, {' '.join(sys.argv)}", hint=hint), "Bug")
        raise SystemExit(BUG_STATUS) from None


def _run() -> None:
    """Run the command; with --json, a mistake in its options is raised as a ConfigError, to be printed as a document.

    Raises:
        ConfigError: an option or a command does not exist, or has a wrong value.
    """
    if not OUTPUT.json:
        return app()
    try:
        raise SystemExit(app(standalone_mode=False) or 0)
    except _USAGE_ERROR as e:
        raise ConfigError(e.format_message(), hint="--help lists commands and options") from None
    except typer.Abort:
        raise KeyboardInterrupt from None


def _refuse(e: ChipfitError) -> None:
    """Show an error of the user, as the options demand."""
    if OUTPUT.verbose:
        traceback.print_exc()
    if OUTPUT.json:
        print_error(e)
    else:
        _panel(e)


def _panel(e: ChipfitError, title: str = "") -> None:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for label, fact in e.facts.items():
        facts.add_row(label, Text(str(fact)))
    body = Group(Text(e.what.rstrip(".") + ".", style="bold"), facts)
    Console(stderr=True).print(Panel(body, title=title or type(e).__name__, title_align="left", border_style="red"))


def _echo(text: str) -> None:
    """Print text wrapped to the terminal with indented continuation lines; unwrapped without a terminal."""
    width = shutil.get_terminal_size((1 << 16, 0)).columns
    for line in text.splitlines():
        typer.echo(textwrap.fill(line, width, subsequent_indent="    ", break_on_hyphens=False))


def _print(document: Mapping[str, Any], text: str, page: Path | None = None) -> None:
    """Print what a command has found, as text or as a document, and the page on which it is shown too."""
    if OUTPUT.json:
        return print_document({**document, **({} if page is None else {"report": str(page)})})
    _echo(text)
    if page is not None:
        typer.echo(f"report  {page}")


def _tell(text: str) -> None:
    """Print progress, which is on the standard error if another program reads the output."""
    if OUTPUT.json:
        typer.echo(text, err=True)
    elif not OUTPUT.quiet:
        _echo(text)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"chipfit {chipfit.__version__}")
        raise typer.Exit


@app.callback()
def _chipfit(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="print the version")] = False,
) -> None:
    """Fit a trained neural network to a chip."""


def _load(saved: Path, device: str | None = None) -> chipfit.Result:
    """Load a saved result, in a folder of `chipfit quantize` the subfolder "plan", to run on a device.

    Raises:
        ConfigError: there is no such device, or the framework itself places its models.
    """
    _announce()
    from chipfit.frameworks import adapter_of

    result = chipfit.load(saved / "plan" if os.path.isdir(saved / "plan") else saved)
    if device is not None:
        result.graph.device = adapter_of(result.graph.framework).device_named(device)
    return result


def _suffix(platform: chipfit.Platform, wanted: str | None) -> tuple[str, str | None]:
    """Return the suffix of the platform's model file, or of the format of --format, and the name of a named format.

    Raises:
        UnknownNameError: no format has this suffix.
        UnsupportedError: the platform cannot use such a file.
    """
    from chipfit.export import declared_format
    from chipfit.platform.support import file_suffixes

    own_files = file_suffixes(platform)
    if wanted is None:
        return next(iter([*own_files, ".onnx"])), None
    name, _, end = wanted.removeprefix(".").partition(".")
    named = {e.name: e.declares.suffixes for e in entries("format").values() if e.declares.named}
    if name in named:
        suffix = f".{end}" if end else next((s for s in own_files if s in named[name]), named[name][0])
        if suffix not in named[name]:
            allowed = ", ".join(f"{name}{s}" for s in named[name])
            raise UnsupportedError(
                f"Format '{name}' cannot write this suffix", got=f"--format {wanted}", allowed=allowed
            )
        return suffix, name
    suffix = f".{wanted.removeprefix('.')}"
    declared_format(suffix)
    own = dict.fromkeys([*own_files, ".onnx", ".json"])  # the last two are input of other tools
    own |= {s: None for e in entries("format").values() for s in e.declares.suffixes if e.declares.wraps in own}
    if suffix not in own:
        got = f"--format {wanted}"
        allowed = ", ".join(s.removeprefix(".") for s in own)
        hint = "omit --format"
        raise UnsupportedError(f"'{platform.name}' cannot use a {suffix} file", got=got, allowed=allowed, hint=hint)
    return suffix, None


def _check_installed(
    platform: chipfit.Platform, suffix: str, form: str | None, model: str, data: str, check: bool | None
) -> None:
    """Raise a RuntimeUnavailable that names all missing libraries: of model, images, model file and runtime."""
    from chipfit.export import declared_format

    written = entry("format", form) if form else declared_format(suffix)
    runtimes = _runtimes(platform, suffix) or (["onnxruntime"] if check else [])
    needed = [written, *(entry("runtime", name) for name in runtimes[: check is not False])]
    needs = {e.name: [(library, e.declares.extra) for library in e.declares.libraries] for e in needed}
    if model.endswith((".keras", ".h5")):
        needs[model] = [("keras", "keras")]
    if os.path.isdir(data):
        needs[data] = [("PIL", "images")]
    require_modules(needs)


def _runtimes(platform: chipfit.Platform, suffix: str) -> list[str]:
    """Return the platform's runtimes that load a file of this suffix."""
    from chipfit.export import declared_format

    loads = {n: entry("runtime", n).declares.suffix for n in platform.runtimes}
    if suffix not in {s for e in entries("format").values() if not e.declares.named for s in e.declares.suffixes}:
        return []
    return [n for n in platform.runtimes if loads[n] in (suffix, declared_format(suffix).declares.wraps)]


@command(app)
def quantize(
    model: Model,
    data: Calibration,
    platform: Chip = DEFAULT,
    out: Out = Path("chipfit_out"),
    *,
    weights: Weights = None,
    requantize: Requantize = False,
    decisions: DecisionOptions,
    stream: Annotated[bool, Option("--stream", help=_HELP["stream"])] = False,
    files: FileOptions,
    images: ImageOptions,
    shape: GeneratedShape = None,
    device: Device = None,
) -> None:
    """Quantize a model for a platform; write model file, plan and report. Exit status 1 if the runtime differs."""
    from chipfit.cli.inputs import generated_data, load_model

    writer, chosen = files.writer(platform, out, model, data), decisions.arguments()
    network = load_model(model, weights, device, requantize=requantize)
    batches = generated_data(data, network, images.input_size or SIDE, chosen["seed"], shape)
    if batches is None:
        batches = _load_with_states(network, data, images)
    if stream:
        sequences = list(batches)
        step = chipfit.streaming(network, sequences[0])
        network, batches, chosen["states"] = step.model, step.calls(sequences), step.states
    try:
        result = chipfit.quantize(network, batches, platform, progress=not OUTPUT.quiet, **chosen)
    except Interrupted as e:
        typer.echo("interrupted: writing the results so far; press Ctrl-C again to stop this as well", err=True)
        replace(writer, check=False).write(e.result, batches, INTERRUPTED_STATUS)
    writer.write(result, batches)


def _load_with_states(network: Any, data: str, images: ImageOptions) -> Any:
    """Load batches for a network, with the states of one that computes a single step of a sequence."""
    from chipfit.calibration.data import add_states
    from chipfit.cli.inputs import inputs_of
    from chipfit.frameworks import adapter_of, framework_of

    batches = images.load(data, **inputs_of(network))
    return add_states(batches, adapter_of(framework_of(network)).steps(network))


@command(app)
def prune(
    model: Model,
    data: Data,
    limit: Annotated[list[str], Option("--limit", help="what may be left: bops=70%, weights=50% (repeatable)")],
    platform: Chip = DEFAULT,
    out: Annotated[Path | None, Option("--out", "-o", help="file; by default pruned.pt2 or pruned.keras")] = None,
    weights: Weights = None,
    keep: Annotated[list[str] | None, Option("--keep", help="layers that keep all channels (repeatable)")] = None,
    importance: Annotated[str, Option("--importance", help="importance: fisher, lfh or magnitude")] = "fisher",
    simd: Annotated[int | None, Option("--simd", help="channels removed at a time; by default a SIMD width")] = None,
    *,
    images: ImageOptions,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Remove channels of a model until it keeps the limits, and write the smaller model, to quantize it."""
    from chipfit.cli.inputs import inputs_of, load_model, parse_limits
    from chipfit.frameworks import facts_of, framework_of

    network = load_model(model, weights, device)
    framework = framework_of(network)
    batches, limits = images.load(data, **inputs_of(network)), parse_limits(limit)
    options: dict[str, Any] = {"importance": importance, "keep": keep or (), "simd": simd, "seed": seed}
    pruned = chipfit.prune(network, batches, platform, limits=limits, **options)
    file = pruned.save(out or Path(f"pruned{facts_of(framework).suffix}"))
    if OUTPUT.json:
        return print_document({"file": str(file), "layers": [asdict(x) for x in pruned.layers]})
    _echo(str(pruned))
    typer.echo(f"model   {file}")


@command(app)
def train(
    what: Annotated[str, Argument(help="folder that `quantize` wrote, or a model as for `quantize`")],
    data: Annotated[str, Option("--data", help=".npz with x and y (labels), or module:iterable of (input, label)")],
    platform: Annotated[Any, Option("--platform", "-p", **_PLATFORM)] = None,
    *,
    training: TrainingOptions,
    out: Out = Path("chipfit_trained"),
    weights: Weights = None,
    keep_float: KeepFloat = None,
    bits: Bits = None,
    files: FileOptions,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Train a quantized model on labelled data or with your own loop; write the same files as `quantize`."""
    from chipfit.cli.inputs import inputs_of, load_data, load_model

    algorithms, saved = training.algorithms(), None
    if os.path.isdir(what):
        _refuse_options({"platform": platform, "weights": weights, "float": keep_float, "bits": bits}, what)
        saved = _load(Path(what), device)
    target = saved.platform if saved is not None else platform or _platform(DEFAULT)
    writer = files.writer(target, out, what, data)
    if saved is not None:
        batches = load_data(data, **inputs_of(saved.graph))
        result = saved.trains(algorithms)
    else:
        network = load_model(what, weights, device)
        batches = load_data(data, **inputs_of(network))
        some = batches[:_CALIBRATION] if isinstance(batches, list) else batches
        options: dict[str, Any] = {"overrides": _overrides(keep_float, bits), "training": algorithms, "seed": seed}
        result = chipfit.quantize(network, some, target, progress=not OUTPUT.quiet, **options)
    training.train(result, batches, seed)
    writer.write(result.trained(), batches)


def _refuse_options(options: Mapping[str, Any], folder: str) -> None:
    """Raise a ConfigError that names an option that is given, though the folder holds a result."""
    for name, value in options.items():
        if value:
            hint = "omit it, or pass the model instead of the folder"
            raise ConfigError(f"--{name} does not apply to a saved result", got=folder, hint=hint)


def _show(result: chipfit.Result, files: dict[str, Path], found: Any) -> None:
    """Print the report of a result, and where its files are."""
    if OUTPUT.json:
        return print_document(documents.quantized(result, files, found))
    if not OUTPUT.quiet:
        result.report.show()
    if OUTPUT.verbose:
        _echo("\n".join(f"note    {note}" for note in result.report.notes))
    typer.echo("\n".join(f"{name:<8}{path}" for name, path in files.items()))


@command(app)
def verify(
    saved: Saved,
    data: Data,
    runtime: Runtime = None,
    file: Deployed = None,
    report: ReportFile = None,
    *,
    images: ImageOptions,
) -> None:
    """Run a saved result, or a quantized .tflite or .onnx file of any tool, on its runtime and compare all integers.

    Exit status 1 if file or runtime differ, 3 if a runtime differs for which exactness is not claimed.
    """
    from chipfit.cli.inputs import inputs_of, load_model
    from chipfit.report.report import check_suffix
    from chipfit.verify.file import is_file

    if report is not None:
        check_suffix(report)
    if is_file(saved):
        if report is not None or file is not None:
            raise typer.BadParameter("a file without a saved result has no report", param_hint="SAVED")
        batches = images.load(data, **inputs_of(load_model(str(saved), requantize=True)))
        found = chipfit.verify_file(saved, batches, runtime=runtime)
        raise typer.Exit(_show_comparison(found, str(found)))
    result = _load(saved)
    batches = images.load(data, **inputs_of(result.graph))
    found = result.verify(batches, runtime=runtime, path=file)
    page = None if report is None else result.report.save(report)
    raise typer.Exit(_show_comparison(found, found.summary(), page))


def _show_comparison(found: Any, text: str, page: Path | None = None) -> int:
    """Print what a verification found, and return the exit status."""
    _print(documents.compared(found), text, page)
    return {"departs": 1, "unpromised": 3}.get(found.verdict, 0)


@command(app, "time")
def time_(
    saved: Annotated[Path, Argument(help="folder that `quantize` or Result.save wrote", **_SAVED)],
    data: Data,
    runtime: Runtime = None,
    seconds: Annotated[float, Option("--seconds", min=0, max=3600, help="time to measure for")] = 2.0,
    *,
    images: ImageOptions,
) -> None:
    """Measure the float and the quantized file in turns on a runtime of this machine; show each operator's work."""
    result = _load(saved)
    batches = images.load(data, framework=result.graph.framework)
    found = result.time(batches, runtime=runtime, seconds=seconds)
    _print(found.to_dict(), str(found))


@command(app, "check-npu")
def check_npu(
    saved: Annotated[Path, Argument(help="a folder that `quantize` wrote, or a quantized .tflite file", **_SAVED)],
    accelerator: Annotated[str, Option("--accelerator", help="ethos-u55-32 to ethos-u85-2048")] = "ethos-u55-256",
) -> None:
    """Compile for an Ethos-U NPU with Vela; show which operators run on it, memory and estimated time."""
    from chipfit.verify.npu import compile_file

    found = compile_file(saved, accelerator) if saved.suffix == ".tflite" else _load(saved).npu(accelerator)
    _print(found.to_dict(), str(found))


@command(app)
def compare(
    first: Compared,
    second: Compared,
    data: Annotated[
        str | None, Option("--data", help="as for verify; measures the noise of every layer in both")
    ] = None,
    report: ReportFile = None,
    *,
    images: ImageOptions,
) -> None:
    """Show two quantized networks beside each other: formats, scales, noise of each layer, size and time."""
    from chipfit.cli.inputs import inputs_of
    from chipfit.report.report import check_suffix

    if report is not None:
        check_suffix(report)
    batches = None
    if data is not None:
        batches = images.load(data, **inputs_of(_load(first).graph))
    found = chipfit.compare(first, second, batches)
    _print(found.to_dict(), str(found), None if report is None else found.save(report))


@command(app)
def lint(
    model: Model, shape: Shape = None, platform: Chip = DEFAULT, weights: Weights = None, requantize: Requantize = False
) -> None:
    """Show where each operator runs on this platform and what is fused. Requires no data."""
    from chipfit.cli.inputs import example_of, load_model
    from chipfit.platform.support import features_with_other_results
    from chipfit.report.terminal import RUNS
    from chipfit.screen.breakable import Breakable

    network = load_model(model, weights, requantize=requantize)
    found = chipfit.lint(network, example_of(model, shape, network), platform)
    notes = [*found.notes, *(f"not modelled: {words}" for words in features_with_other_results(found.platform))]
    if OUTPUT.json:
        return print_document(documents.linted(found, notes))
    tails = {n.name: f"{n.op} '{n.display_name}'" for n in found.rows}
    table = Table("layer", "operator", "runs in", "one kernel with", "why float", show_edge=False, header_style="bold")
    for n in found.rows:
        runs = f"[yellow]{RUNS[n.exec]}[/]" if n.exec == "float" else RUNS[n.exec]
        into = tails[n.group] if n.group and n.group != n.name else ""
        table.add_row(Breakable(n.display_name), n.op, runs, Breakable(into), escape(n.why))
    console = Console()
    console.print(table)
    for note in notes:
        console.print(note, style="dim", markup=False)
    count = sum(n.exec != "float" for n in found.rows)
    console.print(f"{count} of {len(found.rows)} operators can run in integers on {found.platform.name}", markup=False)


@command(app)
def explain(
    saved: Saved,
    layer: Annotated[str | None, Argument(help="layer path, glob, operator, layer type; optional with --data")] = None,
    data: Annotated[str | None, Option("--data", help="as for quantize; ranks tensors by effect on accuracy")] = None,
    curve: Annotated[str | None, Option("--curve", help="show loss over size: weights, total or bops")] = None,
    device: Device = None,
    *,
    images: ImageOptions,
) -> None:
    """Show all decisions about a layer and their reasons; with data, the loss of each tensor at every bit width."""
    from chipfit.cli.inputs import inputs_of
    from chipfit.decide.overrides import match_layers
    from chipfit.verify.file import is_file, read_quantized

    if is_file(saved):
        quantized = read_quantized(saved)[0]
        plan, chosen = quantized.plan, None if layer is None else match_layers(quantized.graph, layer)
        if OUTPUT.json:
            return print_document(documents.explained_file(plan, chosen))
        if chosen is not None:
            return _show_decisions(plan, chosen)
        _echo(str(plan))
        for n in (n for n in plan.nodes.values() if n.exec == "float"):
            _echo(f"{n.op} '{n.display_name}' runs in float: {n.why}")
        return
    result, searched = _load(saved, device), None
    if layer is None and data is None:
        raise typer.BadParameter("name a layer, or pass --data", param_hint="LAYER")
    if data is not None:
        batches = images.load(data, **inputs_of(result.graph))
        searched = result.sensitivity(batches) if curve is None else result.pareto(batches, curve)
    nodes = [] if layer is None else match_layers(result.graph, layer)
    if OUTPUT.json:
        return print_document(documents.explained(result, nodes, searched))
    if searched is not None:
        _echo(str(searched))
    _show_decisions(result.plan, nodes)


def _show_decisions(plan: Any, nodes: Iterable[Any]) -> None:
    """Print what was decided about operators, and about the tensors that they read and write."""
    how = {"int": "runs in integers", "follow": "moves integers", "table": "is a table", "float": "runs in float"}
    for node in nodes:
        decided = plan.nodes[node.name]
        group = f", one kernel with '{decided.group}'" if decided.group and decided.group != node.name else ""
        why = f": {decided.why}" if decided.why else ""
        _echo(f"{node.op} '{node.display_name}': {how[decided.exec]}{group}{why}")
        for name in dict.fromkeys((*node.inputs, *node.outputs)):
            if name in plan.tensors:
                _echo(f"  {plan.tensors[name]}")


@platforms.callback()
def _platforms(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        platforms_list()


@command(platforms, "list")
def platforms_list() -> None:
    """List the built-in platforms."""
    from chipfit.platform.show import overview

    if OUTPUT.json:
        return print_document({"platforms": documents.platform_rows()})
    Console().print(overview())


@command(platforms, "show")
def platforms_show(platform: ChipArgument) -> None:
    """Show all facts about a platform with source and confidence."""
    from chipfit.platform.show import show

    if OUTPUT.json:
        return print_document({"platform": platform.model_dump(mode="json")})
    Console().print(show(platform))


@command(platforms, "export")
def platforms_export(
    platform: ChipArgument,
    file: Annotated[Path, Argument(help="output: .yaml for a platform file, .json for target platform capabilities")],
) -> None:
    """Convert a chip described in Python to a platform file, or a platform to capabilities to edit in Python."""
    from chipfit.platform.save import export_platform

    written = export_platform(platform, file)
    if OUTPUT.json:
        return print_document({"file": str(written)})
    typer.echo(f"{written} written")


@command(platforms, "check")
def platforms_check(file: Annotated[Path, Argument(help="YAML file")]) -> None:
    """Check a platform file and report its problems."""
    from chipfit.platform.load import check, load
    from chipfit.platform.support import unsupported_features

    problems = check(file)
    if OUTPUT.json:
        print_document({"file": str(file), "problems": [error_facts(e) for e in problems]})
        raise typer.Exit(2 if problems else 0)
    for problem in problems[:-1]:
        _panel(problem)
    if problems:
        raise problems[-1]  # shown by `main`
    p = load(file)
    _echo(f"{p.name}: {len(p.formats)} formats, {len(p.ops)} rules, {len(p.fuse)} fusions; no problems found")
    if not p.math.requant:
        _echo("math.requant is missing: chipfit claims no exactness for this platform")
    for words in unsupported_features(p):
        _echo(f"not modelled: {words}")


@command(app)
def demo(out: Annotated[Path, Option("--out", "-o", help="folder for the files")] = Path("demo_out")) -> None:
    """Train a small network on handwritten digits, then quantize, export, run and verify it."""
    from chipfit.cli.demo import run

    result, files = run(out, quiet=OUTPUT.quiet or OUTPUT.json)
    if OUTPUT.json:
        print_document(documents.quantized(result, files, result.verification))


@command(app)
def doctor() -> None:
    """Show versions, missing extras, the processor, and which runtimes can verify files on this machine."""
    from chipfit.cli.doctor import diagnose, table

    found = diagnose()
    if OUTPUT.json:
        return print_document(found)
    Console().print(table(found))
