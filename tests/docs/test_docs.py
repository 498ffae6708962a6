"""Every Python block of README and docs runs, page by page, top to bottom; every shell line names what exists."""

import doctest
import inspect
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

import chipfit
from chipfit.registry import entries
from tests.docs.pages import PAGES, ROOT, blocks, name, shell_lines

BROWSER = runpy.run_path(str(ROOT / "docs/browser.py"))


def with_python(page: Path) -> bool:
    return any(language == "python" for language, *_ in blocks(page))


@pytest.mark.parametrize("page", [p for p in PAGES if with_python(p)], ids=name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch, drop_ins, precisions):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {"__name__": "page"}
    for language, rest, text, line in blocks(page):
        if title := re.search(r'title="([^"]+)"', rest):  # a file that the page shows and then uses
            (tmp_path / title[1]).write_text(text)
        elif language == "python":
            exec(compile("\n" * line + text, str(page), "exec", dont_inherit=True), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_range_rules_that_a_page_names_exist(page):
    said = re.findall(r'\brule="(\w+)"((?:`, `"\w+")*)', page.read_text())
    named = {rule for first, more in said for rule in (first, *re.findall(r"\w+", more))}
    assert named <= {*entries("range")}, f"{page}: no such range rule"


@pytest.mark.parametrize(("page", "line"), shell_lines())
def test_a_shell_line_names_a_command_that_exists(page, line):
    words = shlex.split(line)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets), f"{page}: no such make target"
    elif words[0] == "chipfit":
        from typer.main import get_command

        from chipfit.cli.app import app

        command, rest = get_command(app), words[1:]
        while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
            assert rest[0] in command.commands, f"{page}: chipfit has no command {rest[0]}"
            command, rest = command.commands[rest[0]], rest[1:]
        known = {"--help", *(o for p in command.params for o in p.opts + p.secondary_opts)}
        assert {w.split("=")[0] for w in rest if w.startswith("-")} <= known, f"{page}: no such option of `{line}`"
    elif words[0].endswith("/pytest"):
        file, _, test = next(w for w in words if w.startswith("tests/")).partition("::")
        assert (ROOT / file).exists(), f"{page}: no such tests"
        assert not test or f"def {test}(" in (ROOT / file).read_text(), f"{page}: no such test"
    elif words[0] == "python":
        script = f"{words[2].replace('.', '/')}.py" if words[1] == "-m" else words[1]
        assert (ROOT / script).is_file(), f"{page}: no such script"
    else:
        assert words[0] in {"pip", "git", "cd", "export", "sh"}, f"{page}: what is {words[0]}?"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site; warnings of mkdocs, about links, anchors and docstrings, are errors."""
    folder = tmp_path_factory.mktemp("site")
    BROWSER["build"](folder)
    return folder


def test_the_site_builds_without_a_broken_link(site):
    page = (site / "api.html").read_text()
    assert "Fit a trained PyTorch" in page and "calibration" in page  # taken from docstrings
    home = (site / "index.html").read_text()
    assert 'data-prompt="$ "' in home and not re.search(r'class="gp">\s*\$', home)  # the copy button leaves it out
    assert "search_on_disk.js" in home and (site / "search_on_disk.js").is_file()  # search without a server
    assert json.loads((site / "search/search_index.js").read_text().removeprefix("var __index = "))["docs"]
    assert (site / "notebooks/quickstart.html").is_file() and "notebooks/quickstart.html" in home


PAGES_SEEN = "index", "tutorials/command-line", "settings", "notebooks/quickstart"


@pytest.mark.chromium
@pytest.mark.parametrize("names", [PAGES_SEEN, pytest.param(["**/*"], marks=pytest.mark.slow)], ids=["few", "all"])
def test_nothing_on_the_site_is_pale_or_cut_off_on_a_desktop_and_a_phone(site, names):
    """No page is wider than the screen, says anything on the console, or loads anything from elsewhere."""
    BROWSER["find"]() or pytest.skip("no chromium is installed")
    pages = [p for name in names for p in site.glob(f"{name}.html") if p.name != "404.html"]
    counts, found = BROWSER["check"](pages)
    assert found == []
    assert counts["texts"] > 600 * len(pages) and counts["images"] > 20 and len(pages) >= len(names)


#: part of a page -> what is wrong with it
FAULTS = {
    '<p style="color: #888">pale</p>': "'pale' in p has a contrast of 3.54, below 4.5",
    '<div style="opacity: .5">faint</div>': "'faint' in div has a contrast of 3.98, below 4.5",
    '<svg><rect width="99" height="99"/><text y="50">dark</text></svg>': "'dark' in text has a contrast of 1.00, below",
    '<p style="overflow: hidden; width: 3em; white-space: nowrap">a long word</p>': "'a long word' in p is cut off by",
    '<p style="width: 9000px">wide</p>': "the page is 9",
    '<img src="none.png" alt="a picture">': "image none.png is not loaded",
    '<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">': "has no alternative text",
    '<script>console.error("no")</script>': "console: ['no'] (desktop light, desktop dark, phone light, phone dark)",
    "<script>nothing()</script>": "exception: ReferenceError: nothing is not defined",
    '<script src="none.js"></script>': "request failed: net::ERR_FILE_NOT_FOUND",
    '<a href="x"></a>': "a has no name",
    "<h1>two</h1>": "2 first headings",
    "": "the page is not dark (desktop dark, phone dark)",
}


@pytest.mark.chromium
def test_every_fault_of_a_page_is_found(tmp_path):
    BROWSER["find"]() or pytest.skip("no chromium is installed")
    start = '<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    whole = "<title>t</title><style>@media (prefers-color-scheme: dark) {body {background: #111; color: #eee}}</style>"
    (tmp_path / "good.html").write_text(f"{start}{whole}<body><h1>Good</h1>")
    (tmp_path / "bad.html").write_text(f"{start}<title>t</title><body><h1>Bad</h1>{''.join(FAULTS)}")
    counts, found = BROWSER["check"]([tmp_path / "good.html", tmp_path / "bad.html"])
    assert [fault for fault in FAULTS.values() if not any(fault in line for line in found)] == []
    assert not [line for line in found if line.startswith("good.html")] and counts["texts"] > 4
    assert BROWSER["main"]([str(tmp_path / "bad.html")]) == 1


def test_the_python_page_has_every_public_name():
    listed = {name for names in runpy.run_path(str(ROOT / "docs/generate.py"))["API"].values() for name in names}
    own = {n for n in chipfit.__all__ if n == "errors" or not home_of(n).startswith("chipfit.mct")}
    assert listed == own - {"BEST", "ChipfitError", "__version__"}  # constants, and a class that `errors` has


def test_every_public_name_has_an_example_which_the_tests_run():
    found = runpy.run_path(str(ROOT / "docs/generate.py"))["API"].values()
    names = [name for group in found for name in group if name != "errors"]
    examples = {name: doctest.DocTestParser().get_examples(inspect.getdoc(getattr(chipfit, name))) for name in names}
    assert len(names) > 20 and [name for name, shown in examples.items() if not shown] == []


def home_of(name: str) -> str:
    return getattr(getattr(chipfit, name), "__module__", "chipfit.constants")


#: pages to look things up in, and tables that programs write; every other page is read from top to bottom
REFERENCES = (
    "converters files from-mct gallery glossary hardware-settings operators platforms/support settings zoo".split()
)
MOST_WORDS = 900


def words_of(page: Path) -> int:
    """Return the number of words of a page outside its blocks of code."""
    return len(re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).split())


def test_no_page_is_longer_than_a_reader_has_patience_for():
    docs = ROOT / "docs"
    words = {str(p.relative_to(docs).with_suffix("")): words_of(p) for p in docs.rglob("*.md")}
    assert {page: n for page, n in words.items() if n > MOST_WORDS and page not in REFERENCES} == {}


def test_an_entry_of_the_changelog_is_one_line_and_a_release_at_most_sixty():
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    released = lines[lines.index("## 1.0.0") :]
    assert 20 < len(released) <= 60 and [line for line in lines if line[:1].isspace()] == []
    assert len(entries := [line for line in lines if line.startswith("- ")]) == len(set(entries)) > 20


def test_plots_show_the_figures_of_the_benchmarks():
    drawn = runpy.run_path(str(ROOT / "docs/drawings.py"))
    bits, hours, tools = drawn["few_bits"](), drawn["time"](), drawn["beside_tools"]()
    assert all(f">{x}<" in bits for x in ("ResNet-20, 3 bits", "39.01", "0.39", "81.16", "3.22"))
    assert all(f">{x}<" in hours for x in ("MobileNetV2", "0.82x", "1.50x"))
    assert tools.count("<circle") == 2 + 2 * 60
