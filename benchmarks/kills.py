"""Kill writers at random instants, and load while others write: no result may be lost or incomplete.

Each kill forks a worker that has imported everything, lets it write over an earlier result, and sends SIGKILL at an
instant during the write. Afterwards the earlier or the new result must be there, complete; the next writer must succeed
and leave no temporary files.

    python benchmarks/kills.py --kills 500 --loads 300
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from chipfit import Result, load, quantize
from chipfit.cli.app import app
from chipfit.errors import ChipfitError

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    """Return the network that the command line loads as `module:factory`."""
    torch.manual_seed(0)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), *head)


@dataclass
class Writer:
    """A way to write a result, and the contents that a complete result may have."""

    write: Callable[[Path, int], Any]  #: writes one of two results: (target, 0 or 1)
    read: Callable[[Path], Any]  #: returns something comparable; raises on an incomplete result
    whole: list[Any] = field(default_factory=list)  #: what `read` returns for either
    seconds: float = 0.0  #: duration of a write


def saved(path: Path) -> Any:
    """Return what distinguishes two saved results."""
    return load(path).plan.provenance["settings"]["rule"]


def unit(path: Path) -> Any:
    """Read the output of `chipfit quantize`: every artefact, all of one run."""
    names = {p.name for p in path.iterdir()}
    if names != {"manifest.json", "model.onnx", "plan", "report.html"}:
        raise ValueError(f"an incomplete output: {sorted(names)}")
    if not (path / "report.html").read_text().rstrip().endswith("</html>"):
        raise ValueError("half a page")
    return saved(path / "plan"), (path / "model.onnx").read_bytes()


def writers(results: Iterable[Result], folder: Path) -> dict[str, Writer]:
    """Return the writers: save, export, report and the command line."""
    both = tuple(results)
    np.savez(folder / "d.npz", x=X.numpy())
    pages = tuple(r.report for r in both)

    def run_command(path: Path, which: int) -> None:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.suppress(SystemExit),
        ):
            rule = ("mse", "no_clipping")[which]
            options = {"--data": folder / "d.npz", "--out": path, "--platform": "ort_cpu", "--rule": rule}
            words = [str(word) for pair in options.items() for word in pair]
            app(["quantize", "kills:network", *words, "--no-verify"])

    def page(path: Path) -> str:
        text = path.read_text()
        if not text.rstrip().endswith("</html>"):
            raise ValueError("half a page")
        return text

    return {
        "save": Writer(lambda p, k: both[k].save(p), saved),
        "export": Writer(
            lambda p, k: both[k].export(p.with_suffix(".onnx")), lambda p: p.with_suffix(".onnx").read_bytes()
        ),
        "report": Writer(lambda p, k: pages[k].save(p.with_suffix(".html")), lambda p: page(p.with_suffix(".html"))),
        "command": Writer(run_command, unit),
    }


def half_writer(path: Path, which: int) -> None:
    """Return the negative control, which writes in place."""
    with path.with_suffix(".onnx").open("wb") as f:
        for _ in range(64):
            f.write(bytes([which]) * 4096)
            f.flush()
            time.sleep(0.0002)


def control() -> Writer:
    return Writer(half_writer, lambda p: p.with_suffix(".onnx").read_bytes())


def forked(act: Callable[[], Any]) -> int:
    """Fork a child that calls `act` and exits with status 0 unless that raises; return its process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException as e:
            print(f"{type(e).__name__}: {e}", file=sys.stderr)
        finally:
            os._exit(status)
    return child


def started(w: Writer, target: Path) -> tuple[int, int]:
    """Fork a child that writes the second result; return its id and a pipe that reads "b" at begin, "e" at end."""
    reading, writing = os.pipe()

    def act() -> None:
        os.write(writing, b"b")
        w.write(target, 1)
        os.write(writing, b"e")

    child = forked(act)
    os.close(writing)
    return child, reading


def measure(name: str, w: Writer, folder: Path) -> None:
    """Write both results to record complete ones, then the second one in a child to measure the duration."""
    for which in (0, 1):
        w.write(folder / f"{name}-{which}", which)
        w.whole.append(w.read(folder / f"{name}-{which}"))
    child, reading = started(w, folder / f"{name}-1")
    times = [time.perf_counter() for _ in "be" if os.read(reading, 1)]
    os.close(reading)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit(f"{name} fails without being killed")
    w.seconds = times[1] - times[0]


