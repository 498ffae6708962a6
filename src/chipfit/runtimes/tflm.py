"""TensorFlow Lite Micro: its interpreter and reference kernels, in a process of their own; every tensor is readable."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chipfit.errors import RuntimeUnavailable
from chipfit.files import wrap_read_errors
from chipfit.registry import register
from chipfit.runtimes.child import Child
from chipfit.runtimes.litert import LiteRtReference

NAME = "TensorFlow Lite Micro"


class _Interpreter:
    """An interpreter in a child process, with the methods of LiteRT's that `LiteRt` calls."""

    def __init__(self, content: bytes) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self._content = content
        graph = schema.Model.GetRootAs(content, 0).Subgraphs(0)
        inputs = [graph.Inputs(k) for k in range(graph.InputsLength())]
        outputs = [graph.Outputs(k) for k in range(graph.OutputsLength())]
        #: names of inputs, and of outputs
        self._ends = [[(graph.Tensors(t).Name() or b"").decode() for t in ends] for ends in (inputs, outputs)]
        self.child: Child | None = None

    def allocate_tensors(self) -> None:
        """Start the process and load the file."""
        inputs, outputs = self._ends
        self.child = Child("tflm_child.py", NAME)
        found = self.child.ask("load", self._content, len(inputs), len(outputs))
        self._details = [
            [{**d, "name": name, "index": k, "shape_signature": d["shape"]} for k, (name, d) in enumerate(zip(*pair))]
            for pair in zip(self._ends, found, strict=True)
        ]
        self._given: dict[int, np.ndarray] = {}
        self._results: list[np.ndarray] = []

    def get_input_details(self) -> list[dict[str, Any]]:
        """Return name, index, shape, type and quantization of each input."""
        return self._details[0]

    def get_output_details(self) -> list[dict[str, Any]]:
        """Return name, index, shape, type and quantization of each output."""
        return self._details[1]

    def resize_tensor_input(self, index: int, shape: Sequence[int], strict: bool) -> None:
        """Raise that the sizes of a file are fixed."""
        d = self._details[0][index]
        allowed, got = str([*map(int, d["shape"])]), str([*shape])
        raise RuntimeUnavailable(f"{NAME} has fixed sizes: input '{d['name']}'", got=got, allowed=allowed)

    def set_tensor(self, index: int, x: np.ndarray) -> None:
        """Keep an input for the next run."""
        self._given[index] = x

    def invoke(self) -> None:
        """Run the network once."""
        assert self.child is not None
        self._results = self.child.ask("run", [self._given[k] for k in sorted(self._given)])

    def reset_all_variables(self) -> None:
        """Bring states back to those of the file."""
        assert self.child is not None
        self.child.ask("reset")

    def get_tensor(self, index: int) -> np.ndarray:
        """Return an output of the last run."""
        return self._results[index]


@register(
    "runtime",
    "tflm",
    suffix=".tflite",
    libraries=("tflite_micro", "ai_edge_litert", "flatbuffers"),
    extra="tflm",
    kernels="tflm",
    arena=True,
)
class Tflm(LiteRtReference):
    """A loaded file, run by the interpreter for microcontrollers; its batch size is that of the file."""

    narrow_states = True
    hint = "chipfit.lint(model, data, platform='tflm_cmsis_nn') lists operators that it lacks"

    def make_interpreter(self, content: bytes) -> Any:
        """Return an interpreter of a file in a child process, which is not started yet."""
        return _Interpreter(content)

    def __init__(self, path: str | Path, tensors: Sequence[str] = ()) -> None:
        """Load `path` and make the tensors named in `tensors` readable.

        Raises:
            RuntimeUnavailable: the runtime refuses the file, crashes or hangs.
        """
        with _where(path):
            super().__init__(path, tensors)

    @property
    def child(self) -> Child:
        """The process that runs the file."""
        return self.interpreter.child

    @staticmethod
    def open(path: Path) -> None:
        """Open a file and prepare all its operators.

        Raises:
            RuntimeUnavailable: the runtime refuses the file, crashes or hangs.
        """
        with wrap_read_errors(path, RuntimeUnavailable):
            content = path.read_bytes()
        with _where(path):
            _Interpreter(content).allocate_tensors()

    @staticmethod
    def arena(content: bytes) -> int:
        """Return the least arena with which the interpreter loads a file, in steps of 16 [bytes].

        Records of the interpreter hold addresses, which have 8 bytes here and 4 on most microcontrollers: there it
        needs no more.

        Raises:
            RuntimeUnavailable: the runtime refuses the file, crashes or hangs.
        """
        child = Child("tflm_child.py", NAME)
        child.ask("load", content, 0, 0)  # raises what a larger arena does not mend

        def loads(steps: int) -> bool:
            nonlocal child
            try:
                return bool(child.ask("loads", content, 16 * steps))
            except RuntimeUnavailable:  # a kernel that gets no memory may crash
                child = Child("tflm_child.py", NAME)
                return False

        low, high = 0, 64  # in steps: too small, not tried yet
        while not loads(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if loads(middle) else (middle, high)
        return 16 * high

    def executed(self) -> Mapping[str, int]:
        """Return how often each operator of the file runs."""
        return dict(sorted(Counter(operator_names(self.interpreter._content)).items()))


@contextlib.contextmanager
def _where(path: str | Path) -> Iterator[None]:
    """Add the path of the file to errors that a loading runtime raises."""
    try:
        yield
    except RuntimeUnavailable as e:
        if e.where:
            raise
        own = {n for n in operator_names(Path(path).read_bytes()) if n.startswith("CUSTOM")}
        why = f"{e.what} ({', '.join(sorted(own))})" if "CUSTOM" in e.what else e.what
        raise RuntimeUnavailable(f"The file does not load: {why}", where=str(path), hint=Tflm.hint) from e


def operator_names(content: bytes) -> list[str]:
    """Return the names of the operators of a file's first graph, in order: the schema's, or "CUSTOM name"."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(content, 0)
    names = {number: name for name, number in vars(schema.BuiltinOperator).items() if isinstance(number, int)}
    graph, found = model.Subgraphs(0), []
    for k in range(graph.OperatorsLength()):
        code = model.OperatorCodes(graph.Operators(k).OpcodeIndex())
        name = names.get(max(code.BuiltinCode(), code.DeprecatedBuiltinCode()), "?")
        found.append(f"{name} {(code.CustomCode() or b'').decode(errors='replace')}" if name == "CUSTOM" else name)
    return found
