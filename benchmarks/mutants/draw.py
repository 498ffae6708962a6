"""Draw small defects from the source with a seed, by the operators of cosmic-ray.

A site is a place in the source where an operator applies. Each site is drawn at most once, with one of the replacements
that fit there. Sites and replacements that cannot change a result are left out by rule and counted by reason. No list
of defects is kept, so nothing has to follow the code: equal seed and code give equal defects.
"""

from __future__ import annotations

import ast
import difflib
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
#: packages of which no defect is drawn: screens, experiments, and the documents' names for what the core does
LEFT_OUT = "bench cli core mct mqbench report target_platform_capabilities".split()


@dataclass(frozen=True)
class Mutant:
    """A module with one defect."""

    file: str  #: below `src`
    text: str  #: the module with the defect
    line: int  #: first line of the source that differs, from 1
    operator: str  #: cosmic-ray's name of the change
    diff: str

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def last(self) -> int:
        """The last line of the source that differs."""
        return self.line + max(sum(x.startswith("-") for x in self.diff.splitlines()[2:]) - 1, 0)


@dataclass
class Drawn:
    """The defects that a seed draws."""

    mutants: list[Mutant]
    sites: int = 0  #: sites to draw from
    excluded: Counter[str] = field(default_factory=Counter)  #: reason -> sites and replacements left out


def draw(seed: int, count: int) -> Drawn:
    """Draw `count` defects, each at a site of its own."""
    out = Drawn([])
    pool: list[tuple[str, int, tuple[str, ...]]] = []
    for file in files():
        for occurrence, operators, reason in _sites((SOURCE / file).read_text()):
            if reason:
                out.excluded[reason] += 1
            else:
                pool.append((file, occurrence, operators))
    out.sites = len(pool)
    rng = random.Random(seed)
    rng.shuffle(pool)
    for file, occurrence, operators in pool:
        if len(out.mutants) == count:
            break
        operator, source = rng.choice(operators), (SOURCE / file).read_text()
        text, reason = _mutated(source, operator, occurrence)
        if reason:
            out.excluded[reason] += 1
        else:
            out.mutants.append(_mutant(file, source, text, operator.removeprefix("core/")))
    return out


def files() -> list[str]:
    """Return the modules that defects are drawn from, as paths below `src`."""
    found = [p.relative_to(SOURCE) for p in sorted((SOURCE / "chipfit").rglob("*.py"))]
    return [str(p) for p in found if p.parts[1] not in LEFT_OUT]


def _mutated(source: str, operator: str, occurrence: int) -> tuple[str, str]:
    """Return the changed source, and why it is no defect ("" if it is one)."""
    try:
        text = mutate_code(source, get_operator(operator)(), occurrence)
    except AttributeError:  # cosmic-ray cannot replace an exception whose name has a dot
        return "", "an operator that fails"
    if text is None or not _compiles(text):
        return "", "a change that does not compile"
    return text, same_program(source, text)


def _mutant(file: str, source: str, text: str, operator: str) -> Mutant:
    old, new = source.splitlines(), text.splitlines()
    line = next((k for k, (a, b) in enumerate(zip(old, new), 1) if a != b), min(len(old), len(new)))
    diff = difflib.unified_diff(old, new, f"a/{file}", f"b/{file}", lineterm="", n=2)
    return Mutant(file, text, line, operator, "\n".join(diff))


def _compiles(text: str) -> bool:
    with warnings.catch_warnings():  # such as `x is "text"`
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            compile(text, "mutant", "exec")
        except (SyntaxError, ValueError):
            return False
    return True


# --------------------------------------------------------------------------------------------------------------- sites


@cache
def _families() -> dict[str, tuple[str, ...]]:
    """Group the operators that apply at the same places, by the first of each group."""
    out: dict[str, list[str]] = {}
    for name in operator_names():
        if name in ("core/VariableReplacer", "core/VariableInserter"):  # these need names of variables
            continue
        words = name.split("_")
        out.setdefault("_".join(words[:2]) if len(words) == 3 and "Delete" not in words else name, []).append(name)
    return {names[0]: tuple(names) for names in out.values()}


def _sites(source: str) -> Iterator[tuple[int, tuple[str, ...], str]]:
    """Yield each site: its number among those of its operators, the operators, and why it is left out."""
    nodes = list(ast_nodes(get_ast(source)))
    excluded = excluded_ranges(source)
    for first, names in _families().items():
        operator, occurrence = get_operator(first)(), 0
        for node in nodes:
            for start, stop in operator.mutation_positions(node):
                yield occurrence, names, next((why for a, b, why in excluded if a <= start and stop <= b), "")
                occurrence += 1


# ------------------------------------------------------------------------------------- places where no defect is drawn

