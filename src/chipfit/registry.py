"""One registry for all that is added by dropping in a file, and what each kind of addition declares about itself.

    @register("range", "mse")
    @register("pass", "equalize", stage="rewrite", after=("relu_bound",), setting=Setting("equalize", False, "..."))
    @register("format", "onnx", suffixes=(".onnx",), libraries=("onnx",), extra="onnx")

A file inside the package is imported when its name is asked for; one outside registers as soon as it is imported.
"""

import ast
import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

from chipfit.errors import ConfigError, RegistrationError, RuntimeUnavailable, UnknownNameError

T = TypeVar("T")


class Setting(NamedTuple):
    """The entry of `chipfit.Settings` that asks for a step."""

    name: str
    default: bool | float | None  #: a bool: it is on or off; else it is off with None, or a number of at least 0
    doc: str
    argument: str = ""  #: keyword under which the step takes that value
    choices: tuple[str, ...] = ()  #: the words that it takes instead of numbers
    numbers: bool = False  #: it takes numbers beside its words
    kind: str = ""  #: it takes names of this kind of addition, such as "gptq" or "gptq + learned(steps=100)"


#: the word with which a setting that plans may ask for is turned off
OFF = "off"
#: in which a step can be taken, in their order; see `Step`
STAGES = ("rewrite", "formats", "adapt", "results", "correct")


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a pass or a correction declares: when it is taken, and what it is given."""

    #: "rewrite": `(graph) -> (graph, notes)` before formats are decided. "formats": `(graph, assignment) ->
    #: (assignment, notes)` behind that decision. "adapt": `(graph, assignment, stats) -> (graph, stats, notes)` after
    #: calibration. "results": `(graph, assignment, stats) -> (node -> label, notes)` behind it.
    #: "correct": `(graph, plan) -> (graph, notes)` when the plan is made
    stage: str
    after: tuple[str, ...] = ()  #: steps of the same stage that go before
    setting: Setting | None = None  #: None: it is always taken
    options: tuple[Setting, ...] = ()  #: settings besides, which do not ask for it
    excludes: tuple[str, ...] = ()  #: steps of the same stage that cannot be taken with it
    decides: bool = False  #: "correct": it returns (graph, plan, notes), with scales of its own
    #: "correct": (bits of each weight, range rule of weights) -> what the setting is where it was left at None; None
    #: again where it is not needed
    asks: Callable[[Collection[int], str], Any] | None = None
    #: keywords that it wants besides: "platform", "listed" (whether it names the operator of a node), "stats",
    #: "batches" (the data again), "changed", "choose" (scales), "original" (the graph before every correction)
    needs: tuple[str, ...] = ()
    with_any: str = ""  #: taken only where some step of this stage is
    collects: Callable[..., Any] | None = None  #: (graph, needs) -> what calibration must collect for it
    again: bool = False  #: "adapt": histograms of what it changes have to be collected again
    #: "adapt": (settings, graph, assignment) -> what the setting is tried as where it was left at None; it is kept
    #: where held-out images say so. None again: it is not tried
    tries: Callable[..., Any] | None = None


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """What a file format declares."""

    suffixes: tuple[str, ...]
    libraries: tuple[str, ...] = ()  #: modules that writing needs
    extra: str = ""  #: the extra of chipfit that installs them
    wraps: str = ""  #: the suffix of the file that it holds in another form
    options: tuple[str, ...] = ()  #: of `Result.export` that it takes; others are refused
    #: reads back what a file stores: (path) -> tensor -> `export.FileTensor`; None for a format without a reader
    stored: Callable[[Path], Mapping[str, Any]] | None = None
    #: (graph) -> how many samples its runtime takes at once when nobody says how many; None for any
    part: Callable[[Any], int | None] = lambda graph: None


@dataclass(frozen=True, kw_only=True)
class DeviceRuntime:
    """What a runtime declares. Which platforms it proves is said by their files (`runtimes`)."""

    suffix: str  #: of the files that it loads
    libraries: tuple[str, ...] = ()
    extra: str = ""
    kernels: str | None = None  #: the simulator profile that it runs, where that is not the platform's own
    codes: str = "{}"  #: name of the tensor that holds a graph value's codes


@dataclass(frozen=True, kw_only=True)
class RoundingMethod:
    """The declaration of a method that rounds weights; its protocol is that of `rounding.method`."""

    #: settings that stand for fields of the method; `argument` is the field
    options: tuple[Setting, ...] = ()
    fits: bool = False  #: it fits scales, quantized values and biases to what each operator reads
    default_below: int = 0  #: it is taken where weights have fewer bits and the user named no method


class Kind(NamedTuple):
    """One kind of addition."""

    label: str  #: its name in messages
    home: str  #: package with one file for each; "{}" stands for the name of the entry
    declares: type | None = None
    methods: tuple[str, ...] = ("__call__",)  #: what an entry must have
    most: float = 1000  #: no number among its settings is larger


KINDS = {
    "range": Kind("range rule", "chipfit.ranges"),
    "statistic": Kind("statistic", "chipfit.rounding"),
    "pass": Kind("pass", "chipfit.passes", Step),
    "correction": Kind("correction", "chipfit.correction", Step),
    "rounding": Kind("rounding method", "chipfit.rounding.methods", RoundingMethod, most=1e6),
    "format": Kind("file format", "chipfit.export", FileFormat),
    "runtime": Kind("runtime", "chipfit.runtimes", DeviceRuntime, ("run", "executed")),
    "kernels": Kind("kernels", "chipfit.simulate", None, ("kernels", "clip", "quantize")),
    "modelled": Kind("form of modelled chips", "chipfit.facade.target_platform", None, ("read", "write")),
    "training": Kind("training algorithm", "chipfit.quantizers.algorithms", None, ("init", "numbers", "reals", "call")),
    "observer": Kind("observer", "chipfit.facade.quantize_fx", None, ("forward", "calculate_qparams")),
    "network": Kind("network", "chipfit.bench.networks"),
    "data": Kind("data set", "chipfit.bench.data"),
    "quantizer": Kind("quantizer", "chipfit.facade.quantize_fx", None, ("forward", "numbers")),
    "opaque": Kind("framework", "chipfit.frameworks.{}.opaque"),
}


class Entry(NamedTuple):
    """Something registered."""

    name: str
    thing: Any
    declares: Any  #: an instance of the kind's declaration


_ENTRIES: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}


def register(kind: str, name: str, **declaration: Any) -> Callable[[T], T]:
    """Class or function decorator: file the decorated object under `kind` and `name`.

    Args:
        declaration: the fields of the kind's declaration (`KINDS[kind].declares`).

    Raises:
        RegistrationError: the declaration is incomplete or says something unknown, the object cannot do what the kind
            must, or the name is taken.
        UnknownNameError: no such kind.
    """
    if kind not in KINDS:
        raise UnknownNameError("kind of addition", kind, KINDS)

    def enter(thing: T) -> T:
        taken = _ENTRIES[kind].get(name)
        if taken is not None and _origin(taken.thing) != _origin(thing):
            got = f"another one in {_origin(taken.thing)}"
            what = f"The {KINDS[kind].label} '{name}' exists already"
            raise RegistrationError(what, where=_origin(thing), got=got, hint="choose another name")
        _ENTRIES[kind][name] = Entry(name, thing, _declared(kind, name, thing, declaration))
        return thing

    return enter


def _declared(kind: str, name: str, thing: Any, declaration: dict[str, Any]) -> Any:
    label, _, declares, methods, _ = KINDS[kind]
    known = {f.name: f for f in fields(declares)} if declares is not None and is_dataclass(declares) else {}
    missing = [k for k, f in known.items() if k not in declaration and (f.default, f.default_factory) == (MISSING,) * 2]
    unknown = [k for k in declaration if k not in known]
    lacking = [m for m in methods if not hasattr(thing, m)]
    for what, names in (("does not declare", missing), ("declares the unknown", unknown), ("has no", lacking)):
        if names:
            allowed = ", ".join(known) if names is not lacking and known else None
            message = f"The {label} '{name}' {what} {', '.join(map(repr, names))}"
            raise RegistrationError(message, where=_origin(thing), allowed=allowed)
    return declares(**declaration) if declares is not None else None


def _origin(thing: Any) -> str:
    of = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{of.__module__}.{of.__qualname__}"


@functools.cache
def _import_all(kind: str) -> None:
    home = importlib.import_module(KINDS[kind].home)
    for module in pkgutil.iter_modules(home.__path__):
        importlib.import_module(f"{home.__name__}.{module.name}")


def _import(kind: str, name: str) -> None:
    """The file of that name, where there is one; else all of the kind: a file may hold several entries."""
    home = KINDS[kind].home
    module = home.format(name) if "{}" in home else f"{home}.{name}"
    if name.isidentifier() and _exists(module):
        importlib.import_module(module)
    if name not in _ENTRIES[kind] and "{}" not in home:
        _import_all(kind)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor does the package that it would be in
        return False


def entry(kind: str, name: str) -> Entry:
    """What is registered under `name`, with its declaration.

    Raises:
        UnknownNameError: listing near names.
    """
    name = str(name)  # which a user may give: what is no text is no name either
    if name not in _ENTRIES[kind]:
        _import(kind, name)
    if name not in _ENTRIES[kind]:
        raise UnknownNameError(KINDS[kind].label, name, _ENTRIES[kind])
    return _ENTRIES[kind][name]


def lookup(kind: str, name: str) -> Any:
    """The thing registered under `name`.

    Raises:
        UnknownNameError: listing near names.
    """
    return entry(kind, name).thing


def create(kind: str, text: str, aliases: Mapping[str, str] | None = None, **settings: Any) -> Any:
    """Return an instance of a registered dataclass, from its name, perhaps with settings as in "lp(p=3)".

    Args:
        aliases: other names -> registered ones.
        settings: fields of it, which replace those in the text.

    Raises:
        UnknownNameError: no such name, or no such setting of it.
        ConfigError: a setting of the wrong type or out of bounds.
    """
    label, most = KINDS[kind].label, KINDS[kind].most
    name, own = parse_call(text)
    make = lookup(kind, (aliases or {}).get(name, name))
    known = {f.name: f for f in fields(make)}
    for setting, value in (own | settings).items():
        if setting not in known:
            raise UnknownNameError(f"setting of {label} '{name}'", setting, known)
        annotation, default = known[setting].type, known[setting].default
        annotation = getattr(annotation, "__name__", str(annotation))
        is_default = type(value) is type(default) and value == default
        if not (is_default or _is_allowed(value, annotation, most)):
            allowed = {"bool": "True or False", "int": "an integer above 0", "str": "a text"}
            got, of = repr(value)[:120], allowed.get(annotation, "a number above 0")
            raise ConfigError(f"Setting '{setting}' of {label} '{name}' is not understood", got=got, allowed=of)
    return make(**own | settings)


def _is_allowed(value: Any, annotation: str, most: float) -> bool:
    """Return whether a value fits the type of a field, and a number its bounds."""
    if value is None:
        return annotation.endswith(" | None")
    annotation = annotation.removesuffix(" | None")
    if annotation in ("bool", "str"):
        return type(value).__name__ == annotation
    return is_number(value) and 0 < value <= most and (annotation != "int" or isinstance(value, int))


def parse_sum(text: str) -> list[str]:
    """Return the parts of a text that are joined by "+"; the whole text where it is no such sum."""
    try:
        out = list[str]()
        part: Any = ast.parse(text, mode="eval").body
        while isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add):
            part, out = part.left, [ast.unparse(part.right), *out]
        return [ast.unparse(part), *out]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):  # raised by `ast` for bad text
        return [text]


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """A name and the settings behind it, as in "lp(p=3)"; the whole text where it is none of that."""
    try:
        call = ast.parse(text, mode="eval").body
        return text.partition("(")[0], {k.arg or "": ast.literal_eval(k.value) for k in getattr(call, "keywords", ())}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):  # what `ast` says of bad text
        return text, {}


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that a double holds: no bool, no infinity, no integer beyond."""
    most = sys.float_info.max
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -most <= value <= most


