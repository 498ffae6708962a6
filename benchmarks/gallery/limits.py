"""Limits of a network beside the usual tool, what misses them, and lines of text."""

from __future__ import annotations

from typing import Any

DECIBELS = 0.3  #: largest loss of signal over noise, where the task's metric is not better [dB]
SIZE, TIME = 1.02, 1.05  #: largest ratios to the tool's file
#: tools whose files have integer activations, and are held to the limits
TOOLS = ("static", "converter", "ai_edge", "shipped")


def misses(r: dict[str, Any]) -> list[str]:
    """Return what is worse than the limits allow."""
    if r.get("error"):
        return [r["error"]]
    found = [f"{r['outside']} integers differ"] if r["outside"] else []
    for tool in TOOLS:
        if tool in r and "error" not in r[tool]:
            found += [f"{what} than {tool}" for what in _beside(r["chipfit"], r[tool])]
    return found


def _beside(ours: dict[str, Any], tool: dict[str, Any]) -> list[str]:
    lost = tool["decibels"] - ours["decibels"]
    better = ours.get("quantized", 0) > tool.get("quantized", 0)
    found = [f"{lost:.1f} dB less"] if lost > DECIBELS and not better else []
    found += [f"{ours['size'] / tool['size']:.2f}x larger"] if ours["size"] > SIZE * tool["size"] else []
    return found + ([f"{tool['ratio']:.2f}x slower"] if tool["ratio"] > TIME else [])


def line(name: str, platform: str, r: dict[str, Any]) -> str:
    """Return one printed line of a network on a platform."""
    if r["stage"] != "run":
        return f"{name:24} {platform:14} {r['error']}: {r['why']}"
    cells = [f"{name:24} {platform:14} {100 * r['share']:.0f} % differing {r['outside']}/{r['differing']}"]
    for who in ("chipfit", *TOOLS, "dynamic"):
        f = r.get(who)
        if f and "error" in f:
            cells.append(f"{who} {f['error'][:60]}")
        elif f:
            cells.append(f"{who} {f['decibels']} dB {f.get('quantized', '')} {f['size']} B x{f.get('ratio', '')}")
    return " | ".join([*cells, f"{r['seconds']} s", ", ".join(misses(r)), "; ".join(r["departures"])[:200]])


def summary(results: dict[str, Any]) -> str:
    """Return how many files of each kind came how far."""
    rows = [r for of in results.values() for r in of.values()]
    run = [r for r in rows if r["stage"] == "run"]
    exact = sum(not r["outside"] for r in run)
    within = sum(not misses(r) for r in run)
    return (
        f"{len(results)} networks, {len(rows)} files, {len(run)} quantized, exported and run, "
        f"{exact} without a differing integer, {within} within all limits"
    )