Range = tuple[tuple[int, int], tuple[int, int], str]  #: (line, column) of begin and end, and the reason
#: decorators without which a function computes the same
DECORATORS = {
    **dict.fromkeys(("cache", "lru_cache", "cached_property", "wraps"), "a cache"),
    **dict.fromkeys(("overload", "runtime_checkable", "abstractmethod", "final"), "a type annotation"),
    "staticmethod": "how a function is called",
}
NOTICES = "warn warning debug info cast TypeVar".split()  #: calls whose arguments are for people or for type checkers
TEXTS = "__repr__ __str__ extra_repr _repr_html_ __hash__".split()


def excluded_ranges(source: str) -> list[Range]:
    """Find the places of a module where a change cannot change a result."""
    lines = source.splitlines()

    def at(line: int, column: int) -> tuple[int, int]:
        return line, len(lines[line - 1].encode()[:column].decode())

    return [
        (at(n.lineno, n.col_offset), at(n.end_lineno, n.end_col_offset), why)  # type: ignore[attr-defined]
        for node in ast.walk(ast.parse(source))
        for n, why in _without_effect(node)
    ]


def _without_effect(n: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield the parts of a node (or the node itself) that cannot change a result, with the reason."""
    if isinstance(n, ast.AnnAssign | ast.arg) and n.annotation is not None:
        yield n.annotation, "a type annotation"
    elif isinstance(n, ast.Raise):
        yield n, "the text of an error"
    elif isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Subscript) and isinstance(n.value, ast.JoinedStr)):
        yield n, "a text"
    elif isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test):
        yield n, "a type annotation"
    elif isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in ("__all__", "__slots__"):
        yield n, "names of a module"
    elif isinstance(n, ast.Call):
        called = ast.unparse(n.func).rpartition(".")[2]
        if called.endswith(("Error", "Warning")) or called in NOTICES:
            yield n, "the text of an error"
        for k in n.keywords:
            if (called, k.arg) == ("zip", "strict"):
                yield k.value, "a check of equal lengths inside zip"
            if (called, k.arg) == ("dumps", "indent"):
                yield k.value, "spaces in JSON"
    elif isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if not isinstance(n, ast.ClassDef):
            if n.returns is not None:
                yield n.returns, "a type annotation"
            if n.name in TEXTS:
                yield n, "a text for people"
        for d in n.decorator_list:
            name = ast.unparse(d.func if isinstance(d, ast.Call) else d).rpartition(".")[2]
            if name == "dataclass" and isinstance(d, ast.Call):
                yield d, "how a record is stored"
            if name in DECORATORS:  # from its @ to the end of the line
                begin = {"lineno": d.lineno, "col_offset": d.col_offset - 1}
                yield ast.Pass(**begin, end_lineno=(d.end_lineno or d.lineno) + 1, end_col_offset=0), DECORATORS[name]


# --------------------------------------------------------------------------------------- changes that change no result

#: comparisons that hold of equal words or of different ones: nobody writes them, and they often say the same
AS_GOOD = {ast.Eq: (ast.LtE, ast.GtE), ast.NotEq: (ast.Lt, ast.Gt)}
#: equality and identity, which are alike for small numbers, types, words of the program and None
ALIKE = ({ast.Eq, ast.Is}, {ast.NotEq, ast.IsNot})


def same_program(source: str, text: str) -> str:
    """Return why a changed module computes what it did ("" if it may not)."""
    before, after = ast.parse(source), ast.parse(text)
    if _same_comparison(before, after):
        return "words compared by order, or anything by identity in place of equality"
    if ast.dump(before) == ast.dump(after):
        return "the same program"
    if _unstarred(before) == _unstarred(after):
        return "which arguments need their names"
    return ""


def _unstarred(tree: ast.Module) -> str:
    """Return a program without the stars and slashes of its signatures (in place)."""
    for n in ast.walk(tree):
        if isinstance(n, ast.arguments):
            named = [*n.posonlyargs, *n.args, *n.kwonlyargs]
            defaults = [*n.defaults, *(d for d in n.kw_defaults if d is not None)]
            n.posonlyargs, n.args, n.kwonlyargs, n.defaults, n.kw_defaults = [], named, [], defaults, []
    return ast.dump(tree)


def _same_comparison(before: ast.Module, after: ast.Module) -> bool:
    for x, y in zip(ast.walk(before), ast.walk(after)):
        if isinstance(x, ast.Compare) and isinstance(y, ast.Compare):
            changed = [(type(a), type(b)) for a, b in zip(x.ops, y.ops) if type(a) is not type(b)]
            words = any(isinstance(c, ast.Constant) and isinstance(c.value, str) for c in (x.left, *x.comparators))
            if any({*pair} in ALIKE or (words and pair[1] in AS_GOOD.get(pair[0], ())) for pair in changed):
                return True
    return False
