"""Sweeps: many experiments in processes of their own, on this machine or on a Ray cluster."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import Any

from chipfit.bench.config import Config
from chipfit.bench.store import Store
from chipfit.errors import ConfigError, RuntimeUnavailable, import_optional, raise_bug, short_message
from chipfit.frameworks.torch.device import device_named

Report = Callable[[str, str], None]  #: called with an experiment's folder and its new state
#: exit status of `chipfit bench run` if another process runs the experiment
BUSY = 75  # EX_TEMPFAIL of sysexits.h
#: pause before an experiment that another process runs is tried again [s]
RETRY_PAUSE = 2.0
_KEPT_OUTPUT = 2000  #: number of characters of a failed process's output to keep


def run_in_process(config: str, home: str, early: bool, device: str) -> tuple[int, str]:
    """Run an experiment in a process of its own; return exit status and the end of its output."""
    command = [sys.executable, "-m", "chipfit", "bench", "run", config, "--home", home, "--device", device]
    command += ["--stop-early"] if early else []
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    printed = (done.stdout + done.stderr).decode(errors="replace")
    return done.returncode, (printed + _signal_text(done.returncode))[-_KEPT_OUTPUT:]


def _signal_text(status: int) -> str:
    """Return a text about the signal that ended a process; "" if none did."""
    if status >= 0:
        return ""
    name = Signals(-status).name
    cure = ", perhaps for lack of memory: use fewer workers, or a smaller data.batch_size" if name == "SIGKILL" else ""
    return f"The process was ended by {name}{cure}"


def sweep(
    experiments: Mapping[str, Config],
    matrix: Path,
    home: Path,
    *,
    workers: int = 1,
    ray: str | None = None,
    cpus: float = 1,
    gpus: float | None = None,
    memory: int | None = None,
    retries: int = 2,
    stop_early: bool = False,
    report: Report = lambda name, what: None,
) -> list[str]:
    """Run the experiments without an outcome; return the folders of those that failed.

    An interrupted sweep can be resumed: each experiment has its own checkpoint, and is done once its outcome is stored.

    Args:
        experiments: folder below the matrix -> configuration.
        ray: None: without Ray; "local": Ray on this machine; else the address of a cluster, whose machines share `home`
            and the matrix.
        cpus, gpus, memory: resources of one experiment on Ray; memory in bytes. By default an experiment gets one GPU
            if its `device` is an accelerator.
        retries: number of retries of an experiment that fails.
        report: called when the state of an experiment changes.

    Raises:
        ConfigError: a device does not exist here, or Ray cannot choose it.
    """
    queue = _Queue(experiments, Store(home / "runs.sqlite"), 1 + retries, report)
    wanted = {name: _gpus(experiments[name].device, gpus, ray) for name in queue.waiting}
    with _executor(workers, ray, cpus, max(wanted.values(), default=0), memory) as start:
        running: dict[Future[tuple[int, str]], str] = {}
        while queue.waiting or running:
            while queue.waiting and (ray is not None or len(running) < workers):
                if (name := queue.next()) is not None:
                    config = str((matrix.parent / name / "config.yaml").resolve())
                    given = (config, str(home.resolve()), stop_early, experiments[name].device)
                    running[start(wanted[name], *given)] = name
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                error = ended.exception()
                queue.record_end(running.pop(ended), *((1, str(error)) if error is not None else ended.result()))
    return queue.failed


class _Queue:
    """The experiments of a sweep that have no outcome yet, in the order in which they run."""

    def __init__(self, experiments: Mapping[str, Config], store: Store, tries: int, report: Report) -> None:
        self.experiments, self.store, self.report = experiments, store, report
        done = store.done(c.key for c in experiments.values())
        self.tries = {name: tries for name, c in experiments.items() if c.key not in done}  #: number of tries left
        for name in experiments.keys() - self.tries.keys():
            report(name, "done before")
        self.waiting, self.failed = [*self.tries], list[str]()

    def next(self) -> str | None:
        """Take the first experiment that waits; return None if it has got its outcome on another machine."""
        name = self.waiting.pop(0)
        done = self.store.done([self.experiments[name].key])
        self.report(name, "done elsewhere" if done else "runs")
        return None if done else name

    def record_end(self, name: str, status: int, text: str) -> None:
        """Record that the process of an experiment ended; without an outcome it waits again, or has failed."""
        if status == BUSY:
            self.report(name, "another process is at it")
            time.sleep(RETRY_PAUSE)
            return self.waiting.append(name)
        self.tries[name] -= 1
        c = self.experiments[name]
        if status == 0 or self.store.done([c.key]):  # a process may be killed after it stored its outcome
            self.report(name, "done")
        elif self.tries[name]:
            self.report(name, "failed: tries again")
            self.waiting.append(name)
        else:
            self.store.put(c.key, c.name, c.study, None, text)
            self.report(name, "failed")
            self.failed.append(name)


def _gpus(device: str, given: float | None, ray: str | None) -> float:
    """Return the number of GPUs of an experiment on Ray.

    Raises:
        ConfigError: see `sweep`.
    """
    if ray is None:
        device_named(device)
    elif ":" in device:
        hint = f"device: {device.partition(':')[0]}, or a sweep without Ray"
        raise ConfigError("Ray chooses the devices of experiments", got=f"device {device}", hint=hint)
    return given if given is not None else float(device not in ("auto", "cpu"))


@contextmanager
def _executor(
    workers: int, ray: str | None, cpus: float, gpus: float, memory: int | None
) -> Iterator[Callable[..., Future[Any]]]:
    """Yield a function that starts `run_in_process` locally or on Ray and returns a future.

    Its first argument is the number of GPUs; none needs more than `gpus`.
    """
    if ray is None:
        with ThreadPoolExecutor(workers) as pool:
            yield lambda _, *given: pool.submit(run_in_process, *given)
        return
    cluster = import_optional("ray", "A sweep on a cluster", RuntimeUnavailable, extra="bench")
    own = {"num_cpus": workers} if ray == "local" else {"address": ray}
    try:
        cluster.init(**own, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as e:  # Ray's errors share no base
        raise_bug(e)
        hint = "local, or HOST:PORT of a head that `ray start --head` has started"
        raise RuntimeUnavailable(f"Ray cannot be reached: {short_message(e)}", where=ray, hint=hint) from e
    try:
        available, requested = cluster.cluster_resources(), {"CPU": cpus, "GPU": gpus, "memory": memory or 0}
        short = [f"{k} {v:g} of {available.get(k, 0):g}" for k, v in requested.items() if v > available.get(k, 0)]
        if short and ray == "local":  # a cluster may grow
            hint = "request fewer resources"
            raise ConfigError("No experiment fits on this machine", got=", ".join(short), hint=hint)
        wants: dict[str, Any] = {"num_cpus": cpus, **({"memory": memory} if memory else {})}
        place = cluster.remote(**wants, max_retries=0)(run_in_process)  # `sweep` does the retries
        yield lambda count, *given: place.options(num_gpus=count).remote(*given).future()
    finally:
        cluster.shutdown()
