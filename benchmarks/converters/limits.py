"""Limits of one network beside the other tool's file, and what misses them."""

import math
import statistics
from typing import Any

DECIBELS = 0.5  #: largest loss of signal over noise [dB]
LIMITS = {"size": 1.03, "time": 1.1}  #: largest ratios to the other tool's file
MEDIAN_GAIN = 1.0  #: least median gain in signal over noise of all networks [dB]


def misses(r: dict[str, Any]) -> list[str]:
    """Return what is worse than the limits allow."""
    ours, tool = r["chipfit"], r["tool"]
    if "error" in ours:
        return ["refused"] if "error" not in tool else []
    if "error" in tool:
        return []
    found = [f"{gain(r):.1f} dB"] if gain(r) < -DECIBELS else []
    found += ["float operators"] if ours["floats"] and not tool["floats"] else []
    ratios = {what: ours[what] / tool[what] for what in LIMITS}
    return found + [f"{what} {ratios[what]:.2f}x" for what, most in LIMITS.items() if ratios[what] > most]


def gain(r: dict[str, Any]) -> float:
    """Return the gain in signal over noise over the tool [dB]."""
    return r["chipfit"]["decibels"] - r["tool"]["decibels"]


def line(name: str, r: dict[str, Any]) -> str:
    """Return one line of the printed table."""

    def cells(f: dict[str, Any]) -> str:
        if "error" in f:
            return f"{f['error'][:44]:44}"
        spent = f"{f['time']:7.0f} us" if "time" in f else 10 * " "
        return f"{f['decibels']:6.1f} dB {f['floats']:3} floats {f['size']:7} B {spent}   "

    return f"{name:28} {cells(r['chipfit'])} | {cells(r['tool'])} {', '.join(misses(r))}"


def summary(results: dict[str, Any]) -> str:
    """Return how many networks are within the limits, and the median gain."""
    both = [r for r in results.values() if not any("error" in f for f in r.values())]
    missed = sum(bool(misses(r)) for r in results.values())
    gains = statistics.median(gain(r) for r in both) if both else math.nan
    words = f"{len(results)} networks, {len(both)} quantized by both tools, {missed} outside a limit"
    return f"{words}, median gain {gains:.2f} dB (at least {MEDIAN_GAIN:g})"
