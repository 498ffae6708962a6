"""The registry of everything that can be added as one file, and the declarations that each kind of addition makes.

    @register("range", "mse")
    @register("pass", "equalize", stage="rewrite", after=("relu_bound",), setting=Setting("equalize", False, "..."))
    @register("format", "onnx", suffixes=(".onnx",), libraries=("onnx",), extra="onnx")

A file inside the package is imported when its name is looked up; a file outside registers when the user imports it.
"""

import ast
import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

from chipfit.errors import ConfigError, RegistrationError, RuntimeUnavailable, check_known

T = TypeVar("T")


class Setting(NamedTuple):
    """An entry of `chipfit.Settings`: it enables a step, or is one of its parameters."""

    name: str
    default: bool | float | str | None  #: bool: on or off; a word of `choices`; None (off) or a number of at least 0
    doc: str
    argument: str = ""  #: keyword argument of the step that receives the value
    choices: tuple[str | bool, ...] = ()  #: words that are allowed instead of numbers
    numbers: bool = False  #: numbers are allowed beside the words
    kind: str = ""  #: names of this kind of addition are allowed, such as "gptq" or "gptq + learned(steps=100)"


def option(setting: str, default: bool | float | str | None, doc: str, choices: tuple[str, ...] = ()) -> Any:
    """Declare a field of a registered dataclass that `chipfit.Settings` has under another name."""
    return field(default=default, metadata={"setting": Setting(setting, default, doc, choices=choices)})


class Repair(NamedTuple):
    """A value of a setting that may repair a network."""

    value: Any
    #: (graph, assignment) -> whether it can change anything; None: only a trial can tell
    applies: Callable[[Any, Any], bool] | None = None


