"""Which defects: drawn with a seed by the operators of cosmic-ray, and those written by hand.

A site is a place in the source where an operator of cosmic-ray applies; each is drawn at most once, and one of the
replacements that fit there is chosen. Left out, by the rules of `_excluded`, is what cannot change a result.
"""

from __future__ import annotations

import ast
import difflib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
HERE = Path(__file__).parent

#: modules that carry meaning: what they compute, decide, write or compare
MODULES = """
    calibration/*.py correction/*.py decide/*.py engine/*.py export/*.py export/*/*.py frameworks/torch/read.py
    frameworks/torch/call.py frameworks/torch/lower.py frameworks/torch/modules.py frameworks/keras/read.py
    frameworks/keras/padding.py frameworks/keras/kernel_layout.py frameworks/keras/lower.py graph/linear.py
    graph/paths.py passes/*.py pipeline.py plan/record.py plan/saved.py plan/sharing.py plan/edit.py platform/match.py
    platform/where.py platform/filters.py quantizers/*.py ranges/*.py rounding/*.py runtimes/*.py simulate/*.py
    verify.py
"""
#: of those, what only tells a person or the clock something
NOT = "calibration/progress.py export/names.py"
#: constants, settings and parameters that say how much is done or kept at a time: one more or less is as good
EFFORT = {
    "calibration/data.py": "ROWS",
    "calibration/batch_cache.py": "most",
    "calibration/sample_fingerprints.py": "_KEPT _NUMBERS",
    "passes/islands.py": "_LARGEST",
    "plan/saved.py": "_ATTEMPTS",
    "quantizers/tables.py": "_DISTINCT",
    "ranges/__init__.py": "_EDGES",
    "ranges/search.py": "ALL FEW BINS _CHUNK _TABLES _ENDS",
    "rounding/time_budget.py": "LADDER",
    "rounding/fisher.py": "IMAGES CHUNK",
    "rounding/gptq.py": "TRIES _AT_ONCE LONG_ROW",
    "rounding/importance.py": "_CHUNK",
    "rounding/moments.py": "ROWS",
    "rounding/learned_rounding.py": "memory",
    "rounding/streams.py": "CHUNK SMALL",
    "rounding/sequential_reconstruction.py": "memory",
    "simulate/sums.py": "_IN_FLOAT",
}


@dataclass(frozen=True)
class Mutant:
    """A module with one defect."""

    file: str  #: below `src`
    text: str  #: the module with the defect
    line: int  #: where it begins, from 1
    within: str  #: qualified name of the function around it, "" for the module's own level
    what: str  #: the operator, or what a user would see
    diff: str
    by_hand: bool = False

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class OutOfDate(Exception):
    """A defect written by hand no longer fits the code."""


# ---------------------------------------------------------------- by hand


def by_hand() -> list[Mutant]:
    """The defects of `by_hand.yaml`.

    Raises:
        OutOfDate: the old text of one of them does not occur exactly once, or the new text does not compile.
    """
    return [_by_hand(entry) for entry in yaml.safe_load((HERE / "by_hand.yaml").read_text())]


