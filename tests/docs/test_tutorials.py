"""The commands of the tutorials run in their order, and the captures show these commands."""

import os
import re
import runpy
from pathlib import Path

import pytest
from benchmarks.walk import DOORS, NETWORKS, extras, integers, own_blocks, page, steps
from typer.testing import CliRunner

from chipfit.cli.app import app
from chipfit.cli.output import EXAMPLES

ROOT = Path(__file__).parents[2]
TOOLS = runpy.run_path(str(ROOT / "docs/captures.py"))
#: a name of XML, and the maker of the drawing in a comment
ADDRESSES = {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
CAPTURES = sorted((ROOT / "docs/terminal").glob("*.svg"))


def test_the_commands_of_the_tutorial_run_in_their_order(tmp_path, monkeypatch, drop_ins):
    TOOLS["prepare"](tmp_path)
    monkeypatch.chdir(tmp_path)
    commands = TOOLS["commands"]()
    assert len(commands) >= 6
    for command in commands:
        done = CliRunner().invoke(app, command.split()[1:])
        assert done.exit_code == 0, f"{command}\n{done.output}"
    assert {"fitted", "mixed", "both.html"} <= {p.name for p in tmp_path.iterdir()}


def test_the_examples_of_help_run_in_their_order(tmp_path, monkeypatch, drop_ins):
    TOOLS["prepare"](tmp_path)
    (tmp_path / "test.npz").rename(tmp_path / "train.npz")
    (tmp_path / "test.npz").write_bytes((tmp_path / "train.npz").read_bytes())
    monkeypatch.chdir(tmp_path)
    for name, lines in EXAMPLES.items():
        assert all(line.startswith(f"chipfit {name}") for line in lines)
        for line in lines if not name.startswith(("bench", "demo")) else ():
            done = CliRunner().invoke(app, line.split()[1:])
            assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception}"


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_shows_examples_whose_options_exist(name):
    shown = " ".join(CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200"}).output.split())
    for line in EXAMPLES[name]:
        assert line in shown
        assert {w for w in line.split() if w.startswith("--")} <= set(re.findall(r"--[a-z-]+", shown))


@pytest.mark.parametrize("file", CAPTURES, ids=lambda p: p.stem)
def test_a_capture_shows_a_command_of_the_page_and_loads_nothing(file):
    text = file.read_text()
    words = " ".join(re.sub(r"<[^>]+>", " ", text).replace("&#160;", " ").split())
    assert any(command in words for command in TOOLS["commands"]() if command.split()[1] == file.stem)
    assert "@import" not in text and set(re.findall(r"https?://[^\s\"<)]+", text)) <= ADDRESSES


def test_a_terminal_is_drawn_with_what_was_printed():
    drawn = TOOLS["svg"]("chipfit lint a:b", "\x1b[1mconv1\x1b[0m <int>\n")
    assert "conv1" in drawn and "&lt;int&gt;" in drawn and "chipfit&#160;lint&#160;a:b" in drawn


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_walk_changes_the_network_of_a_tutorial_and_nothing_else(door, name):
    before, after = (
        "".join(text for _, _, text in blocks) for blocks in (page(door), own_blocks(door, NETWORKS[name]))
    )
    left = set(before.splitlines()) & set(after.splitlines())
    kept = {
        line for line in before.splitlines() if re.match(r"result|check|assert|print|\$ chipfit (doctor|verify)", line)
    }
    assert kept and kept <= left and f'$ pip install "chipfit[{extras(door)}]"' in left
    files, commands = steps(own_blocks(door, NETWORKS[name]))
    assert {line.split()[1] for line in commands if line.startswith("python")} <= set(files)
    assert "etworks import" in str(files) and not re.search(r"(3, 32, 32|32, 32, 3|3, ?16, 16)\b", f"{files}{commands}")


def test_an_own_network_walks_through_a_tutorial(tmp_path, monkeypatch, capsys):
    """With the chipfit that is installed here; `make walk` does all of it, from the wheel."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "benchmarks/own_networks")
    files, commands = steps(own_blocks("pytorch", NETWORKS["sensor"]))
    (code,) = (files[line.split()[1]] for line in commands)
    exec(compile(code, "pytorch.md", "exec", dont_inherit=True), {"__name__": "page"})
    differing, compared = integers(capsys.readouterr().out)
    assert differing == 0 and compared > 100_000 and {"net.tflite", "report.html"} <= {*os.listdir()}
    assert integers("3 of 1,000 integers differ\n1 of 2 integers differ") == (4, 1_002)
    with pytest.raises(ValueError, match=r"No integers were compared\."):
        integers("refused")