#: value that turns off a setting whose default depends on the plan
OFF = "off"
#: stages in which steps run, in this order; see `Step`
STAGES = ("rewrite", "formats", "adapt", "results", "correct")
#: stage -> keyword arguments that its steps may need: "listed" (whether the platform lists the operator of a node),
#: "in_integers" (whether it computes a node in integers), "integer_operators" (those that it may), "batches" (the data
#: again), "changed" (nodes with changed weights), "choose" (scales), "original" (uncorrected graph)
CONTEXT = {
    **dict.fromkeys(STAGES, ("platform",)),
    "rewrite": ("platform", "listed", "in_integers", "integer_operators"),
    "correct": ("stats", "batches", "changed", "choose", "original", "settings"),
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """The declaration of a pass or a correction: when it runs and which arguments it needs."""

    #: "rewrite": `(graph) -> (graph, notes)` before formats are decided. "formats": `(graph, assignment) ->
    #: (assignment, notes)` after that decision. "adapt": `(graph, assignment, stats) -> (graph, stats, notes)` after
    #: calibration. "results": `(graph, assignment, stats) -> (node -> label, notes)` after "adapt". "correct":
    #: `(graph, plan) -> (graph, notes)` after the plan is made
    stage: str
    after: tuple[str, ...] = ()  #: steps of the same stage that run before it
    setting: Setting | None = None  #: setting that enables it; None: it always runs
    options: tuple[Setting, ...] = ()  #: more settings, which are parameters and do not enable it
    excludes: tuple[str, ...] = ()  #: steps of the same stage that cannot be combined with it
    chooses_scales: bool = False  #: "correct": it returns (graph, plan, notes), and chooses scales itself
    #: "correct": (bits of each weight, range rule of weights) -> value of the setting if the user left it at None; None
    #: if the step is not needed
    default_value: Callable[[Collection[int], str], Any] | None = None
    needs: tuple[str, ...] = ()  #: further keyword arguments, see `CONTEXT`
    if_any_in: str = ""  #: it runs only if some step of this stage is enabled
    collects: Callable[..., Any] | None = None  #: (graph, needs) -> needs, with what calibration must collect for it
    recalibrates: bool = False  #: "adapt": histograms of the tensors that it changes are collected again
    #: "adapt": (settings, graph, assignment) -> value of the setting to try if the user left it at None; it stays if
    #: held-out images lose less with it. None: nothing is tried
    trial_value: Callable[..., Any] | None = None
    #: what is tried if the user left the setting open and the outputs lose more than the bits explain; it stays if
    #: held-out samples lose less with it. None: it is not tried
    repair: Repair | None = None

    def __post_init__(self) -> None:
        for name, chosen, allowed in (
            ("stage", (self.stage,), STAGES),
            ("needs", self.needs, CONTEXT.get(self.stage, ())),
        ):
            if unknown := [c for c in chosen if c not in allowed]:
                raise RegistrationError(
                    f"'{name}' of a step is invalid", got=repr(unknown[0]), allowed=", ".join(allowed)
                )


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """The declaration of a file format."""

    suffixes: tuple[str, ...]
    #: it is chosen by its name (`format=`), not by a suffix, which it may share; runtimes of platforms do not load it
    named: bool = False
    libraries: tuple[str, ...] = ()  #: modules that the writer needs
    extra: str = ""  #: the extra of chipfit that installs them
    wraps: str = ""  #: suffix of the format that a file contains in another form
    options: tuple[str, ...] = ()  #: options of `Result.export` that it supports; others are refused
    #: (path) -> tensor -> `export.FileTensor`, as a file stores it; None for a format without a reader
    stored: Callable[[Path], Mapping[str, Any]] | None = None
    #: (graph, plan) -> number of samples that the runtime takes at once; None for any number
    batch_size: Callable[[Any, Any], int | None] = lambda graph, plan: None


@dataclass(frozen=True, kw_only=True)
class DeviceRuntime:
    """The declaration of a runtime. Platform files list the runtimes that prove them (`runtimes`)."""

    suffix: str  #: suffix of the files that it loads
    libraries: tuple[str, ...] = ()
    extra: str = ""
    kernels: str | None = None  #: simulator profile of the runtime's kernels if it is not the platform's own
    codes: str = "{}"  #: pattern of the name that a tensor of quantized values has in the file, "{}_q": value x is x_q
    #: operator -> largest difference that is promised of its integers from those of `kernels`, given its operands
    #: [codes]; "*": others, but for inputs and pass-through operators, of which none differs. None: no operator differs
    within: Mapping[str, int] | None = None
    arena: bool = False  #: all its memory is one block, whose size its `arena` measures


@dataclass(frozen=True, kw_only=True)
class RoundingMethod:
    """The declaration of a method that rounds weights; its protocol is that of `rounding.method`."""

    fits: bool = False  #: it fits scales, quantized values and biases to the inputs of each operator
    default_below: int = 0  #: it is the default for weights with fewer bits
    evens_channels: bool = False  #: rewrites that even out the ranges of channels are tried with it


class Kind(NamedTuple):
    """A kind of addition."""

    label: str  #: its name in messages
    package: str  #: package with one file for each entry; "{}" stands for the entry's name
    declares: type | None = None  #: dataclass of the declaration
    methods: tuple[str, ...] = ("__call__",)  #: methods that an entry must have
    largest_number: float = 1000  #: largest number that a setting of an entry may have


KINDS = {
    "range": Kind("range rule", "chipfit.ranges"),
    "statistic": Kind("statistic", "chipfit.rounding"),
    "pass": Kind("pass", "chipfit.passes", Step),
    "correction": Kind("correction", "chipfit.correction", Step),
    "rounding": Kind("rounding method", "chipfit.rounding.methods", RoundingMethod, largest_number=1e6),
    "format": Kind("file format", "chipfit.export", FileFormat),
    "runtime": Kind("runtime", "chipfit.runtimes", DeviceRuntime, ("run", "executed")),
    "kernels": Kind("kernels", "chipfit.simulate", None, ("kernels", "clip", "quantize")),
    "modelled": Kind("form of modelled chips", "chipfit.mct.target_platform", None, ("read", "write")),
    "training": Kind("training algorithm", "chipfit.quantizers.algorithms", None, ("init", "numbers", "reals", "call")),
    "observer": Kind("observer", "chipfit.mqbench", None, ("forward", "calculate_qparams")),
    "network": Kind("network", "chipfit.bench.networks"),
    "data": Kind("data set", "chipfit.bench.data"),
    "quantizer": Kind("quantizer", "chipfit.mqbench", None, ("forward", "numbers")),
    "framework": Kind("framework", "chipfit.frameworks.{}.adapter", None, ("facts", "is_model", "capture", "run")),
}


class Entry(NamedTuple):
    """A registered object with its declaration."""

    name: str
    thing: Any
    declares: Any  #: an instance of the kind's declaration


#: kind -> name -> entry, of all modules that were imported so far
ENTRIES: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}


