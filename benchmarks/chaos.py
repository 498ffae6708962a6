"""Kill driver and workers of a sweep at random instants, and compare its outcomes with an undisturbed sweep's.

Twenty times, at instants drawn from the seed, the driver, one of its workers or all of them together get SIGKILL; a
killed driver is started again. A worker whose driver died goes on and may be killed too. In the end the store must hold
what the undisturbed sweep's holds, byte for byte except times. A sweep that ends before all kills are spent is followed
by another one, in a folder of its own.

    python benchmarks/chaos.py qbench_zoo/matrix.yaml --study small --workers 2

With `--forked`, drivers and workers are forked from one process that has imported everything, so that experiments that
take a second can be disturbed. `--control` adds a sweep whose checkpoints omit the optimizer; this must be noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIG_DFL, SIG_IGN, SIGCHLD, SIGKILL, signal
from typing import Any

from chipfit.bench.board import json_without_times
from chipfit.bench.store import Store

WHOM = "driver", "worker", "all"
#: modules that forked processes find imported
_IMPORTED = "chipfit.bench.run chipfit.bench.matrix chipfit.bench.sweep chipfit.cli.bench onnxruntime sklearn.datasets"


@dataclass
class Kills:
    """A sweep to disturb, and how often."""

    matrix: Path
    study: str | None
    workers: int
    count: int
    nursery: Nursery | None  #: forks processes; None starts them
    draw: random.Random
    mean: float = 0.0  #: mean time from one kill to the next [s]
    hits: Counter[str] = field(default_factory=Counter)  #: kills by what they hit
    starts: int = 0  #: number of drivers started

    def start(self, home: Path, forgetful: bool = False) -> Driver:
        """Start a driver, which leads the process group that its workers belong to."""
        self.starts += 1
        if self.nursery is not None:
            return self.nursery(drive, self.matrix, self.study, home, self.workers, forgetful)
        command = [sys.executable, "-m", "chipfit", "bench", "sweep", str(self.matrix), "--home", str(home)]
        command += ["--workers", str(self.workers), *(["--study", self.study] if self.study else [])]
        with (home.parent / "log").open("a") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

        def wait(seconds: float | None = None) -> None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(seconds)

        return Driver(child.pid, wait, child.poll)

    def disturb(self, home: Path, forgetful: bool = False) -> str:
        """Run a sweep in a folder, killing until kills are spent or it is done; return the content of its store."""
        driver = self.start(home, forgetful)
        groups = {driver.pid}
        while True:
            spent = self.hits.total() == self.count
            driver.wait(None if spent else self.draw.uniform(0, 2 * self.mean))
            status = driver.status()
            if status == 0:
                return outcomes(home)
            if status is None:
                whom = self.draw.choice(WHOM)
                workers = _members(groups) - {driver.pid}
                victims = {driver.pid} if whom == "driver" else workers | {driver.pid}
                if whom == "worker" and workers:
                    victims = {self.draw.choice(sorted(workers))}
                for victim in victims:
                    _kill(victim)
                self.hits[
                    "driver and workers" if len(victims) > 1 else "driver" if driver.pid in victims else "worker"
                ] += 1
                if driver.pid not in victims:
                    continue
                driver.wait()
            driver = self.start(
                home, forgetful
            )  # the driver was killed, or gave up an experiment that was killed too often
            groups.add(driver.pid)


@dataclass(frozen=True)
class Driver:
    """A process that runs a sweep."""

    pid: int
    wait: Callable[..., Any]  #: timeout [s]
    status: Callable[[], int | None]


def outcomes(home: Path) -> str:
    """Return the content of a store without times."""
    return json_without_times(Store(home / "runs.sqlite").rows())


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended just now
        os.kill(pid, SIGKILL)


def _members(groups: set[int]) -> set[int]:
    """Return the running processes of these groups."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # it ended just now
            continue
        if int(group) in groups and state not in "ZX":
            found.add(int(stat.parent.name))
    return found


# ----------------------------------------------------------------------------------------------- forked processes


class Nursery:
    """A process that has imported everything and forks others, each of which calls a function of this file.

    It sends the process id of each fork and, when the fork has ended, its status; then it closes the connection.
    """

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "nursery")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.address)
        listener.listen()
        gone, self.here = os.pipe()  # ends with this process
        if os.fork() == 0:
            try:
                os.close(self.here)
                _serve(listener, gone)
            finally:
                os._exit(1)
        listener.close()
        os.close(gone)

    def __call__(self, function: Callable[..., int], *args: Any) -> Driver:
        """Fork a process and return it."""
        asks = socket.socket(socket.AF_UNIX)
        asks.connect(self.address)
        asks.sendall(json.dumps([function.__name__, self.address, *map(_plain, args)]).encode() + b"\n")
        told = asks.makefile("r")
        pid, status = int(told.readline()), list[int]()

        def wait(seconds: float | None = None) -> None:
            if not status and select.select([asks], [], [], seconds)[0]:
                status.append(int(told.readline() or -SIGKILL))

        return Driver(pid, wait, lambda: status[0] if status else wait(0) or next(iter(status), None))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _serve(listener: socket.socket, gone: int) -> None:
    for name in _IMPORTED.split():
        importlib.import_module(name)
    signal(SIGCHLD, SIG_IGN)  # their statuses are not needed
    while listener in select.select([listener, gone], [], [])[0]:
        asked, _ = listener.accept()
        if os.fork() == 0:
            signal(SIGCHLD, SIG_DFL)
            listener.close()
            function, address, *args = json.loads(asked.makefile("r").readline())
            nursery = Nursery.__new__(Nursery)
            nursery.address = address
            asked.sendall(b"%d\n" % os.getpid())
            status = globals()[function](nursery, *args)
            with contextlib.suppress(BrokenPipeError):  # the driver is gone
                asked.sendall(b"%d\n" % status)
            os._exit(status)
        asked.close()


