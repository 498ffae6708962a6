"""Progress in a notebook: a bar of HTML that is replaced in place."""

import re
import types

import pytest

from chipfit.calibration.progress import Progress
from chipfit.screen import notebook


class Notebook:
    """The part of IPython that shows HTML, with everything that it has shown."""

    def __init__(self, kernel: object) -> None:
        self.shown: list[str] = []
        self.HTML = str
        self.get_ipython = lambda: types.SimpleNamespace(kernel=kernel)
        self.display = types.SimpleNamespace(HTML=str, display=self.show)

    def show(self, html: str, display_id: bool) -> "Notebook":
        assert display_id  # otherwise it cannot be replaced
        self.shown.append(html)
        return self

    def update(self, html: str) -> None:
        self.shown.append(html)


@pytest.fixture
def cell(monkeypatch):
    shell = Notebook(object())
    monkeypatch.setitem(notebook.sys.modules, "IPython", shell)
    monkeypatch.setattr(notebook, "PAUSE", 0.0)
    return shell


def test_batches_move_the_bar_and_a_line_takes_its_place(cell, capfd):
    assert list(Progress(True).count("calibrate", "abc", 3)) == ["a", "b", "c"]
    values = [m[1] for html in cell.shown if (m := re.search(r'<progress max="3" value="(\d)">', html))]
    assert values == ["0", "1", "2", "3"]
    assert "calibrate" in cell.shown[0] and "1 of 3, 0 s left" in cell.shown[1]
    assert re.fullmatch(r"<small>chipfit calibrate: 3 batches in .* batches/s</small>", cell.shown[-1])
    assert capfd.readouterr().err == ""


def test_a_stage_of_unknown_length_has_an_endless_bar(cell):
    with Progress(True).stage("<round>"):
        pass
    assert "<progress></progress>" in cell.shown[0] and "&lt;round&gt;" in cell.shown[0]
    assert re.fullmatch(r"<small>chipfit &lt;round&gt;: 0\.0 s</small>", cell.shown[-1])


def test_nothing_is_shown_that_nobody_wants(cell):
    list(Progress(False).count("calibrate", "abc", 3))
    assert cell.shown == []


def test_many_fast_batches_are_few_updates(cell, monkeypatch):
    monkeypatch.setattr(notebook, "PAUSE", 60.0)
    list(Progress(True).count("calibrate", range(1000), 1000))
    assert len(cell.shown) == 3  # the first, the last, and the line


def test_a_console_of_ipython_is_a_terminal(monkeypatch, capfd):
    shell = Notebook(None)
    monkeypatch.setitem(notebook.sys.modules, "IPython", shell)
    list(Progress(True).count("calibrate", "abc", 3))
    assert shell.shown == [] and "calibrate: 3 batches" in capfd.readouterr().err
