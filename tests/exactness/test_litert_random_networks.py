"""A share of the random networks of `make random` on LiteRT's three families of kernels."""

from __future__ import annotations

import pytest
from benchmarks.random_networks import Tally, check

from chipfit.registry import lookup
from tests.exactness.test_random_networks import off_by_one

pytest.importorskip("ai_edge_litert")


@pytest.mark.parametrize("part", range(4))  # 20 networks in parts, so that workers share them
def test_no_integer_of_a_random_network_differs_from_litert(part):
    tally = Tally([check(100 + 5 * part + k, "litert") for k in range(5)])
    assert not [line for o in tally.outcomes for line in o.faults], tally.report()
    assert len(tally.refused) <= 1, tally.report()


@pytest.mark.parametrize("family", ["litert_reference", "litert_optimized", "litert_xnnpack"])
def test_a_kernel_of_a_family_that_is_wrong_is_noticed(monkeypatch, family):
    kernels = lookup("kernels", family).kernels
    monkeypatch.setitem(kernels, "Conv2D", off_by_one(kernels["Conv2D"]))
    runtime = family.replace("litert_xnnpack", "litert")
    lines = (line for seed in range(100, 115) for line in check(seed, "litert").faults)
    assert any(line.startswith(f"{runtime}: Conv2D") for line in lines)
