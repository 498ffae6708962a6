"""Measure wall-clock time, processor time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def both_clocks(work: Callable[[], object]) -> tuple[float, float]:
    """Return wall-clock seconds and processor seconds of a call."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def grown_mib(work: Callable[[], object]) -> float:
    """Return how much the peak of the resident size during `work` lies above the size before [MiB] (Linux only)."""
    Path("/proc/self/clear_refs").write_text("5")  # forget earlier peaks
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    """Return VmRSS (now) or VmHWM (its peak), not `ru_maxrss`, which a new process inherits from its parent."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024
