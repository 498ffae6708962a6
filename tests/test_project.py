"""The repository as a whole: links resolve, layers keep their borders, and no file names a machine."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest

import chipfit._version
from chipfit._version import __version__
from chipfit.operators.table import OPS

ROOT = Path(__file__).parents[1]
PACKAGE = Path(chipfit._version.__file__).parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
PAGES = sorted([*PAGES, *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("README.md")])
MODULES = sorted(PACKAGE.rglob("*.py"))


def tracked() -> list[Path]:
    try:
        out = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / p for p in out.split("\0") if p and (ROOT / p).is_file()]


@cache
def nodes(source: str) -> list[ast.AST]:
    """Return every node of a module, itself first; tests of this file read the same modules again and again."""
    return list(ast.walk(ast.parse(source)))


def teardown_module():
    nodes.cache_clear()


def test_the_changelog_has_a_section_for_this_version():
    assert f"\n## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_no_tracked_file_names_a_machine():
    own = Path(__file__).resolve()
    leaks = re.compile(r"(?<![\w.])/(work|root|home/\w+)/|session" + r"[ _]id\b", re.IGNORECASE)
    found = []
    for path in tracked():
        if path.resolve() != own and path.suffix not in {".png", ".onnx", ".safetensors", ".npz"}:
            found += [f"{path.relative_to(ROOT)}: {m[0]}" for m in leaks.finditer(path.read_text(errors="replace"))]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_of_a_page_resolves(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_the_prose_of_pages_keeps_to_120_columns():
    text = {page: re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE) for page in PAGES}
    prose = ((page, line) for page, whole in text.items() for line in whole.splitlines() if line[:1] != "|")
    assert [f"{p.name}: {line}" for p, line in prose if len(re.sub(r"`[^`]*`", "", line)) > 120] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_and_module_that_a_page_names_exists(page):
    text = page.read_text()
    files = re.findall(r"`((?:src|docs|tests|examples|benchmarks)/[\w./-]+)`", text)
    assert [f for f in files if not (ROOT / f).exists()] == []
    modules = re.findall(r"(?:from|import|`)\s?(chipfit(?:\.[a-z_]+)+)", text)
    assert [m for m in modules if not resolves(m)] == []


def resolves(dotted: str) -> bool:
    """Check that a module of chipfit, or a name in one, exists."""
    module, _, name = dotted.rpartition(".")
    path = PACKAGE.parent / dotted.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file() or hasattr(importlib.import_module(module), name)


def test_a_module_that_has_moved_is_missed():
    assert resolves("chipfit.plan.record") and resolves("chipfit.quantize") and not resolves("chipfit.plan_edit")


def test_the_docs_site_lists_every_page():
    import yaml

    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"[\w/-]+\.md", str(yaml.safe_load(text)["nav"])))
    generated = ("platforms/", "schema/", "notebooks/")
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert {p for p in pages if not p.startswith(generated)} == {p for p in listed if not p.startswith(generated)}


def test_the_pinned_versions_satisfy_the_package_metadata():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [Requirement(r) for rs in listed for r in rs]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {name.lower(): version for name, version in pins.items()}
    assert [str(r) for r in wanted if r.name.lower() in pins and pins[r.name.lower()] not in r.specifier] == []


# ---------------------------------------------------------------- borders

#: rooms from the bottom up: each may import those before it
LAYERS = (
    "errors registry files pte_file validation screen quantizers operators graph engine calibration ranges platform "
    "import_by_name plan decide passes rounding correction settings steps decision adaptation search frameworks "
    "export simulate runtimes verify report reading generation linting channel_pruning streams result comparison "
    "request pipeline training mct mqbench bench cli __main__"
).split()
#: room -> rooms below it that it must not import either
STRANGERS = {
    "ranges": "graph engine",
    "platform": "engine calibration ranges",
    "calibration": "registry",
    "passes": "platform",
    "frameworks": "platform calibration ranges decide",
    "simulate": "export calibration ranges decide",
    "runtimes": "quantizers graph engine calibration platform plan decide export simulate",
}
#: imports that still cross a border; the list only shrinks
CROSSINGS = {"passes/concat_ranges.py imports platform", "passes/add_missing_bias.py imports platform"}
#: modules of the documents' names, and the package itself
DOORS = set(
    "__init__ _version constants core data_generation exporter framework_info gptq hardware_representation pruning ptq "
    "qat quantize_fx target_platform target_platform_capabilities trainable_infrastructure xquant".split()
)


def statements(source: str, *, typing: bool) -> list[ast.AST]:
    """Return every node of a module; with `typing`, also those that only type checkers run."""
    if typing or "TYPE_CHECKING" not in source:
        return nodes(source)
    blocks = [n for n in nodes(source) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    left_out = {id(n) for block in blocks for part in block.body for n in ast.walk(part)}
    return [n for n in nodes(source) if id(n) not in left_out]


def imports(source: str, modules: Collection[str] = (), *, typing: bool = False) -> set[str]:
    """Return the imports of a module, also inside functions; a module of `modules` without its package."""
    found = set()
    for n in statements(source, typing=typing):
        if isinstance(n, ast.Import):
            found |= {a.name for a in n.names}
        elif isinstance(n, ast.ImportFrom) and n.module:
            names = {f"{n.module}.{a.name}" for a in n.names}
            found |= names if names <= set(modules) else {n.module, *names}
    return found


def rooms(path: Path) -> set[str]:
    """Return the rooms of chipfit that a file imports from."""
    return {m.split(".")[1] for m in imports(path.read_text()) if m.startswith("chipfit.")}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_room_has_its_layer():
    found = {room_of(p) for p in MODULES} - DOORS
    assert found == set(LAYERS)


def test_a_room_imports_nothing_above_it():
    crossed = set()
    for path in MODULES:
        own = room_of(path)
        if own not in DOORS:
            known = {*LAYERS[: LAYERS.index(own) + 1], "_version", "__version__"} - set(STRANGERS.get(own, "").split())
            crossed |= {f"{path.relative_to(PACKAGE)} imports {other}" for other in rooms(path) - known}
    assert crossed == CROSSINGS


def test_the_core_does_not_know_the_packages_above_it():
    above = {"mct", "mqbench", "bench"}
    assert {room_of(p) for p in MODULES if rooms(p) & above} - above - {"cli"} <= DOORS


def circles(modules: dict[str, set[str]]) -> list[set[str]]:
    """Return groups of modules that import each other, given the imports of each."""
    reach = {name: set(known) & set(modules) for name, known in modules.items()}
    for middle in modules:
        for known in reach.values():
            if middle in known:
                known |= reach[middle]
    return [set(c) for c in {frozenset(o for o in reach[m] if m in reach[o]) for m in modules if m in reach[m]}]


@pytest.mark.parametrize("typing", [False, True])
def test_no_modules_import_each_other(typing):
    named = {
        ".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): p for p in MODULES
    }
    assert circles({name: imports(p.read_text(), named, typing=typing) - {name} for name, p in named.items()}) == []


def test_a_circle_through_a_function_is_found():
    sources = {
        "pkg.one": "def late():\n    from pkg.two import name",
        "pkg.two": "if TYPE_CHECKING:\n    import pkg.three\nfrom pkg import one",
        "pkg.three": "import pkg.one",
    }
    assert circles({m: imports(s, sources) for m, s in sources.items()}) == [{"pkg.one", "pkg.two"}]
    assert circles({m: imports(s, sources, typing=True) for m, s in sources.items()}) == [set(sources)]


#: files of the core that copy tensors between devices, besides those of the frameworks and of training; the list only
#: shrinks: a loop over data begins with `placed`, and what it returns is on the CPU
COPIES_BETWEEN_DEVICES = set(
    """calibration/sample_fingerprints calibration/source calibration/spread_samples engine/check_runs engine/run
    graph/folds graph/placement
    plan/sharing quantizers/stored rounding/gptq_solver rounding/methods/learned rounding/moments rounding/outputs
    rounding/sequential_reconstruction rounding/streams verify/run""".split()
)
#: rooms whose tensors are the user's own, wherever they are
WITH_DEVICES = {"frameworks", "training", "mct", "mqbench", "bench", "cli"}


def copies_between_devices(source: str) -> bool:
    """Return whether a module calls `cpu()` or `cuda()`, or `to` with a device."""
    calls = [n for n in nodes(source) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    given = [(n.func.attr, " ".join(ast.unparse(x) for x in [*n.args, *(k.value for k in n.keywords)])) for n in calls]
    device = re.compile(r"\b(device|where|here|CPU)\b|'cpu'")
    return any(name in ("cpu", "cuda") or (name == "to" and device.search(args)) for name, args in given)


def test_few_modules_copy_tensors_between_devices():
    paths = [p for p in MODULES if room_of(p) not in WITH_DEVICES and copies_between_devices(p.read_text())]
    assert {str(p.relative_to(PACKAGE).with_suffix("")) for p in paths} == COPIES_BETWEEN_DEVICES


@pytest.mark.parametrize("code", ["x.cpu()", "x.to(device=w.device)", "f(y.to('cpu', kind))", "x.to(CPU).float()"])
def test_a_copy_between_devices_is_found(code):
    assert copies_between_devices(code) and not copies_between_devices("x.to(dtype=torch.float32), cpu(y)")


# ---------------------------------------------------------------- size

#: lines of code that each part may have, with room: a change of design raises a budget, a change of code does not
BUDGETS = {"core": 44_930, "channel_pruning": 1_200, "generation": 400, "mct": 3_800, "mqbench": 1_900, "bench": 1_800}
BUDGETS |= {"chipfit": 53_470, "tests": 52_240}
TOP_LEVEL = 18  #: modules beside the documents' doors
#: number of operators that the code of more than two files names (their row, and a file with code of their own); a
#: framework with files of its own adds those that it does not read by the table; otherwise the number only shrinks
WIDELY_NAMED = 58


def lines_of_code(source: str) -> int:
    """Count the lines that are neither blank, nor comment, nor docstring."""
    code = {k for k, line in enumerate(source.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docs: set[int] = set()
    for n in nodes(source):
        if isinstance(n, ast.Constant) and isinstance(n.value, str):
            code |= set(range(n.lineno, (n.end_lineno or n.lineno) + 1))  # lines of a text may be blank
        elif isinstance(n, documented) and ast.get_docstring(n, clean=False) is not None:
            docs |= set(range(n.body[0].lineno, (n.body[0].end_lineno or 0) + 1))
    return len(code - docs)


def test_lines_are_counted_without_blank_ones_comments_and_docstrings():
    source = '"""One\ntwo."""\n\n# why\nX = """a\n\nb"""  # three lines\n'
    source += '\ndef f():\n    """Doc."""\n    return (\n        X\n    )\n'
    assert lines_of_code(source) == 3 + 1 + 3


def test_every_part_keeps_to_its_budget():
    """The core is what is neither the documents' names (mct, mqbench) nor experiments (bench)."""
    size: Counter[str] = Counter()
    for path in MODULES:
        part = room_of(path) if room_of(path) in BUDGETS else "core"
        size.update(dict.fromkeys((part, "chipfit"), lines_of_code(path.read_text())))
    size["tests"] = sum(lines_of_code(p.read_text()) for p in (ROOT / "tests").rglob("*.py"))
    assert size.keys() == BUDGETS.keys()
    assert {part: lines for part, lines in size.items() if lines > BUDGETS[part]} == {}