def _by_hand(entry: dict[str, str]) -> Mutant:
    file, old, new = (entry[k] for k in ("file", "old", "new"))
    source = (SOURCE / file).read_text()
    if source.count(old) != 1:
        raise OutOfDate(f"{file}: {source.count(old)} times in the code, must be once:\n{old}")
    text = source.replace(old, new)
    try:
        compile(text, file, "exec")
    except SyntaxError as e:
        raise OutOfDate(f"{file}: does not compile: {e}\n{new}") from e
    start = source[: source.index(old)] + old[: len(old) - len(old.lstrip())]
    first = next((k for k, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
    line = max(start.count("\n"), (source[: source.index(old)] + old[:first]).count("\n")) + 1
    return Mutant(file, text, line, _around(source, line, 0), entry["user"].strip(), _diff(file, source, text), True)


# ---------------------------------------------------------------- drawn


@dataclass
class Drawn:
    """What was drawn, and what was left out why."""

    mutants: list[Mutant]
    sites: int = 0
    excluded: Counter[str] = field(default_factory=Counter)


def draw(seed: int, count: int) -> Drawn:
    """So many defects, the same for the same seed and code."""
    pool: list[tuple[str, int, tuple[str, ...]]] = []
    out = Drawn([])
    for file in files():
        for site in _sites(file):
            reason = site.excluded
            if reason:
                out.excluded[reason] += 1
            else:
                pool.append((file, site.occurrence, site.operators))
    out.sites = len(pool)
    known = _equivalent()
    rng = random.Random(seed)
    rng.shuffle(pool)
    for file, occurrence, operators in pool:
        if len(out.mutants) == count:
            break
        name = rng.choice(operators)
        source = (SOURCE / file).read_text()
        try:
            text = mutate_code(source, get_operator(name)(), occurrence)
        except AttributeError:  # cosmic-ray replaces no exception whose name has a dot
            out.excluded["an operator that fails"] += 1
            continue
        if text is None or not _compiles(text):
            out.excluded["does not compile"] += 1
            continue
        if ast.dump(ast.parse(text)) == ast.dump(ast.parse(source)):
            out.excluded["the same program"] += 1
            continue
        if _meaning(text) == _meaning(source):
            out.excluded["which arguments need their names"] += 1
            continue
        if _same_comparison(source, text):
            out.excluded["words compared by order, or anything by identity in place of equality"] += 1
            continue
        diff = _diff(file, source, text)
        changed = [x[1:] for x in diff.splitlines() if x.startswith(("-", "+")) and x[:3] not in ("---", "+++")]
        if (file, *map(_tight, changed)) in known:
            out.excluded["listed in equivalent.yaml with a reason"] += 1
            continue
        line = next(k for k, (a, b) in enumerate(_lines(source, text), 1) if a != b)
        column = next((k for k, (a, b) in enumerate(_lines(*_pair(source, text, line), chars=True)) if a != b), 0)
        what = name.removeprefix("core/")
        out.mutants.append(Mutant(file, text, line, _around(source, line, column), what, diff))
    return out


def files() -> list[str]:
    """The named modules, below `src`."""
    left_out = NOT.split()
    found = sorted({p for pattern in MODULES.split() for p in (SOURCE / "chipfit").glob(pattern)})
    return [str(p.relative_to(SOURCE)) for p in found if str(p.relative_to(SOURCE / "chipfit")) not in left_out]


@dataclass(frozen=True)
class _Site:
    occurrence: int  #: among those of its operators
    operators: tuple[str, ...]
    excluded: str


@cache
def _families() -> dict[str, tuple[str, ...]]:
    """Operators that apply at the same places, by one of them."""
    out: dict[str, list[str]] = {}
    for name in operator_names():
        if name in ("core/VariableReplacer", "core/VariableInserter"):  # take names as settings
            continue
        words = name.split("_")
        out.setdefault("_".join(words[:2]) if len(words) == 3 and "Delete" not in words else name, []).append(name)
    return {names[0]: tuple(names) for names in out.values()}


def _sites(file: str) -> Iterator[_Site]:
    source = (SOURCE / file).read_text()
    nodes = list(ast_nodes(get_ast(source)))
    excluded = _excluded(source, EFFORT.get(file.removeprefix("chipfit/"), ""))
    for first, names in _families().items():
        operator, occurrence = get_operator(first)(), 0
        for node in nodes:
            for start, stop in operator.mutation_positions(node):
                reason = next((why for a, b, why in excluded if a <= start and stop <= b), "")
                yield _Site(occurrence, names, reason)
                occurrence += 1


_Range = tuple[tuple[int, int], tuple[int, int], str]
#: decorators without which a function does the same
_DECORATORS = {
    **dict.fromkeys(("cache", "lru_cache", "cached_property", "wraps"), "a cache"),
    **dict.fromkeys(("overload", "runtime_checkable", "abstractmethod", "final"), "a type annotation"),
    "staticmethod": "how a function is called",  # by its class alone
}


def _excluded(source: str, effort: str = "") -> list[_Range]:
    """Where a change cannot change a result, with the rule that says so; effort: names of amounts of work."""
    out: list[_Range] = []
    lines = source.splitlines()

    def at(line: int, column: int) -> tuple[int, int]:
        return line, len(lines[line - 1].encode()[:column].decode())

    def leave(n: ast.AST, why: str) -> None:
        out.append((at(n.lineno, n.col_offset), at(n.end_lineno, n.end_col_offset), why))  # type: ignore[attr-defined]

    tree = ast.parse(source)
    for n in tree.body:
        if isinstance(n, ast.Assign) and all(x in effort.split() for x in _names(n.targets[0])):
            leave(n, "an amount of effort")
    for n in ast.walk(tree):
        if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) in effort.split() and n.value is not None:
            leave(n.value, "an amount of effort")
        elif isinstance(n, ast.arguments):
            for a, default in zip(n.args[::-1], n.defaults[::-1]):
                if a.arg in effort.split():
                    leave(default, "an amount of effort")
        if isinstance(n, ast.AnnAssign | ast.arg) and n.annotation is not None:
            leave(n.annotation, "a type annotation")
        elif isinstance(n, ast.Raise):
            leave(n, "the text of an error")
        elif isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Subscript) and isinstance(n.value, ast.JoinedStr)):
            leave(n, "a text")
        elif isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test):
            leave(n, "a type annotation")
        elif isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in ("__all__", "__slots__"):
            leave(n, "names of a module")
        if isinstance(n, ast.Call):
            called = ast.unparse(n.func).rpartition(".")[2]
            if called.endswith(("Error", "Warning")) or called in (
                "warn",
                "warning",
                "debug",
                "info",
                "cast",
                "TypeVar",
            ):
                leave(n, "the text of an error")
            if called == "refuse":  # of a writer: raises, whatever it is told
                for x in n.args:
                    leave(x, "the text of an error")
            for k in n.keywords:
                if called == "zip" and k.arg == "strict":
                    leave(k.value, "a check of equal lengths inside zip")
                if called == "dumps" and k.arg == "indent":
                    leave(k.value, "spaces in JSON")
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef):
            if n.returns is not None:
                leave(n.returns, "a type annotation")
            if n.name in ("__repr__", "__str__", "extra_repr", "_repr_html_", "__hash__"):
                leave(n, "a text for people")
        if isinstance(n, ast.FunctionDef | ast.ClassDef):
            for d in n.decorator_list:
                name = ast.unparse(d.func if isinstance(d, ast.Call) else d).rpartition(".")[2]
                if name == "dataclass" and isinstance(d, ast.Call):
                    leave(d, "how a record is stored")
                if why := _DECORATORS.get(name):
                    out.append(((d.lineno, d.col_offset - 1), (d.end_lineno, 10**6), why))  # type: ignore[arg-type]
    return out