def register(kind: str, name: str, **declaration: Any) -> Callable[[T], T]:
    """Return a decorator that registers a class or function under `kind` and `name`.

    Args:
        declaration: fields of the kind's declaration (`KINDS[kind].declares`).

    Raises:
        RegistrationError: the declaration is incomplete or has unknown fields, the object lacks a method that the kind
            requires, or its name, another name, a suffix or a setting of it is taken or is not a word.
        UnknownNameError: the kind does not exist.
    """
    check_known("kind of addition", kind, KINDS)

    def enter(thing: T) -> T:
        made = Entry(name, thing, _declaration(KINDS[kind], name, thing, declaration))
        if not origin_of(thing).startswith("chipfit."):  # entries of the package are imported on demand
            _check_is_free(kind, made)
        existing = ENTRIES[kind].get(name)
        if existing is not None and origin_of(existing.thing) != origin_of(thing):
            raise _taken(f"{KINDS[kind].label} '{name}'", thing, f"another one in {origin_of(existing.thing)}")
        ENTRIES[kind][name] = made
        return thing

    return enter


def _taken(what: str, thing: Any, got: str) -> RegistrationError:
    return RegistrationError(f"The {what} exists already", where=origin_of(thing), got=got, hint="choose another name")


def _check_is_free(kind: str, made: Entry) -> None:
    """Check that the names of a new entry are words that no entry of the package has, which is imported for it."""
    label, name, thing = KINDS[kind].label, made.name, made.thing
    if not (isinstance(name, str) and name.isidentifier() and name != OFF):
        what, allowed = f"The name of a {label} must be a word", "letters, digits and _"
        raise RegistrationError(what, where=origin_of(thing), got=repr(name)[:80], allowed=allowed)
    if name in (aliases := aliases_of(kind)):
        raise _taken(f"{label} '{name}'", thing, f"another name of '{aliases[name]}'")
    if "{}" in KINDS[kind].package:
        _import(kind, name)
        return
    steps = [k for k in KINDS if KINDS[k].declares is Step] if KINDS[kind].declares is Step else [kind]
    others = [e for k in steps for e in entries(k).values() if origin_of(e.thing) != origin_of(thing)]
    for e in others:
        if e.name == name:
            raise _taken(f"{label} '{name}'", thing, f"another one in {origin_of(e.thing)}")
        for text, names in _names_declared(made.declares).items():
            if common := names & _names_declared(e.declares)[text]:
                raise _taken(f"{text} '{min(common)}' of the {label} '{name}'", thing, f"one of '{e.name}'")


def _names_declared(declared: Any) -> dict[str, set[str]]:
    """Return the suffixes or settings that a declaration claims."""
    if isinstance(declared, FileFormat):
        return {"suffix": set() if declared.named else set(declared.suffixes)}
    if isinstance(declared, Step):
        return {"setting": {s.name for s in (declared.setting, *declared.options) if s is not None}}
    return {}


def aliases_of(kind: str) -> Mapping[str, str]:
    """Return other names of registered entries, which the package of a kind declares as `ALIASES`."""
    package = KINDS[kind].package
    return {} if "{}" in package else getattr(importlib.import_module(package), "ALIASES", {})


