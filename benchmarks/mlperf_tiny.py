"""Quantize MLPerf Tiny's networks from their float files by one command each, beside the published integer files.

    python benchmarks/mlperf_tiny.py [--repositories DIR] [--only NAME ...]

The command is `chipfit quantize FILE --data SAMPLES --platform tflm_cmsis_nn --limit ram=... --limit flash=...`, with
the arena and the size of the published file. Both integer files run on TensorFlow Lite Micro, on the same inputs, which
are new to calibration. Networks, inputs and metrics are those of `make gallery`: accuracy on labelled samples for
keywords, CIFAR-10 and the wake word; for persons the agreement with the float network's class, for anomalies the cosine
with its output (there are no labelled samples). Files are downloaded into the gallery's folder, or read from git
directories DIR/OWNER+NAME/repo.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from benchmarks.gallery import files, inputs, metrics, runs
from benchmarks.gallery.entries import ENTRIES, Entry
from benchmarks.gallery.files import path_of
from benchmarks.gallery.one import quantized
from rich.console import Console
from rich.table import Table

import chipfit
from chipfit.runtimes.tflm import Tflm

PLATFORM = "tflm_cmsis_nn"
NETWORKS = ["kws", *(f"{n}_{form}" for n in ("resnet8", "person", "anomaly") for form in ("keras", "tflite"))]
NETWORKS += ["wake_word_keras"]


@dataclass(frozen=True)
class File:
    """An integer file on TensorFlow Lite Micro."""

    quality: float  #: by the network's metric
    decibels: float  #: signal over noise of the first output
    size: int  #: [byte]
    arena: int  #: [byte]


@dataclass(frozen=True)
class Row:
    """A network, and its two integer files."""

    name: str
    metric: str
    in_float: float  #: quality of the float network
    published: File
    own: File

    @property
    def no_worse(self) -> bool:
        """True where neither quality nor size nor arena is worse than that of the published file."""
        a, b = self.own, self.published
        return a.quality >= b.quality and a.size <= b.size and a.arena <= b.arena


def micro(path: Path) -> runs.Run:
    """Return a function that runs one sample on TensorFlow Lite Micro; integers are (de)quantized here."""
    from tflite_micro.python.tflite_micro import runtime

    interpreter = runtime.Interpreter.from_file(str(path), arena_size=1 << 24)
    ends = [detail(interpreter.get_input_details(0)), detail(interpreter.get_output_details(0))]

    def run(x: runs.Sample) -> list[np.ndarray]:
        part = x[0]
        if tuple(ends[0]["shape"]) != part.shape:
            part = part.reshape(ends[0]["shape"])
        interpreter.set_input(runs.codes(part, ends[0]), 0)
        interpreter.invoke()
        return [runs.reals(interpreter.get_output(0), ends[1])]

    return run


def detail(found: dict[str, Any]) -> dict[str, Any]:
    """Return an entry as LiteRT's interpreter has it."""
    q = found["quantization_parameters"]
    known = (float(q["scales"][0]), int(q["zero_points"][0])) if len(q["scales"]) else (0.0, 0)
    return {"shape": found["shape"], "dtype": found["dtype"], "quantization": known}


def compared(name: str, entry: Entry, folder: Path) -> Row:
    """Quantize one network, and measure its file and the published one."""
    kind, arguments = next(iter(entry.inputs.items()))
    calibration, tests, labels = getattr(inputs, kind)(entry.samples, **arguments)
    batches, unseen = runs.samples(calibration), runs.samples(tests)
    network = str(path_of(entry.file))
    floats = runs.joined(list(map(runs.floats_of(network), unseen)))
    size, needed = path_of(entry.shipped).stat().st_size, Tflm.arena(path_of(entry.shipped).read_bytes())
    limits = "--limit", f"ram={needed}", "--limit", f"flash={size}"
    done = quantized(network, PLATFORM, batches, True, (*entry.options, *limits), folder)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    ((metric, options),) = entry.metric.items()

    def measured(path: Path) -> tuple[float, File]:
        results = runs.arranged(runs.joined(list(map(micro(path), unseen))), floats)
        in_float, quality = getattr(metrics, metric)(floats, results, labels, **options)
        noise = float(((results[0] - floats[0]) ** 2).mean())
        decibels = 10 * np.log10(float(floats[0].var()) / noise) if noise else np.inf
        return in_float, File(quality, decibels, path.stat().st_size, Tflm.arena(path.read_bytes()))

    own = chipfit.load(folder / "out" / "plan").export(folder / "own.tflite", batch=1)
    in_float, published = measured(path_of(entry.shipped))
    return Row(name, metric, in_float, published, measured(own)[1])


def shown(rows: list[Row]) -> Table:
    """Return the table."""
    pairs = [f"{what} {whose}" for what in ("quality", "dB", "file", "arena") for whose in ("published", "chipfit")]
    table = Table("network", "metric", "float", *pairs, "no worse", box=None)
    for r in rows:
        both = (r.published, r.own)
        cells = [f"{100 * f.quality:.2f}" for f in both] + [f"{f.decibels:.1f}" for f in both]
        cells += [f"{f.size:,}" for f in both] + [f"{f.arena:,}" for f in both]
        table.add_row(r.name, r.metric, f"{100 * r.in_float:.2f}", *cells, "yes" if r.no_worse else "NO")
    return table


def main() -> int:
    """Print the table, and return 1 where a file is worse than the published one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=NETWORKS, metavar="NAME")
    parser.add_argument("--repositories", metavar="DIR", help="git directories OWNER+NAME/repo, read before cloning")
    a = parser.parse_args()
    if a.repositories:
        files.REPOSITORIES = a.repositories
    rows = []
    for name in a.only:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compared(name, ENTRIES[name], Path(folder)))
    Console(width=150).print(shown(rows))
    return int(not all(r.no_worse for r in rows))


if __name__ == "__main__":
    sys.exit(main())
