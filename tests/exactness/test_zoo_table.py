"""The zoo of `benchmarks/zoo`: what is stored of it holds the limits, and one architecture goes the whole way here."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from benchmarks.zoo import one
from benchmarks.zoo.networks import ENTRIES, Entry
from torch import nn

from tests.build import model_of

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "benchmarks/zoo/results.json").read_text())


def test_every_architecture_has_a_result():
    assert list(FOUND) == list(ENTRIES) and len(ENTRIES) >= 60


@pytest.mark.parametrize(("platform", "share"), [("ort_cpu", 0.97), ("tflite_int8", 0.85)])
def test_nearly_all_come_to_the_end_and_the_rest_is_refused_with_a_reason(platform, share):
    ends = {name: r[platform] for name, r in FOUND.items()}
    assert sum(r["stage"] != "" for r in ends.values()) >= 0.98 * len(ends)
    assert sum(r["stage"] == "run" for r in ends.values()) >= share * len(ends)
    assert {name: r["error"] for name, r in ends.items() if r["error"] and not r["error"][0].isupper()} == {}
    assert [name for name, r in ends.items() if bool(r["error"]) == (r["stage"] == "run")] == []


@pytest.mark.parametrize("platform", one.PLATFORMS)
def test_no_integer_differs_but_behind_operators_in_float(platform):
    ran = {name: r[platform] for name, r in FOUND.items() if r[platform]["stage"] == "run"}
    assert {name: r["outside"] for name, r in ran.items() if r["outside"]} == {}
    assert {name: r["departures"] for name, r in ran.items() if r["departures"]} == {}
    assert all(r["integers"] and (r["float_ops"] or not r["differing"]) for r in ran.values())


def test_the_page_says_what_was_found():
    assert runpy.run_path(str(ROOT / "docs/generate.py"))["page"]("zoo.md") == (ROOT / "docs/zoo.md").read_text()


def test_an_architecture_goes_the_whole_way():
    for end in one.tried("own/recommender").values():
        assert (end["stage"], end["error"], end["outside"], end["departures"], end["opaque"]) == ("run", "", 0, [], [])
        assert 0.5 < end["share"] <= 1.0


def bent():
    """Return two layers with a function between that is computed in float; it takes no integers."""

    def forward(m, x):
        if not x.is_floating_point():
            raise KeyError("x")
        return m.second(torch.erf(m.first(x)))

    return model_of(forward, first=nn.Linear(4, 4, bias=False), second=nn.Linear(4, 4, bias=False))


def test_what_fails_is_told_with_its_type_and_what_is_counted_is_products(monkeypatch):
    monkeypatch.setitem(ENTRIES, "good", Entry("own", bent, lambda: torch.randn(4, 4)))
    monkeypatch.setitem(ENTRIES, "bad", Entry("own", bent, lambda: torch.ones(4, 4, dtype=torch.long)))
    assert {end["share"] for end in one.tried("good").values()} == {1.0}
    for end in one.tried("bad").values():
        assert (end["stage"], end["error"]) == ("", "RefusedCall") and "KeyError" in end["why"]
    monkeypatch.setattr(one.chipfit, "quantize", lambda *_, **__: {}["nothing"])
    for end in one.tried("good").values():
        assert (end["stage"], end["error"]) == ("", "bare KeyError") and "'nothing' (" in end["why"]
