"""Take one network through the command line on one platform, and measure its file beside the usual tool's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.converters.measure import decibels, times
from benchmarks.gallery import inputs, metrics, modules, runs, tools
from benchmarks.gallery.entries import ENTRIES, PLATFORMS, SOURCES, Entry
from benchmarks.gallery.files import Missing, path_of

import chipfit
from chipfit.errors import ChipfitError

_LIMIT = 400  #: of `chipfit quantize` [s]
_VERIFIED = 8  #: number of unseen samples of which every integer is compared


def tried(name: str, platform: str) -> dict[str, Any]:
    """Return the last stage reached ("", "quantized", "run"), figures of chipfit and of the tool, and why it ended."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    entry = ENTRIES[name]
    source = SOURCES[entry.source]
    out: dict[str, Any] = {"task": entry.task, "from": source.get("pip") or source["github"], "stage": ""}
    out |= {"licence": source["licence"], "samples": list(entry.samples)}
    try:
        with tempfile.TemporaryDirectory() as folder:
            return out | _measured(entry, platform, Path(folder))
    except Missing as e:
        return out | {"error": "missing", "why": str(e)}


def _measured(entry: Entry, platform: str, folder: Path) -> dict[str, Any]:
    for source in entry.needs:
        modules.available(source)
    network = str(path_of(entry.file)) if ":" in entry.file else f"benchmarks.gallery.modules:{entry.file}"
    (kind, arguments), bare = next(iter(entry.inputs.items())), entry.inputs.get("bare", ())
    calibration, tests, labels = getattr(inputs, kind)(entry.samples, **arguments)
    batches, unseen = runs.samples(calibration, bare), runs.samples(tests, bare)
    in_float = runs.floats_of(network)
    floats = runs.joined([in_float(x) for x in unseen])
    done = quantized(network, platform, batches, len(calibration) == 1 and not bare, entry.options, folder)
    if done.returncode:
        said = [line.strip(" │\n") for line in done.stderr.splitlines() if line.startswith("│")]
        kind = "bug" if done.returncode == 70 or not said else "refused"
        return {"error": kind, "why": " ".join(said)[:600] or done.stderr[-600:] or f"status {done.returncode}"}
    file = folder / "out" / f"model{PLATFORMS[platform]}"
    out: dict[str, Any] = {"stage": "quantized", "share": 0.0, "error": "", "why": ""}
    score = partial(_figures, floats, labels, entry.metric)
    try:
        result = chipfit.load(folder / "out" / "plan")
        out["share"] = round(result.report.integer_share, 4)
        tests = [tuple(map(torch.from_numpy, x)) for x in unseen[:_VERIFIED]]
        seen = result.verify([x if len(x) > 1 else x[0] for x in tests], batches=_VERIFIED, path=file)
        outside = sum(r.op_differing for r in seen.rows if not r.float_ops)
        out |= {"integers": seen.integers, "differing": sum(r.op_differing for r in seen.rows), "outside": outside}
        out |= {"departures": seen.departures[:3], "not_compared": seen.not_compared}
    except ChipfitError as e:
        return out | {"error": type(e).__name__, "why": str(e)[:600]}
    ours = runs.session(file)
    out |= {"stage": "run", "chipfit": score(runs.joined([ours(x) for x in unseen]), file.stat().st_size)}
    for tool, make in tools.of(network, platform, entry.shipped).items():
        out[tool] = _beside(make, batches, folder / f"{tool}{file.suffix}", score, unseen, ours, out["chipfit"])
    return out


def quantized(
    network: str, platform: str, batches: list[Any], single: bool, options: tuple[str, ...], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run `chipfit quantize` on calibration samples in a file, or in a module where a network has several inputs."""
    data = folder / "calibration.npz"
    if single:
        np.savez(data, x=np.concatenate([x[0] for x in batches]))
    else:
        np.savez(data, **{f"{k}.{j}": part for k, x in enumerate(batches) for j, part in enumerate(x)})
    given = str(data) if single else "benchmarks.gallery.runs:stored"
    command = [sys.executable, "-m", "chipfit", "quantize", network, "--data", given, "--platform", platform]
    command += ["--out", str(folder / "out"), "--no-verify", *options]
    environment = {**os.environ, "GALLERY_SAMPLES": str(data), "COLUMNS": "4000"}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer in {_LIMIT} s")


def _figures(
    floats: list[np.ndarray], labels: np.ndarray | None, metric: dict[str, Any], results: list[np.ndarray], size: int
) -> dict[str, Any]:
    """Return signal over noise, the metric in float and quantized, and the size of a file."""
    results = runs.arranged(results, floats)
    out = {"decibels": decibels(floats, results), "size": size}
    for kind, arguments in metric.items():
        want, got = getattr(metrics, kind)(floats, results, labels, **(arguments or {}))
        out |= {"metric": kind, "float": round(want, 4), "quantized": round(got, 4)}
    return out


def _beside(
    make: Callable[[list[Any], Path], None],
    batches: list[Any],
    path: Path,
    score: Callable[..., dict[str, Any]],
    unseen: list[Any],
    ours: Callable[[Any], Any],
    mine: dict[str, Any],
) -> dict[str, Any]:
    """Return the figures of the tool's file, with the time of a call of both [us]."""
    try:
        make(batches, path)
        theirs = runs.session(path)
        out = score(runs.joined([theirs(x) for x in unseen]), path.stat().st_size)
        mine_us, theirs_us = times(partial(ours, unseen[0]), partial(theirs, unseen[0]), 0.4)
        mine.setdefault("time", mine_us)
        return out | {"time": theirs_us, "ratio": round(mine_us / theirs_us, 3)}
    except Exception as e:  # what a tool cannot do is a result of the table
        return {"error": f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]}
