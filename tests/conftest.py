"""The setup of every test: one seed, and as many threads as parallel tests can share."""

import gc
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import accelerators

os.environ.setdefault("KERAS_BACKEND", "torch")  # one backend per process; test_backends.py starts others
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
NO_DEVICE = pytest.StashKey[str]()  #: why the device of `--device` cannot be had


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "where networks of torch are built: cpu, cuda, cuda:1, mps, xpu, or fake, an accelerator in host memory"
    parser.addoption("--device", default="cpu", metavar="DEVICE", help=what)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the device before any test is collected."""
    try:
        accelerators.choose(config.getoption("--device"))
    except ImportError as e:
        config.stash[NO_DEVICE] = str(e)
    except ValueError as e:
        raise pytest.UsageError(str(e)) from e


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave modules and collected tests out of garbage collection: walks over them took a tenth of all tests' time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases of thinned tests as slow; skip every test where the fake device cannot be built."""
    cases = Counter[str]()
    for item in items:
        if thinned := item.get_closest_marker("thinned"):
            test = item.nodeid.partition("[")[0]
            if cases[test] % thinned.args[0]:
                item.add_marker("slow")
            cases[test] += 1
    for item in items if NO_DEVICE in config.stash else ():
        item.add_marker(pytest.mark.skip(reason=config.stash[NO_DEVICE]))


def seed() -> None:
    """Seed every generator: Keras draws the seeds of its own from Python's."""
    if accelerators.chosen.device == accelerators.CPU:
        torch.default_generator.manual_seed(0)  # the function of torch formats a traceback for each kind of accelerator
    else:
        torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed each test module, so that networks it makes on import do not depend on the modules before it."""
    if isinstance(collector, pytest.Module):
        seed()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> None:
    """Seed fixtures that tests share, so that they do not depend on the test that comes first."""
    if fixturedef.scope != "function":
        seed()


@pytest.fixture(autouse=True, scope="session")
def _no_wait_for_disks():
    """Leave out the syncs behind every written file: they matter if the power fails, which no test can see."""
    with mock.patch("os.fsync"):
        yield


@pytest.fixture(autouse=True)
def _seeded():
    seed()


@pytest.fixture
def precisions() -> Iterator[Callable[[], list[str]]]:
    """A function that returns the positions of torch's switches for float32 products; they are restored afterwards."""
    found = torch.backends
    switches = found.cuda.matmul, found.cudnn.conv, found.cudnn.rnn, found.mkldnn.matmul, found.mkldnn.conv

    def read() -> list[str]:
        return [switch.fp32_precision for switch in switches]

    before, matmul, tf32 = read(), torch.get_float32_matmul_precision(), found.cudnn.allow_tf32
    yield read
    for switch, value in zip(switches, before, strict=True):
        switch.fp32_precision = value
    torch.set_float32_matmul_precision(matmul)
    found.cudnn.allow_tf32 = tf32


#: modules whose tables columns of the table of operators fill
OPERATOR_TABLES = """
    engine.kernels frameworks.torch.read frameworks.keras.read frameworks.keras.lowerings export.onnx.ops
    export.tflite.ops passes.decompose simulate.litert simulate.tflm simulate.onnxruntime
""".split()


@pytest.fixture
def process_group(tmp_path):
    """A group of one process, which outlives the modules of a test.

    If a `DistributedDataParallel` holds the last reference, PyTorch joins the group's threads without giving up the
    GIL, for which they may wait: the process hangs.
    """
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def drop_ins():
    """Remove what a test registers or adds to the table of operators, and the modules that it writes."""
    from chipfit import registry
    from chipfit.operators.table import filled_tables

    modules = set(sys.modules)
    tables = [(table, dict(table)) for table in filled_tables()]
    yield
    for kind in registry.ENTRIES.values():
        for entry in [e for e in kind.values() if not registry.origin_of(e.thing).startswith("chipfit.")]:
            del kind[entry.name]
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if "/pytest-" in file:  # a file that the test wrote
            del sys.modules[name]
    for table, before in tables:
        table.clear()
        table.update(before)


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """Put a module `trap` on the path that leaves a mark when it is imported; return the path of the mark."""
    mark = tmp_path / "mark"
    (tmp_path / "trap.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nclass Thing:\n    def from_config(c): pass\ndef touch(*a): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield mark
    sys.modules.pop("trap", None)