def kill(name: str, w: Writer, folder: Path, after: float) -> tuple[str, list[str]]:
    """Kill one writer; return when the kill hit (before, during or after the write) and what is wrong.

    Args:
        after: seconds from the beginning of the write; negative kills at once, perhaps before the write begins.
    """
    folder.mkdir()
    target, wrong = folder / name, []
    for p in folder.parent.glob(f"{name}-0*"):  # the earlier result, from `measure`
        copy: Callable[..., Any] = shutil.copytree if p.is_dir() else shutil.copy2
        copy(p, folder / p.name.replace(f"{name}-0", name))
    child, reading = started(w, target)
    told = b""
    if after > 0:
        told = os.read(reading, 1)
        time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while part := os.read(reading, 8):
        told += part
    os.close(reading)
    when = {b"": "before", b"b": "during", b"be": "after"}[told]
    try:
        if w.read(target) not in w.whole:
            wrong.append("neither the earlier nor the new result")
    except (ChipfitError, OSError, ValueError) as e:
        wrong.append(f"lost or half: {e}")
    try:
        w.write(target, 1)
        if w.read(target) != w.whole[1]:
            wrong.append("the next writer has not written")
    except (ChipfitError, OSError, ValueError) as e:
        wrong.append(f"the next writer fails: {e}")
    expected = {target.name, target.with_suffix(".onnx").name, target.with_suffix(".html").name}
    wrong += [f"debris: {p.name}" for p in folder.iterdir() if p.name not in expected]
    shutil.rmtree(folder)
    return when, wrong


def kills(
    count: int, chosen: dict[str, Writer], folder: Path, seed: int = 0
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Kill `count` writers, each kind in turn; return how many were hit when, and what went wrong."""
    draw, hits, wrong = random.Random(seed), Counter[tuple[str, str]](), []
    for name, w in chosen.items():
        measure(name, w, folder)
    quick = [name for name in chosen if name != "command"]
    turns = 3 * quick + [name for name in chosen if name == "command"]  # takes as long as ten of the others
    for k in range(count):
        name = turns[k % len(turns)]
        w = chosen[name]
        when, found = kill(name, w, folder / f"kill-{k}", draw.uniform(-0.1, 1.1) * w.seconds)
        hits[name, when] += 1
        wrong += [f"{name}, killed {when}: {f}" for f in found]
    return hits, wrong


def loads(
    count: int, results: tuple[Result, Result], folder: Path, save: Callable[[Result, Path], Any] | None = None
) -> list[str]:
    """Load a result `count` times while two processes keep replacing it; return what went wrong."""
    target, rules = folder / "loaded", {r.plan.provenance["settings"]["rule"] for r in results}
    results[0].save(target)
    write = save or (lambda result, path: result.save(path))

    def keep_writing(result: Result) -> None:
        while True:
            write(result, target)

    children = [forked(lambda r=r: keep_writing(r)) for r in results]
    wrong = []
    for _ in range(count):
        try:
            if saved(target) not in rules:
                wrong.append("neither of the two results")
        except (ChipfitError, OSError, ValueError) as e:
            wrong.append(str(e))
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    try:
        results[0].save(target)
    except ChipfitError as e:
        wrong.append(f"the next writer fails: {e}")
    return wrong + [f"debris: {p.name}" for p in folder.glob(".*")]


def in_two_renames(result: Result, path: Path) -> None:
    """Replace a folder in two steps, as a negative control of `loads`: for an instant there is no result."""
    other = path.with_name(f"{path.name}-{os.getpid()}")
    result.save(other)
    with contextlib.suppress(OSError):
        shutil.rmtree(path)
        time.sleep(0.01)  # long enough to be seen on a busy machine
        os.rename(other, path)


def main() -> None:
    """Print how many of each kind were killed when; return 1 if a result was lost, incomplete, or left debris."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--kills", type=int, default=500)
    options.add_argument("--loads", type=int, default=300)
    options.add_argument("--seed", type=int, default=0)
    wanted = options.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))  # where the command line finds kills:network
    results = tuple(quantize(network(), [X], rule=r, progress=False) for r in ("mse", "no_clipping"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = writers(results, folder)
        hits, wrong = kills(wanted.kills, chosen, folder, wanted.seed)
        print(f"{'':10}{'before':>8}{'during':>8}{'after':>8}{'ms a write':>12}")
        for kind, w in chosen.items():
            counts = "".join(f"{hits[kind, when]:8}" for when in ("before", "during", "after"))
            print(f"{kind:10}{counts}{1000 * w.seconds:12.0f}")
        (folder / "loads").mkdir()
        failed = loads(wanted.loads, results, folder / "loads")
        (folder / "control").mkdir()
        gone = loads(30, results, folder / "control", in_two_renames)
        noticed = kills(20, {"control": control()}, folder, wanted.seed)[1]
    print(f"{wanted.kills} kills: {len(wrong)} wrong; {wanted.loads} loads against two writers: {len(failed)} wrong")
    print(
        f"a writer in place, killed 20 times: {len(noticed)} noticed; "
        f"30 loads against writers that remove first: {len(gone)} noticed"
    )
    print(*wrong[:20], *failed[:20], sep="\n")
    raise SystemExit(bool(wrong or failed or not noticed or not gone))


if __name__ == "__main__":
    main()