def _declaration(kind: Kind, name: str, thing: Any, given: dict[str, Any]) -> Any:
    """Return the declaration of an entry as an instance of its kind's dataclass; None if the kind has none."""
    known = {f.name: f for f in fields(kind.declares)} if kind.declares and is_dataclass(kind.declares) else {}
    missing = [k for k, f in known.items() if k not in given and (f.default, f.default_factory) == (MISSING,) * 2]
    unknown = [k for k in given if k not in known]
    lacking = [m for m in kind.methods if not hasattr(thing, m)]
    for what, names in (("does not declare", missing), ("declares the unknown", unknown), ("has no", lacking)):
        if names:
            allowed = ", ".join(known) if names is not lacking and known else None
            message = f"The {kind.label} '{name}' {what} {', '.join(map(repr, names))}"
            raise RegistrationError(message, where=origin_of(thing), allowed=allowed)
    return kind.declares(**given) if kind.declares is not None else None


def origin_of(thing: Any) -> str:
    """Return the module and name of a registered object or of its class."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    of = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{of.__module__}.{of.__qualname__}"


@functools.cache
def _import_all(kind: str) -> None:
    package = importlib.import_module(KINDS[kind].package)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def _import(kind: str, name: str) -> None:
    """Import the module of that name if it exists; else all modules of the kind, as one may hold several entries."""
    package = KINDS[kind].package
    module = package.format(name) if "{}" in package else f"{package}.{name}"
    if name.isidentifier() and _exists(module):
        importlib.import_module(module)
    if name not in ENTRIES[kind] and "{}" not in package:
        _import_all(kind)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package does not exist either
        return False


def entry(kind: str, name: str) -> Entry:
    """Return the object registered under `name` with its declaration.

    Raises:
        UnknownNameError: the name is not registered; the message lists similar names.
    """
    name = str(name)  # a user may give any type
    if name not in ENTRIES[kind]:
        _import(kind, name)
    check_known(KINDS[kind].label, name, ENTRIES[kind])
    return ENTRIES[kind][name]


def lookup(kind: str, name: str) -> Any:
    """Return the object registered under `name`; raises as `entry`."""
    return entry(kind, name).thing


def create(kind: str, text: str, **settings: Any) -> Any:
    """Return an instance of a registered dataclass.

    Args:
        text: its name or another name of it, with or without settings, as in "lp(p=3)".
        settings: fields of the dataclass, which override those in the text.

    Raises:
        UnknownNameError: the name or a setting does not exist.
        ConfigError: a setting has the wrong type or is out of bounds.
    """
    label, most = KINDS[kind].label, KINDS[kind].largest_number
    name, own = parse_call(text)
    make = lookup(kind, aliases_of(kind).get(name, name))
    known = {f.name: f for f in fields(make)}
    for setting, value in (own | settings).items():
        check_known(f"setting of {label} '{name}'", setting, known)
        annotation, default = known[setting].type, known[setting].default
        annotation = getattr(annotation, "__name__", str(annotation))
        is_default = type(value) is type(default) and value == default
        if not (is_default or _is_allowed(value, annotation, most)):
            allowed = {"bool": "True or False", "int": "an integer above 0", "str": "a text"}
            got, of = repr(value)[:120], allowed.get(annotation, "a number above 0")
            raise ConfigError(f"Value of setting '{setting}' of {label} '{name}' is not allowed", got=got, allowed=of)
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
    """Return the parts of a text that are joined by "+"; the whole text if it is not such a sum."""
    try:
        out = list[str]()
        part: Any = ast.parse(text, mode="eval").body
        while isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add):
            part, out = part.left, [ast.unparse(part.right), *out]
        return [ast.unparse(part), *out]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):  # raised by `ast` for bad text
        return [text]


def entries_in(kind: str, text: str | None) -> list[Entry]:
    """Return the entries that a text such as "gptq + learned(steps=100)" names; none for None and "off"."""
    return [entry(kind, parse_call(part)[0]) for part in parse_sum(text)] if text not in (None, OFF) else []


def options_of(e: Entry) -> dict[str, Setting]:
    """Return the fields of an entry that `chipfit.Settings` has as well; see `option`."""
    return {f.name: f.metadata["setting"] for f in fields(e.thing) if "setting" in f.metadata}


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Split a text such as "lp(p=3)" into name and settings; return other text whole, without settings."""
    if text.isidentifier():
        return text, {}
    try:
        call = ast.parse(text, mode="eval").body
        return text.partition("(")[0], {k.arg or "": ast.literal_eval(k.value) for k in getattr(call, "keywords", ())}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):  # raised by `ast` for bad text
        return text, {}


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number that fits into a double, and not a bool."""
    most = sys.float_info.max
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -most <= value <= most


def entries(kind: str) -> dict[str, Entry]:
    """Return all entries of a kind, sorted by name."""
    _import_all(kind)
    return dict(sorted(ENTRIES[kind].items()))


def registered(kind: str) -> dict[str, Any]:
    """Return all registered objects of a kind, sorted by name."""
    return {name: e.thing for name, e in entries(kind).items()}


def require_libraries(found: Entry, error: type[RuntimeUnavailable] | type[Any] = RuntimeUnavailable) -> None:
    """Raise `error` if a library that an entry declares is not installed; the hint names the extra that installs it."""
    require_modules({found.name: [(lib, found.declares.extra) for lib in found.declares.libraries]}, error)


def require_modules(
    needs: Mapping[str, Sequence[tuple[str, str]]], error: type[RuntimeUnavailable] | type[Any] = RuntimeUnavailable
) -> None:
    """Raise one `error` that names all modules that are not installed, and the extras that install them.

    Args:
        needs: what needs modules, in the words of the message -> (module, extra of chipfit that installs it).
    """
    absent = {
        what: [(lib, extra) for lib, extra in modules if importlib.util.find_spec(lib) is None]
        for what, modules in needs.items()
    }
    found = [pair for modules in absent.values() for pair in modules]
    if found:
        users = [f"'{what}'" for what, modules in absent.items() if modules]
        libraries, extras = dict.fromkeys(lib for lib, _ in found), dict.fromkeys(extra for _, extra in found if extra)
        what = f"{' and '.join(users)} {'needs' if len(users) == 1 else 'need'} {', '.join(libraries)}"
        verb = "is" if len(libraries) == 1 else "are"
        hint = f"pip install 'chipfit[{','.join(extras)}]'" if extras else ""
        raise error(f"{what}, which {verb} not installed", hint=hint)


def cached_until_registration(f: Callable[..., T]) -> Callable[..., T]:
    """Return a function of entries with a cache of its results, by arguments, until entries are added or removed."""
    known: tuple[list[Entry], dict[Any, T]] = ([], {})

    @functools.wraps(f)
    def kept(*args: Any) -> T:
        nonlocal known
        before, results = known
        if before != _all_entries() or args not in results:
            result = f(*args)  # which may import further entries
            now = _all_entries()
            results = {**(results if before == now else {}), args: result}
            known = now, results
        return results[args]

    return kept


def _all_entries() -> list[Entry]:
    return [e for kind in ENTRIES.values() for e in kind.values()]


@cached_until_registration
def ordered(stage: str) -> list[Entry]:
    """Return the steps of a stage, each after those in its `after`, otherwise sorted by name.

    Raises:
        RegistrationError: `after` names a step that does not exist, or the order has a cycle.
    """
    entries("rounding")  # its methods may register corrections
    steps = {e.name: e for kind in ("pass", "correction") for e in entries(kind).values() if e.declares.stage == stage}
    for e in steps.values():
        for other in e.declares.after:
            if other not in steps:
                what = f"The step '{e.name}' must run after '{other}', which does not exist"
                raise RegistrationError(what, allowed=", ".join(steps))
    sorter = TopologicalSorter({name: steps[name].declares.after for name in steps})
    out: list[Entry] = []
    try:
        sorter.prepare()
    except CycleError as e:
        raise RegistrationError("The order of steps has a cycle", got=" -> ".join(e.args[1])) from e
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        out += [steps[name] for name in ready]
        sorter.done(*ready)
    return out
