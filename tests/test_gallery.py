"""The table of trained networks names what there is, and its metrics are those of paper."""

import ast
from pathlib import Path

import numpy as np
import pytest
from benchmarks.gallery import metrics
from benchmarks.gallery.entries import ENTRIES, PLATFORMS, SOURCES

from chipfit.platform.load import names

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gallery"


def functions(file):
    return {n.name for n in ast.parse((FOLDER / file).read_text()).body if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_names_sources_inputs_and_metrics_that_exist(name):
    entry = ENTRIES[name]
    assert {entry.source, *entry.needs, *(f.partition(":")[0] for f in [entry.shipped] if f)} <= SOURCES.keys()
    assert ":" in entry.file or entry.file in functions("modules.py")
    assert entry.inputs.keys() <= functions("inputs.py") and entry.metric.keys() <= functions("metrics.py")
    assert {*entry.platforms} <= PLATFORMS.keys() <= {*names()}


def test_an_overlap_counts_what_both_have_among_what_one_has():
    scores = [np.array([[0.9, 0.8, 0.1, 0.7]])], [np.array([[0.9, 0.2, 0.6, 0.8]])]
    assert metrics.overlap(*scores, None) == (1.0, 2 / 4)
    assert metrics.overlap(*scores, None, above=2.0) == (1.0, 1.0)


def test_an_accuracy_is_the_share_of_labels_that_are_largest():
    want, got = [np.eye(3)], [np.eye(3)[[0, 0, 2]]]
    assert metrics.accuracy(want, got, np.array([0, 1, 2])) == (1.0, pytest.approx(2 / 3))
