"""A pair of accelerators in host memory, `fakegpu:0` and `fakegpu:1`, with the rules of CUDA; importing registers them.

counts() and reset() see what was launched, moved and kept; allow_float64(False) imitates MPS; limit_memory(bytes) lets
memory run out.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_suffix(".cpp")
DEVICES = 2


def build() -> Any:
    """Return the extension, built once for each source, torch and Python, by one process at a time (half a minute).

    Raises:
        ImportError: this machine cannot build it.
    """
    missing = [tool for tool in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(tool) is None]
    if missing:
        raise ImportError(f"the fake device is built in C++, and {' and '.join(missing)} is not installed")
    source = SOURCE.read_bytes()
    key = hashlib.sha256(source + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chipfit-tests" / key
    folder.mkdir(parents=True, exist_ok=True)
    name, built = f"fakegpu_{key}", folder / "built"
    with (folder / "building").open("w") as turn, warnings.catch_warnings():
        fcntl.flock(turn, fcntl.LOCK_EX)  # released by the system when a process dies, unlike torch's own lock
        if not built.exists():  # ninja would build again for another checkout, whose headers have other paths
            (folder / "lock").unlink(missing_ok=True)
            (folder / SOURCE.name).write_bytes(source)
            warnings.simplefilter("ignore")
            flags = ["-O1", "-w"]
            sources = [str(folder / SOURCE.name)]
            cpp_extension.load(name, sources, extra_cflags=flags, build_directory=str(folder), is_python_module=False)
            built.touch()
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.so")
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


_C = build()
counts, reset, allow_float64, limit_memory = _C.counts, _C.reset, _C.allow_float64, _C.limit_memory


class Chosen:
    """A context in which a device is the current one: `torch.fakegpu.device(1)`."""

    def __init__(self, device: Any) -> None:
        self.index = index_of(device)

    def __enter__(self) -> None:
        self.before = _C.current()
        _C.set_current(self.index)

    def __exit__(self, *_: object) -> None:
        _C.set_current(self.before)


def index_of(device: Any = None) -> int:
    """Return the index of a device, of its name, or of the current one where none is given."""
    index = device if isinstance(device, int | None) else torch.device(device).index
    return _C.current() if index is None else index


def module() -> types.ModuleType:
    """Return what `torch.fakegpu` is to be."""
    made = types.ModuleType("torch.fakegpu")
    made.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        device_count=lambda: DEVICES,
        current_device=_C.current,
        set_device=lambda device: _C.set_current(index_of(device)),
        synchronize=lambda device=None: None,
        get_device_name=lambda device=None: "fake",
        device=Chosen,
        default_generators=tuple(_C.generator(i) for i in range(DEVICES)),
        get_rng_state=lambda device=None: _C.generator(index_of(device)).get_state(),
        set_rng_state=lambda state, device=None: _C.generator(index_of(device)).set_state(state),
        manual_seed=lambda seed: _C.generator(_C.current()).manual_seed(seed),
        manual_seed_all=lambda seed: [_C.generator(i).manual_seed(seed) for i in range(DEVICES)],
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        memory_allocated=lambda device=None: counts()["allocated"],
        max_memory_allocated=lambda device=None: counts()["peak"],
        reset_peak_memory_stats=lambda device=None: reset(),
        empty_cache=lambda: None,
    )
    return made


def register() -> None:
    """Make "fakegpu" a device of torch; a process does it once, for good."""
    torch.utils.rename_privateuse1_backend("fakegpu")
    sys.modules["torch.fakegpu"] = made = module()
    torch._register_device_module("fakegpu", made)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)


register()
