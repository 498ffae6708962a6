"""ONNX Runtime on the CPU: loads a file and returns any of its tensors."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from chipfit.errors import RuntimeUnavailable, first_line
from chipfit.files import wrap_read_errors
from chipfit.registry import register
from chipfit.runtimes import check_inputs, dequantize_output, quantize_input, read_notes, unfit_notes

if TYPE_CHECKING:
    from chipfit.platform.schema import Platform

#: note of a file that ONNX Runtime has optimised already, and that runs as it is
OPTIMISED = "chipfit.optimised"
#: an operator that on several threads computes parts of a batch, each with ranges of its own
_SPLITS_BATCHES = "DynamicQuantizeLSTM"
#: exceptions of ONNX Runtime for damaged files; they share no base
_REFUSALS = "Fail InvalidArgument InvalidGraph InvalidProtobuf NotImplemented RuntimeException EPFail".split()


def _refusals() -> tuple[type[Exception], ...]:
    """Return the exceptions that a file which is refused raises; UnicodeDecodeError comes from names in it."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return (*(getattr(state, name) for name in _REFUSALS), UnicodeDecodeError)


@register("runtime", "onnxruntime", suffix=".onnx", libraries=("onnx", "onnxruntime"), extra="onnx", codes="{}_q")
class OnnxRuntime:
    """A loaded file, run as a plain `onnxruntime.InferenceSession(path)` runs it: no option changes a result.

    Files with dynamic LSTMs, whose results depend on the number of threads, run on one thread.
    """

    def __init__(self, path: str | Path, tensors: Sequence[str] = ()) -> None:
        """Load `path` and make the ONNX values named in `tensors` readable.

        Raises:
            RuntimeUnavailable: ONNX Runtime refuses the file.
        """
        import onnx
        import onnxruntime as ort

        model = read(path, tensors)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._one_thread = any(n.op_type == _SPLITS_BATCHES for n in model.graph.node)
        if self._one_thread:
            options.intra_op_num_threads = 1
        if any(p.key == OPTIMISED for p in model.metadata_props):
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            optimised = Path(folder) / "optimised.onnx"
            options.optimized_model_filepath = str(optimised)
            try:
                self.session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
            except _refusals() as e:
                raise RuntimeUnavailable(f"ONNX Runtime refuses the file: {first_line(e)}", where=str(path)) from e
            self._optimised = onnx.load(str(optimised), load_external_data=False)
        self.inputs = [i.name for i in self.session.get_inputs()]
        self._sizes = input_sizes(model, self.inputs)
        self._io = _quantized_io(model, str(path))

    @staticmethod
    def open(path: Path) -> None:
        """Open a file in a plain session, without running it.

        Raises:
            RuntimeUnavailable: ONNX Runtime refuses the file.
        """
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 3
        try:
            ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except _refusals() as e:
            raise RuntimeUnavailable(f"ONNX Runtime refuses the file: {first_line(e)}", where=str(path)) from e

    def run(self, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Run one batch, in the model's order; return outputs and the requested tensors by ONNX name.

        Raises:
            RuntimeUnavailable: The inputs do not fit the file, or an operator refuses its operands.
        """
        check_inputs(inputs, self._sizes)
        names, (taken, given) = [o.name for o in self.session.get_outputs()], self._io
        feed = {i: np.asarray(x, order="C") for i, x in zip(self.inputs, inputs, strict=True)}
        feed |= {i: quantize_input(feed[i], c["scale"], c["zero_point"], np.dtype(c["type"])) for i, c in taken.items()}
        try:
            got = dict(zip(names, self.session.run(names, feed), strict=True))
        except _refusals() as e:
            raise RuntimeUnavailable(f"ONNX Runtime cannot run the file on these inputs: {first_line(e)}") from e
        return got | {o: dequantize_output(got[o], c["scale"], c["zero_point"]) for o, c in given.items()}

    def executed(self) -> Mapping[str, int]:
        """Return operator kinds of the optimised model, with counts: QLinearConv means integers, Conv means float."""
        return dict(sorted(Counter(n.op_type for n in self._optimised.graph.node).items()))

    def in_pairs(self, platform: Platform) -> bool:
        """Return whether products are added in pairs, in 16 bits, by this CPU and by the platform's."""
        return platform.arch_selected != "VNNI" and saturates()

    def warnings(self, platform: Platform) -> list[str]:
        """Return warnings: this CPU alone saturates, or results depend on the number of threads."""
        threads = (
            f"{_SPLITS_BATCHES} is compared on one thread; on several, each computes part of a batch, in which it "
        )
        threads += "rounds states by the range of that part"
        found = [threads] * self._one_thread
        if platform.arch_selected != "VNNI" or not saturates():
            return found
        return [
            *found,
            f"this CPU has no VNNI: it adds two 8-bit products in 16 bits, with saturation, so its integers differ "
            f"from those of '{platform.name}@VNNI'; quantize for '{platform.name}', whose weights saturate nowhere",
        ]


@with_config(ConfigDict(strict=True, extra="forbid"))
class _QuantizedIO(TypedDict):
    """A quantized input or output."""

    type: Literal["int8", "uint8", "int16", "uint16"]
    scale: Annotated[float, Field(ge=1e-38, le=1e38)]
    zero_point: Annotated[int, Field(ge=-(1 << 16), le=1 << 16)]
    own: bool


def _quantized_io(model: Any, path: str) -> tuple[dict[str, _QuantizedIO], dict[str, _QuantizedIO]]:
    """Return the quantized inputs and outputs that the file's notes state.

    Raises:
        RuntimeUnavailable: the notes are malformed or do not fit the file.
    """
    notes = next((p.value for p in model.metadata_props if p.key == "chipfit.io"), "{}")
    found = read_notes(dict[Literal["inputs", "outputs"], dict[str, _QuantizedIO]], notes, path)
    taken, given = found.get("inputs", {}), found.get("outputs", {})
    ends = {i.name for i in model.graph.input}, {o.name for o in model.graph.output}
    if not (taken.keys() <= ends[0] and given.keys() <= ends[1]):
        raise unfit_notes(path)
    return taken, given


def read(path: str | Path, tensors: Sequence[str] = ()) -> Any:
    """Return the ModelProto in a file, with those of its `tensors` that it computes declared outputs.

    Raises:
        RuntimeUnavailable: it is missing, or no ONNX model.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        with wrap_read_errors(path, RuntimeUnavailable):
            model = onnx.load(str(path))
    except (DecodeError, onnx.checker.ValidationError) as e:  # no ModelProto; missing files of weights
        raise RuntimeUnavailable(f"The file is not an ONNX model: {first_line(e)}", where=str(path)) from e
    made = {o for n in model.graph.node for o in n.output} - {o.name for o in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=t) for t in tensors if t in made)
    return model


def input_sizes(model: Any, names: Sequence[str]) -> dict[str, list[int | str | None] | None]:
    """Return the sizes of inputs of a ModelProto, for `check_inputs`; named sizes may differ where one is broadcast."""
    kinds = {i.name: i.type.tensor_type for i in model.graph.input}
    free = [n for n in names if not kinds[n].HasField("shape")]
    sizes = {n: [d.dim_value or None for d in kinds[n].shape.dim] for n in names}
    return sizes | dict.fromkeys(free)


def saturates() -> bool:
    """Return whether this CPU adds pairs of u8 x s8 products in 16 bits; False if unknown."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "flags" in flags and "vnni" not in flags
