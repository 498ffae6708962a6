"""Run cases in forked workers, so that a crash or a hang is an outcome and does not end the run."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TextIO

import onnx
import pydantic
import safetensors
import torch
import yaml
from google.protobuf.message import DecodeError
from onnxruntime.capi import onnxruntime_pybind11_state

import chipfit
from chipfit.errors import ChipfitError, raised_outside_chipfit
from chipfit.frameworks.reading import Unreadable
from chipfit.frameworks.torch.program import Unrecordable

SOURCE = Path(chipfit.__file__).parent
#: memory that one case may use beyond its worker's at the start [byte]
MEMORY = 3 << 30

_ORT = tuple(x for x in vars(onnxruntime_pybind11_state).values() if isinstance(x, type) and issubclass(x, Exception))
_ZIP = (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)
_MALFORMED = ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
#: function of chipfit -> exceptions that may cause its errors
FORESEEN: dict[str, tuple[type[BaseException], ...]] = {
    "platform/yaml_file.py:__init__": (yaml.YAMLError,),
    "files.py:_typed": (OSError, ValueError),
    "files.py:read_text": (OSError, ValueError),
    "files.py:open_zip": (OSError, ValueError),
    "files.py:parse_json": (ValueError, RecursionError),
    "calibration/data.py:_call_without_arguments": (TypeError,),  # of a signature
    "calibration/data.py:_array_as_tensor": (TypeError,),  # torch's, of arrays
    "calibration/data.py:as_tensors": (RecursionError,),
    "calibration/data.py:_classes": (TypeError, ValueError, RuntimeError),  # torch's, of labels of any kind
    "calibration/collect.py:_add": (ValueError,),
    "calibration/collect.py:_run_checked": (RuntimeError,),  # torch's, of batches that do not run through the model
    "plan/saved.py:_guarded": (OSError, UnicodeDecodeError, safetensors.SafetensorError),
    # what torch's kernels raise of the attributes, shapes and types of a file
    "engine/check_runs.py:check_runs": (
        RuntimeError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        AssertionError,
    ),
    "engine/trees.py:read_tree": (ValueError, RecursionError),
    # attributes and operands of the wrong type or number, which readers take as the operator's definition has them
    "frameworks/onnx/translate.py:node": _MALFORMED,
    "frameworks/onnx/integers.py:run": (*_MALFORMED, StopIteration),
    "frameworks/tflite/read.py:_read": (*_MALFORMED, Unreadable),
    "frameworks/tflite/model.py:__init__": (*_MALFORMED, struct.error),
    "verify/file.py:verify_file": (RuntimeError, IndexError),  # torch's, of sizes that do not fit the data
    # a zip archive; names of values and weights that nothing has; raw bytes for torch
    "frameworks/torch/archive.py:load": (*_ZIP, LookupError, ValueError, RuntimeError),
    "frameworks/keras/loading.py:_checked": (*_ZIP, ValueError, KeyError, RecursionError),
    "runtimes/onnxruntime.py:__init__": (UnicodeDecodeError, *_ORT),  # names in the file
    "runtimes/onnxruntime.py:read": (DecodeError, onnx.checker.ValidationError),
    "runtimes/litert.py:_typed": (ValueError, RuntimeError),
    "runtimes/__init__.py:read_notes": (pydantic.ValidationError,),
    "export/onnx/writer.py:export_onnx": (onnx.checker.ValidationError, onnx.shape_inference.InferenceError),
    "export/onnx/opaque.py:splice": (torch.onnx.OnnxExporterError, RuntimeError),
    "reading.py:load_weights": (RuntimeError, safetensors.SafetensorError),
    "cli/inputs.py:_npz": (*_ZIP, ValueError, RuntimeError),
    "cli/inputs.py:_images": (OSError, ValueError, SyntaxError, EOFError),
}
#: functions of chipfit that call code of the user or of a library: any exception that arises outside of chipfit may
#: cause their errors
FOREIGN: tuple[str, ...] = (
    "frameworks/torch/plain_call.py:run_example",
    "frameworks/torch/record.py:watch",
    "frameworks/torch/capture.py:export",
    "frameworks/onnx/model.py:opened",
    "frameworks/onnx/model.py:proto",
    "frameworks/onnx/quantized.py:optimised_by_runtime",
    "frameworks/onnx/runtime.py:_reference",
    "frameworks/onnx/runtime.py:_session_of",
    "frameworks/onnx/runtime.py:run_flat",
    "frameworks/onnx/runtime.py:session",
    "frameworks/onnx/translate.py:initialiser",
    "frameworks/onnx/runtime.py:__call__",
    "frameworks/tflite/model.py:run",
    "frameworks/keras/capture.py:_in_float32",
    "frameworks/keras/capture.py:outputs_of",
    "frameworks/keras/loading.py:load",
    "frameworks/keras/loading.py:load_operation",
    "import_by_name.py:import_by_name",
    "import_by_name.py:call_factory",
    "ranges/__init__.py:_apply",  # the user's rule
    "decide/overrides.py:_chooses",  # the user's filter
    "verify/run.py:_run",  # runtimes
)


class Bug(Exception):
    """An unforeseen exception that the command line reported."""


class Nonsense(AssertionError):
    """An impossible value was accepted."""


@dataclass
class Case:
    """A case: its random numbers, a folder of its own, and notes about what was drawn."""

    kind: str
    index: int
    seed: int
    folder: Path
    notes: list[str] = field(default_factory=list)
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(f"{self.seed}:{self.kind}:{self.index}")

    def note(self, words: str) -> None:
        self.notes.append(words[:200])


@dataclass
class Outcome:
    """The end of a case."""

    kind: str
    index: int
    what: str  #: "accepted", "refused", "untyped", "hang", "died" or "nonsense"
    detail: str = ""  #: type of the error, and where it came from
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return self.what not in ("accepted", "refused")


Kind = Callable[
    [Case], None
]  #: a function that runs a case: it raises chipfit's error or Nonsense, or returns if the input was accepted


def one(
    kind: str, run: Kind, index: int, seed: int, limit: float, loud: bool = False, stacks: TextIO = sys.stderr
) -> Outcome:
    """Run one case in this process, which ends after `limit` seconds with its stack written to `stacks`."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz."))
    case = Case(kind, index, seed, folder)
    here = os.getcwd()
    # in a thread, because compiled code delays signals and a library may replace their handlers
    faulthandler.dump_traceback_later(limit, exit=True, file=stacks)
    quiet: Any = contextlib.nullcontext() if loud else contextlib.redirect_stdout(io.StringIO())
    try:
        with quiet, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(case)
        what, detail = "accepted", ""
    except Nonsense as e:
        what, detail = "nonsense", str(e)
    except ChipfitError as e:
        why = unforeseen(e)
        what, detail = ("untyped", why) if why else ("refused", type(e).__name__)
        if loud:
            print(e)
    except BaseException as e:  # any exception is an outcome
        own = _frames(e)
        if own and Path(own[-1].filename).parent == Path(__file__).parent and not isinstance(e, AssertionError | Bug):
            return Outcome(kind, index, "refused", "what the user's own code raises", case.notes)
        what, detail = "untyped", f"{type(e).__name__} at {_at(e)}: {str(e)[-300:]}"
        if loud:
            traceback.print_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.chdir(here)
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(kind, index, what, detail, case.notes)