def entries(kind: str) -> dict[str, Entry]:
    """Every entry of one kind by name, sorted."""
    _import_all(kind)
    return dict(sorted(_ENTRIES[kind].items()))


def registered(kind: str) -> dict[str, Any]:
    """Every registered thing of one kind by name, sorted."""
    return {name: e.thing for name, e in entries(kind).items()}


def require(found: Entry, error: type[RuntimeUnavailable] | type[Any] = RuntimeUnavailable) -> None:
    """Raise unless the libraries that an entry declares are installed.

    Raises:
        error: a library is missing; names the extra that installs it.
    """
    missing = [lib for lib in found.declares.libraries if importlib.util.find_spec(lib) is None]
    if missing:
        hint = f"pip install 'chipfit[{found.declares.extra}]'" if found.declares.extra else ""
        raise error(f"'{found.name}' needs {', '.join(missing)}, which is not installed", hint=hint)


def ordered(stage: str) -> list[Entry]:
    """Every step of a stage, each behind those that it names in `after`; by name where that leaves a choice.

    Raises:
        RegistrationError: a step goes after one that does not exist, or after itself.
    """
    entries("rounding")  # its methods may register corrections
    steps = {e.name: e for kind in ("pass", "correction") for e in entries(kind).values() if e.declares.stage == stage}
    for e in steps.values():
        for other in e.declares.after:
            if other not in steps:
                what = f"The step '{e.name}' goes after '{other}', which does not exist"
                raise RegistrationError(what, allowed=", ".join(steps))
    sorter = TopologicalSorter({name: steps[name].declares.after for name in steps})
    out: list[Entry] = []
    try:
        sorter.prepare()
    except CycleError as e:
        raise RegistrationError("Steps go after each other", got=" -> ".join(e.args[1])) from e
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        out += [steps[name] for name in ready]
        sorter.done(*ready)
    return out
