"""The comparison with other tools' files names its networks without importing them, and says what is worse."""

import pytest
from benchmarks.beside_converters import compared
from benchmarks.converters import names
from benchmarks.converters.limits import misses, summary
from benchmarks.converters.torch_networks import NETWORKS


def figures(**changes):
    return {"decibels": 40.0, "floats": 0, "size": 1000, "time": 10.0, **changes}


def test_every_network_is_named():
    assert [n for n in names() if n.startswith("torch/")] == [f"torch/{n}" for n in NETWORKS]
    assert len(names()) == 60


def test_what_is_worse_than_the_limits_allow_is_listed():
    assert misses({"chipfit": figures(), "tool": figures()}) == []
    worse = figures(decibels=39.0, floats=2, size=1040, time=12.0)
    assert misses({"chipfit": worse, "tool": figures()}) == ["-1.0 dB", "float operators", "size 1.04x", "time 1.20x"]
    assert misses({"chipfit": {"error": "no"}, "tool": figures()}) == ["refused"]
    assert "2 networks, 1 quantized by both tools, 1 outside a limit, median gain -1.00 dB" in summary(
        {"a": {"chipfit": worse, "tool": figures()}, "b": {"chipfit": {"error": "no"}, "tool": {"error": "no"}}}
    )


@pytest.mark.slow
def test_a_network_goes_through_both_tools():
    r = compared("torch/perceptron")
    assert not any("error" in f for f in r.values()), r
    assert all(30 < f["decibels"] < 80 and f["size"] > 5000 and f["time"] > 0 for f in r.values())