def test_the_story_of_a_call_stands_on_one_page():
    assert lines_of_code((PACKAGE / "pipeline.py").read_text()) <= 150


def test_no_code_is_exempt_from_formatting():
    assert not [str(p) for p in MODULES if "fmt: " + "skip" in p.read_text() or "fmt: " + "off" in p.read_text()]


def test_few_modules_stand_at_the_top():
    doors = DOORS - {"__init__", "_version"} | {"__main__"}
    assert len([p for p in PACKAGE.glob("*.py") if p.stem not in doors]) <= TOP_LEVEL


def test_an_operator_is_named_in_few_files():
    tables = [re.sub("#.*", "", p.read_text()) for p in PACKAGE.rglob("*.yaml") if "builtin" not in p.parts]
    named = [set(re.findall("[A-Za-z0-9]+", text)) for text in tables]
    named += [set(re.findall("[A-Za-z0-9]+", " ".join(texts(p.read_text())))) for p in MODULES]
    named_by = {op: sum(op in found for found in named) for op in OPS}
    assert named_by["HardSwish"] == 1
    assert sum(files > 2 for files in named_by.values()) <= WIDELY_NAMED


# ---------------------------------------------------------------- facts with one home


def texts(source: str) -> list[str]:
    """Return the string constants of a module except docstrings."""
    docs = {id(n.value) for n in nodes(source) if isinstance(n, ast.Expr)}
    found = [n for n in nodes(source) if isinstance(n, ast.Constant) and id(n) not in docs]
    return [n.value for n in found if isinstance(n.value, str)]


