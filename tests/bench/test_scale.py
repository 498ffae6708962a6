"""The page about costs is what its inputs give, and its arithmetic is that of a pocket calculator."""

import doctest

import pytest
import yaml
from benchmarks import scale

from tests.bench.test_networks import SIZES

UNITS = yaml.safe_load(scale.UNITS.read_text())


def test_the_page_is_what_the_inputs_give():
    assert scale.PAGE.read_text() == scale.page(UNITS)


def test_its_examples_hold_and_its_networks_are_ours():
    assert doctest.testmod(scale) == (0, 6)
    published = {name: macs for name, side, _, macs in SIZES if side == 224}
    assert {m: u["macs"] for m, u in UNITS["models"].items()} == published


def test_a_resnet_18_by_hand():
    """Each figure of one row, with ratio r of rounding: 90 x 1,281,167 images thrice, 50 x 50,000 once."""
    r, read = UNITS["measured"]["rounding_ratio"], UNITS["measured"]["read_seconds"]
    c = scale.cost("resnet18", UNITS)
    assert c.compute == pytest.approx(2 * 1.814e9 * r / (312e12 * 0.3) * (345_915_090 + 2_500_000), rel=1e-6)
    assert c.decode == pytest.approx(117_805_030 * read, rel=1e-6)
    told = {**UNITS, "measured": {**UNITS["measured"], "read_seconds": 0.0, "start_seconds": 0.0}}
    alone, eight = (scale.cost("resnet18", told).seconds(n, told) for n in (1, 8))
    assert alone / eight == pytest.approx(8 * 0.95**3, rel=0.1)  # runtimes aside
