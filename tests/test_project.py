"""The repository as a whole: links resolve, layers keep their borders, and nothing of one machine leaks in."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import chipfit._version
from chipfit._version import __version__

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *(ROOT / "docs").rglob("*.md")]
)
PACKAGE = Path(chipfit._version.__file__).parent


def tracked() -> list[Path]:
    try:
        out = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / p for p in out.split("\0") if p and (ROOT / p).is_file()]


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


def test_the_docs_site_lists_every_page():
    import yaml

    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"[\w/-]+\.md", str(yaml.safe_load(text)["nav"])))
    generated = ("platforms/", "schema/")
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


#: folder -> what it may not import: lower layers know nothing of higher ones
BORDERS = {
    "quantizers": (
        "chipfit.graph",
        "chipfit.platform",
        "chipfit.plan.record",
        "chipfit.frameworks",
        "chipfit.pipeline",
    ),
    "ranges": ("chipfit.graph", "chipfit.platform", "chipfit.plan.record", "chipfit.frameworks", "chipfit.pipeline"),
    "graph": (
        "chipfit.engine",
        "chipfit.frameworks",
        "chipfit.platform",
        "chipfit.plan.record",
        "chipfit.ranges",
        "chipfit.pipeline",
        "chipfit.export",
    ),
    "engine": (
        "chipfit.frameworks",
        "chipfit.platform",
        "chipfit.plan",
        "chipfit.decide",
        "chipfit.passes",
        "chipfit.calibration",
        "chipfit.pipeline",
        "chipfit.export",
    ),
    "platform": ("chipfit.plan.record", "chipfit.frameworks", "chipfit.pipeline", "chipfit.export", "chipfit.ranges"),
    "passes": ("chipfit.platform", "chipfit.plan.record", "chipfit.pipeline", "chipfit.export"),
    "calibration": ("chipfit.platform", "chipfit.pipeline", "chipfit.export"),
    "frameworks": ("chipfit.platform", "chipfit.pipeline", "chipfit.export", "chipfit.calibration"),
    "simulate": ("chipfit.pipeline", "chipfit.export", "chipfit.runtimes", "chipfit.calibration"),
    "runtimes": ("chipfit.pipeline", "chipfit.platform", "chipfit.graph", "chipfit.plan.record"),
}


def imports(path: Path) -> set[str]:
    """Modules that a file imports while running; imports for type hints only do not count."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(n)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for part in block.body
        for n in ast.walk(part)
    }
    found = set()
    for n in ast.walk(tree):
        if id(n) in typing_only:
            continue
        if isinstance(n, ast.Import):
            found |= {a.name for a in n.names}
        elif isinstance(n, ast.ImportFrom) and n.module:
            found |= {n.module, *(f"{n.module}.{a.name}" for a in n.names)}
    return found


@pytest.mark.parametrize("folder", BORDERS)
def test_a_layer_imports_nothing_above_it(folder):
    crossed = []
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        for module in sorted(imports(path)):
            if any(module == b or module.startswith(b + ".") for b in BORDERS[folder]):
                crossed.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert crossed == []


def test_only_the_writer_and_the_runtimes_know_onnx():
    allowed = {"export", "runtimes"}
    knows = [
        p.relative_to(PACKAGE)
        for p in PACKAGE.rglob("*.py")
        if any(m.partition(".")[0] in ("onnx", "onnxruntime") for m in imports(p))
    ]
    assert [str(p) for p in knows if p.parts[0] not in allowed] == []


def test_every_module_has_a_docstring():
    bare = [
        p.relative_to(ROOT)
        for p in PACKAGE.rglob("*.py")
        if p.read_text().strip() and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert [str(p) for p in bare] == []