def naming(names: Collection[str], source: str) -> list[str]:
    """Return the texts of a module that contain one of the names as a word."""
    return [text for text in texts(source) if set(re.findall(r"\w+", text)) & set(names)]


def test_no_code_names_a_platform():
    files = list((PACKAGE / "platform/builtin").glob("*.yaml"))
    names = {f.stem for f in files}
    dialects = {d for f in files for d in re.findall(r"^encodings: (\w+)$", f.read_text(), re.MULTILINE)}
    home = "platform/builtin/", "runtimes/", "pte_file/"  # the last has the path of a schema of another package
    found = {str(p.relative_to(PACKAGE)): naming(names, p.read_text()) for p in MODULES}
    found["export/encodings.py"] = [t for t in found["export/encodings.py"] if t not in dialects]  # called like chips
    assert {file for file, used in found.items() if used and not file.startswith(home)} == set()


def test_a_platform_in_a_message_is_found_and_one_in_a_docstring_is_not():
    source = '"""For ort_cpu."""\nrun(f"on {x}: ort_cpu@AVX2", "ort_cpus")'
    assert naming({"ort_cpu"}, source) == [": ort_cpu@AVX2"]


def test_only_the_reader_the_writer_and_the_runtimes_know_onnx():
    allowed = {"export", "runtimes"}
    knows = [
        p.relative_to(PACKAGE)
        for p in MODULES
        if any(m.partition(".")[0] in ("onnx", "onnxruntime") for m in imports(p.read_text()))
    ]
    assert [str(p) for p in knows if p.parts[0] not in allowed and p.parts[:2] != ("frameworks", "onnx")] == []


