"""The commands of the tutorials run in their order, and the captures show these commands."""

import re
import runpy
from pathlib import Path

import pytest
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
