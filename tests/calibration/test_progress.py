"""What a long call shows: a live line on a terminal, one line per stage in logs and notebooks, nothing unasked."""

import io
import re
import sys

import pytest
import torch
from torch import nn

import chipfit
from chipfit.calibration.progress import Progress
from chipfit.errors import DataError

NET = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval()
DATA = [torch.ones(2, 3, 4, 4) * k for k in range(5)]


class WithLength:
    def __len__(self):
        return 5

    def __iter__(self):
        return iter(DATA)


@pytest.mark.parametrize("data", [DATA, WithLength(), lambda: iter(DATA), (x for x in DATA)], ids=range(4))
def test_a_log_gets_one_line_per_stage(data, capsys):
    chipfit.quantize(NET, data)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["chipfit capture", "chipfit calibrate", "chipfit ranges"]
    assert re.fullmatch(r"chipfit capture: \d+\.\d s", lines[0])
    assert re.fullmatch(r"chipfit calibrate: 5 batches in \d+\.\d s, \d+\.\d batches/s", lines[1])


def test_nothing_is_shown_unasked(capsys):
    chipfit.quantize(NET, DATA, progress=False)
    assert capsys.readouterr().err == ""


def terminal(monkeypatch, total):
    """What a terminal has shown of five batches, without control sequences."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    from rich import progress
    from rich.console import Console

    frames, console = [], Console(width=80, record=True, file=io.StringIO())
    real = progress.Progress.get_renderable
    monkeypatch.setattr(progress.Progress, "get_renderable", lambda self: frames.append(self) or real(self))
    for k, _ in enumerate(Progress(wanted=True).count("calibrate", range(5), total)):
        if k == 3:
            (live,) = set(frames)
            console.print(live.make_tasks_table(live.tasks))
    return console.export_text()


def test_a_terminal_shows_percent_and_time_left_where_the_number_is_known(monkeypatch):
    text = terminal(monkeypatch, 5)
    assert "calibrate" in text and "60 %" in text and re.search(r"\d:\d\d:\d\d|-:--:--", text)


def test_a_terminal_shows_count_and_rate_where_it_is_not(monkeypatch):
    text = terminal(monkeypatch, None)
    assert re.search(r"calibrate.* 3 batches, [\d.]+ batches/s", text) and "%" not in text


def test_an_error_in_the_data_ends_the_line(capsys):
    with pytest.raises(DataError, match="wrong shape"):
        chipfit.quantize(NET, [*DATA, torch.zeros(1, 5, 9, 9)])
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["chipfit capture"]