def _names(n: ast.AST) -> list[str]:
    return [x.id for x in ast.walk(n) if isinstance(x, ast.Name)]


@cache
def _equivalent() -> frozenset[tuple[str, ...]]:
    """Changes that a person found to be no defects: (file, old line, new line)."""
    entries = yaml.safe_load((HERE / "equivalent.yaml").read_text()) or []
    for e in entries:
        if not e.get("why"):
            raise OutOfDate(f"equivalent.yaml: no reason for {e}")
    return frozenset((e["file"], _tight(e["old"]), _tight(e["new"])) for e in entries)


def _tight(line: str) -> str:
    return "".join(line.split())


def _meaning(source: str) -> str:
    """A program, whatever stars its signatures have."""
    tree = ast.parse(source)
    for n in ast.walk(tree):
        if isinstance(n, ast.arguments):
            named = [*n.posonlyargs, *n.args, *n.kwonlyargs]
            defaults = [*n.defaults, *(d for d in n.kw_defaults if d is not None)]
            n.posonlyargs, n.args, n.kwonlyargs, n.defaults, n.kw_defaults = [], named, [], defaults, []
    return ast.dump(tree)


#: what else is true of equal words, or of different ones: nobody writes it, and it often says the same
_AS_GOOD = {ast.Eq: (ast.LtE, ast.GtE), ast.NotEq: (ast.Lt, ast.Gt)}
#: equality and identity: the same of small numbers, types, words of the program and None
_ALIKE = ({ast.Eq, ast.Is}, {ast.NotEq, ast.IsNot})


def _same_comparison(source: str, text: str) -> bool:
    """Whether words are compared by order in place of equality, or anything by identity in place of equality."""
    for x, y in zip(ast.walk(ast.parse(source)), ast.walk(ast.parse(text))):
        if isinstance(x, ast.Compare) and isinstance(y, ast.Compare):
            changed = [(type(a), type(b)) for a, b in zip(x.ops, y.ops) if type(a) is not type(b)]
            words = any(isinstance(c, ast.Constant) and isinstance(c.value, str) for c in (x.left, *x.comparators))
            if any({*pair} in _ALIKE or (words and pair[1] in _AS_GOOD.get(pair[0], ())) for pair in changed):
                return True
    return False


# ---------------------------------------------------------------- texts


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def _lines(a: str, b: str, chars: bool = False) -> Iterator[tuple[str, str]]:
    from itertools import zip_longest

    yield from zip_longest(a if chars else a.splitlines(), b if chars else b.splitlines(), fillvalue="")


def _pair(a: str, b: str, line: int) -> tuple[str, str]:
    first, second = a.splitlines(), b.splitlines()
    return first[line - 1] if line <= len(first) else "", second[line - 1] if line <= len(second) else ""


def _diff(file: str, a: str, b: str) -> str:
    return "\n".join(difflib.unified_diff(a.splitlines(), b.splitlines(), f"a/{file}", f"b/{file}", lineterm="", n=2))


def _around(source: str, line: int, column: int) -> str:
    """The qualified name of the innermost function around a place, as `co_qualname` writes it."""
    found = ""

    def walk(n: ast.AST, path: str) -> None:
        nonlocal found
        for child in ast.iter_child_nodes(n):
            inner = path
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                first = min([child.lineno, *(d.lineno for d in getattr(child, "decorator_list", []))])
                inside = first <= line <= (child.end_lineno or 0)
                if isinstance(child, ast.Lambda):
                    begin, end = (child.lineno, child.col_offset), (child.end_lineno, child.end_col_offset)
                    inside = begin <= (line, column) <= end
                if not inside:
                    continue
                name = getattr(child, "name", "<lambda>")
                inner = f"{path}.{name}" if path else name
                if not isinstance(child, ast.ClassDef):
                    found = inner
                    inner += ".<locals>"
            walk(child, inner)

    walk(ast.parse(source), "")
    return found