def unforeseen(e: ChipfitError) -> str:
    """Return the unforeseen exception that caused an error, as text; "" if there is none."""
    at: BaseException = e
    while (cause := at.__cause__ or at.__context__) is not None:
        place = _ours(at)
        if not isinstance(cause, (ChipfitError, Unreadable, Unrecordable)):  # the latter two never leave chipfit
            foreign = place in FOREIGN and raised_outside_chipfit(cause)
            if not foreign and not isinstance(cause, FORESEEN.get(place, ())):
                return (
                    f"{type(cause).__name__} at {_at(cause)} behind {type(e).__name__} of {place}: {str(cause)[:200]}"
                )
            return ""
        at = cause
    return ""


def _frames(e: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(e.__traceback__))


def _file(frame: traceback.FrameSummary) -> str:
    """Return the file of a frame inside chipfit; "" for one outside."""
    path = Path(frame.filename)
    return path.relative_to(SOURCE).as_posix() if path.is_relative_to(SOURCE) else ""


def _ours(e: BaseException) -> str:
    """Return the innermost function of chipfit in an exception's traceback: "files.py:read_text"."""
    return next((f"{_file(x)}:{x.name}" for x in reversed(_frames(e)) if _file(x)), "")


def _at(e: BaseException) -> str:
    """Return the innermost line of chipfit in a traceback, else the innermost line."""
    frames = _frames(e)
    ours = [f for f in frames if _file(f)]
    if not frames:
        return "?"
    frame = (ours or frames)[-1]
    return f"{_file(frame) or frame.filename}:{frame.lineno}"


# ---------------------------------------------------------------------------------------------------------- workers


def all_of(kinds: dict[str, Kind], cases: list[tuple[str, int]], seed: int, limit: float) -> Iterator[Outcome]:
    """Run cases in one forked worker after another; a new one continues behind the case that ended the last."""
    done = 0
    while done < len(cases):
        for outcome in _worker(kinds, cases[done:], seed, limit):
            done += 1
            yield outcome


def _worker(kinds: dict[str, Kind], cases: list[tuple[str, int]], seed: int, limit: float) -> Iterator[Outcome]:
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="fuzz.") as folder, open(f"{folder}/stacks", "w+") as stacks:
        child = os.fork()
        if child == 0:
            os.close(reading)
            tempfile.tempdir = folder
            _work(kinds, cases, seed, limit, writing, stacks)
        os.close(writing)
        ended = 0
        try:
            buffer = b""
            while ended < len(cases):
                got = os.read(reading, 1 << 16)
                if not got:
                    _, status = os.waitpid(child, 0)
                    child = 0
                    stacks.seek(0)  # the two processes share the place
                    at = _innermost(stacks.read())
                    what, detail = ("hang", f"more than {limit:g} s at {at}") if at else ("died", _status(status))
                    yield Outcome(*cases[ended], what, detail)
                    return
                *lines, buffer = (buffer + got).split(b"\n")
                for line in lines:
                    ended += 1
                    yield Outcome(**json.loads(line))
        finally:
            os.close(reading)
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _innermost(stack: str) -> str:
    """Return the innermost line of chipfit that faulthandler wrote, else the innermost line; "" if it wrote nothing."""
    lines = [x.split('"') for x in stack.splitlines() if x.startswith("  File ")]
    ours = [x for x in lines if Path(x[1]).is_relative_to(SOURCE)]
    return next((f"{file}{place}" for _, file, place in ours or lines), "")


def _status(status: int) -> str:
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def _work(
    kinds: dict[str, Kind], cases: list[tuple[str, int]], seed: int, limit: float, writing: int, stacks: TextIO
) -> None:
    """Run cases in a worker, writing one line of JSON for each."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    faulthandler.enable(file=open(os.devnull, "w"))  # noqa: SIM115 -- as long as the process
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)  # where compiled libraries write
    for kind, index in cases:
        outcome = one(kind, kinds[kind], index, seed, limit, stacks=stacks)
        os.write(writing, (json.dumps(vars(outcome)) + "\n").encode())
    os._exit(0)