def drive(nursery: Nursery, matrix: str, study: str | None, home: str, workers: int, forgetful: bool) -> int:
    """Do what `chipfit bench sweep` does, with forked workers."""
    from chipfit.bench import sweep as sweeps
    from chipfit.bench.matrix import configs

    os.setpgid(0, 0)

    def attempt(config: str, home: str, early: bool, device: str) -> tuple[int, str]:
        worker = nursery(work, config, home, os.getpid(), forgetful)
        worker.wait()
        return worker.status() or 0, ""

    sweeps.run_in_process = attempt  # type: ignore[assignment]
    sweeps.RETRY_PAUSE = 0.1
    return bool(sweeps.sweep(configs(Path(matrix), study), Path(matrix), Path(home), workers=workers))


def work(nursery: Nursery, config: str, home: str, group: int, forgetful: bool) -> int:
    """Do what `chipfit bench run` does."""
    import typer

    from chipfit.bench import train
    from chipfit.cli.bench import run

    os.setpgid(0, group)  # fails if the driver is gone already
    log = os.open(Path(home).parent / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    read = train.read_checkpoint

    def forgets(path: Path, modules: Any, optimizer: Any) -> Any:
        before = optimizer.state_dict()
        told = read(path, modules, optimizer)
        optimizer.load_state_dict(before)
        return told

    if forgetful:
        train.read_checkpoint = forgets
    try:
        run(Path(config), Path(home), again=False, stop_early=False)
    except typer.Exit as e:
        return e.exit_code
    return 0


# ----------------------------------------------------------------------------------------------- all of it


def main() -> None:
    """Print what the kills hit; return 1 if an outcome differs or the control goes unnoticed."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("matrix", type=Path)
    options.add_argument("--study")
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--home", type=Path, help="folder of the sweeps (default: a temporary one)")
    options.add_argument("--undisturbed", type=Path, help="home of a finished sweep (default: run one)")
    options.add_argument(
        "--mean", type=float, help="mean seconds from one kill to the next (default: all fit into one sweep)"
    )
    options.add_argument("--forked", action="store_true", help="fork processes instead of starting them")
    options.add_argument(
        "--control", action="store_true", help="with --forked: check that checkpoints without optimizer are noticed"
    )
    asked = options.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.home or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        nursery = Nursery(Path(temporary)) if asked.forked else None
        kills = Kills(
            asked.matrix.resolve(), asked.study, asked.workers, asked.kills, nursery, random.Random(asked.seed)
        )
        begun = time.perf_counter()
        if asked.undisturbed is None:
            driver = kills.start(folder / "undisturbed")
            begun = time.perf_counter()
            driver.wait()
            if driver.status():
                raise SystemExit(f"the sweep fails without being disturbed:\n{(folder / 'log').read_text()}")
        wanted = outcomes(asked.undisturbed or folder / "undisturbed")
        seconds = time.perf_counter() - begun
        if asked.mean is None and asked.undisturbed is not None:
            options.error("--undisturbed needs --mean, because the duration of that sweep is unknown")
        kills.mean = asked.mean or max(seconds / (asked.kills + 1), 0.2)
        different, sweeps = 0, 0
        while kills.hits.total() < asked.kills:
            sweeps += 1
            different += kills.disturb(folder / f"disturbed-{sweeps}") != wanted
        print(f"undisturbed: {len(json.loads(wanted))} outcomes, {seconds:.0f} s")
        hit = ", ".join(f"{n} {whom}" for whom, n in sorted(kills.hits.items()))
        print(f"{asked.kills} kills ({hit}) in {sweeps} sweeps, {kills.starts} drivers: {different} with another table")
        unnoticed = False
        if asked.control:
            unnoticed, tries = True, 0
            while unnoticed and (tries := tries + 1) <= 5:
                kills.hits.clear()
                unnoticed = kills.disturb(folder / f"control-{tries}", forgetful=True) == wanted
            print(f"checkpoints that forget the optimizer: {'not noticed' if unnoticed else 'noticed'}")
    raise SystemExit(bool(different or unnoticed))


if __name__ == "__main__":
    main()
