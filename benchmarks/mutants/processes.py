"""Try a defect in a process of its own: a fork in which `import` finds the changed module and pytest runs tests."""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.mutants.coverage import OPTIONS
from benchmarks.mutants.draw import SOURCE, Mutant

Answer = dict[str, Any]  #: JSON of what a process found


class Replaced(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """An importer of one module that reads it from another text."""

    def __init__(self, m: Mutant) -> None:
        super().__init__(m.module, str(SOURCE / m.file))
        self.text = m.text

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> Any:
        with warnings.catch_warnings():  # such as `x is "text"`: tests are to say what it does
            warnings.simplefilter("ignore", SyntaxWarning)
            return compile(self.text, self.path, "exec")


class FirstFailure:
    """A pytest plugin that records the first test that failed."""

    test = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.test:
            self.test = f"{report.nodeid} (import)"


def attempt(m: Mutant | None, groups: Sequence[Sequence[str]]) -> Answer:
    """Run groups of tests, one after the other, until one test fails."""
    if m is not None:
        sys.meta_path.insert(0, Replaced(m))
        with contextlib.suppress(Exception):  # pytest would read a file of doctests without asking the importer
            importlib.import_module(m.module)
    for tests in groups:
        first = FirstFailure()
        status = pytest.main([*OPTIONS, "-x", *tests], plugins=[first])
        if status == pytest.ExitCode.USAGE_ERROR:  # the defect has changed the parameters that name a test
            stems = dict.fromkeys(t.partition("[")[0] for t in tests)
            status = pytest.main([*OPTIONS, "-x", *stems], plugins=[first])
        if first.test:
            return {"noticed": True, "by": first.test}
        if status != 0:
            return {"error": f"pytest's exit status {int(status)}"}
    return {"noticed": False}


def preload() -> None:
    """Import once what tests need from other packages; garbage collections of forks then leave it alone."""
    import torch

    torch.set_num_threads(1)
    others = "numpy pydantic scipy.optimize torch.export keras onnx onnxruntime ai_edge_litert.interpreter jinja2"
    for name in [*others.split(), "typer.testing", "rich.console"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as empty, contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["-q", "--collect-only", empty])  # loads pytest's plugins
    assert not any(m.partition(".")[0] in ("chipfit", "tests") for m in sys.modules)
    gc.collect()
    gc.freeze()


class Pool:
    """Forks of this process, a few at a time."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.running: dict[int, tuple[float, float, Path, Callable[[Answer], None]]] = {}
        self.scratch = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.number = 0

    def start(self, work: Callable[[], Answer], limit: float, done: Callable[[Answer], None]) -> None:
        """Begin when there is room.

        Args:
            limit: processor time [s], or ten times as much on the clock, after which the process is killed.
            done: takes the answer; {"noticed": True, "hang": True} of a killed process.
        """
        while len(self.running) >= self.workers:
            self._collect()
        self.number += 1
        answer = self.scratch / f"{self.number}.json"
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _in_child(work, answer)
        self.running[pid] = limit, time.monotonic() + 10 * limit, answer, done

    def run(self, work: Callable[[], Answer], limit: float) -> Answer:
        """Run one piece of work to its end."""
        out: Answer = {}
        self.start(work, limit, out.update)
        self.wait()
        return out

    def wait(self) -> None:
        """Wait for everything that was started."""
        while self.running:
            self._collect()

    def close(self) -> None:
        self.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _collect(self) -> None:
        time.sleep(0.02)
        for pid, (limit, end, answer, done) in list(self.running.items()):
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() < end and _processor_time(pid) < limit:
                continue
            if not ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            del self.running[pid]
            lost = {"noticed": True, "by": "a crash of the process"} if ended else {"noticed": True, "hang": True}
            done(json.loads(answer.read_text()) if answer.exists() else lost)
            shutil.rmtree(answer.with_suffix(""), ignore_errors=True)


def _processor_time(pid: int) -> float:
    """Return the seconds that a process and its ended children computed, 0 if unknown: a busy machine makes no hang."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return float(sum(map(int, words[11:15]))) / os.sysconf("SC_CLK_TCK")


def _in_child(work: Callable[[], Answer], answer: Path) -> None:
    """Do the work in a session and a scratch folder of its own, write the answer, and end the process."""
    os.setsid()
    scratch = answer.with_suffix("")
    scratch.mkdir()
    log = os.open(answer.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(scratch)
    try:
        result = work()
    except BaseException:
        result = {"error": traceback.format_exc()[-300:]}
    answer.with_suffix(".part").write_text(json.dumps(result))
    answer.with_suffix(".part").rename(answer)
    os._exit(0)