def test_every_module_has_a_docstring():
    sources = {str(p.relative_to(ROOT)): p.read_text() for p in MODULES}
    assert [p for p, source in sources.items() if source.strip() and not docstrings(source)[0]] == []


# ---------------------------------------------------------------- prose

#: words that no docstring begins with: a function's begins with a verb, a class's or module's with a noun
NOT_FIRST = re.compile(r"(What|Of|Whether|Which|How|Those|Likewise|The same)\b")


def docstrings(source: str) -> list[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [ast.get_docstring(n) or "" for n in nodes(source) if isinstance(n, documented)]


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = [f"{p.relative_to(PACKAGE)}: {d}" for p in MODULES for d in docstrings(p.read_text()) if NOT_FIRST.match(d)]
    assert found == []


def test_an_error_says_what_is_wrong_and_not_that_something_is_none():
    """ "Scale must be positive", not "A scale is none"."""
    cryptic = re.compile(r"An? [^.]* (is|are) none\b")
    assert [text for p in MODULES for text in texts(p.read_text()) if cryptic.match(text)] == []


#: "is no number" for "is not a number"; "there is no number" is English
FOREIGN_NEGATION = re.compile(r"(?<!here )\b(is|are) no (?!(operators|such|longer|less)\b)[a-z]")


def test_docstrings_and_messages_negate_the_verb():
    both = {p: [*docstrings(p.read_text()), *texts(p.read_text())] for p in MODULES}
    assert [
        f"{p.relative_to(PACKAGE)}: {t}" for p, found in both.items() for t in found if FOREIGN_NEGATION.search(t)
    ] == []
    assert FOREIGN_NEGATION.search("'x' is no tensor") and not FOREIGN_NEGATION.search("There is no tensor 'x'")


def test_a_docstring_and_an_error_that_break_the_rules_are_found():
    source = 'def f():\n    """Whether it is so."""\n    raise ValueError("A bound on scales is none")'
    assert NOT_FIRST.match(docstrings(source)[1]) and not NOT_FIRST.match("Offer a value.")
    assert texts(source) == ["A bound on scales is none"]


# ---------------------------------------------------------------- tests


def private_names(source: str) -> set[str]:
    """Return the names with a leading underscore that a file imports from chipfit, reads from its modules or sets."""
    froms = [n for n in nodes(source) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("chipfit")]
    imported = {a.name: a.asname or a.name for n in froms for a in n.names}
    read = [n for n in nodes(source) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    names = {*imported, *(n.attr for n in read if ast.unparse(n.value) in imported.values())}
    names |= {m[2] for m in re.finditer(r'setattr\((\w+), "(\w+)"', source) if m[1] in imported.values()}
    return {n for n in names if n.startswith("_") and not n.startswith("__")}


def test_tests_import_public_names():
    found = {str(p.relative_to(ROOT)): private_names(p.read_text()) for p in (ROOT / "tests").rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == {}
    assert private_names("from chipfit.files import _put, write_atomically, __doc__") == {"_put"}
    used = 'from chipfit import files\nfiles._read()\nmonkeypatch.setattr(files, "_LARGE", 1)'
    assert private_names(used) == {"_read", "_LARGE"}


def test_a_test_file_that_cannot_be_imported_fails(tmp_path):
    broken = tmp_path / "test_broken.py"
    broken.write_text("from chipfit.errors import NoSuchError\n\n\ndef test_nothing(): ...\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", broken]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "cannot import name 'NoSuchError'" in done.stdout
