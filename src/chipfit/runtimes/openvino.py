"""OpenVINO on the CPU: its low-precision kernels in a plain session; integers come from further sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chipfit.errors import RuntimeUnavailable, first_line
from chipfit.registry import register
from chipfit.runtimes import check_inputs
from chipfit.runtimes.onnxruntime import input_sizes, read, saturates

if TYPE_CHECKING:
    from chipfit.platform.schema import Platform

#: in the lines of a message that name operators
_LACKING = "No conversion rule found for operations", "Conversion is failed for"
#: float layers stay in float32: they would run in bfloat16 on CPUs that have it
_OPTIONS = {"INFERENCE_PRECISION_HINT": "f32"}


@register(
    "runtime",
    "openvino",
    suffix=".onnx",
    libraries=("onnx", "openvino"),
    extra="openvino",
    kernels="openvino",
    codes="{}_q",
)
class OpenVino:
    """A loaded ONNX file, run as `Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})` runs it.

    An output in the middle of a network changes what OpenVINO fuses. So the outputs come from the file as it is, and
    integers from models that fuse as it does: one returns dequantized tensors, except for operands of additions, which
    a convolution then could not overwrite: each of these comes from a model of its own.
    """

    def __init__(self, path: str | Path, tensors: Sequence[str] = ()) -> None:
        """Load `path` and make the ONNX values named in `tensors` readable.

        Raises:
            RuntimeUnavailable: OpenVINO refuses the file.
        """
        model = read(path)
        self.path, self.outputs = str(path), [o.name for o in model.graph.output]
        self.model = self._with_outputs(model, self.outputs)
        declared = {i.name for i in model.graph.input}  # an input whose codes are used as they are has two names
        self.inputs = [next(iter(i.get_names() & declared)) for i in self.model.inputs]
        self._sizes = input_sizes(model, self.inputs)
        self._more: list[tuple[Any, list[_Tap]]] = []
        for taps in _in_sessions(model, [t for t in dict.fromkeys(tensors) if t not in self.outputs]):
            self._more.append((self._with_outputs(model, [*self.outputs, *(t.read for t in taps)]), taps))

    @staticmethod
    def open(path: Path) -> None:
        """Read and compile a file, without running it.

        Raises:
            RuntimeUnavailable: OpenVINO refuses the file.
        """
        _compiled(str(path), str(path))

    def _with_outputs(self, model: Any, outputs: Sequence[str]) -> Any:
        """Return the model, with these outputs, compiled for the CPU."""
        import onnx

        cut = onnx.ModelProto()
        cut.CopyFrom(model)
        del cut.graph.output[:]
        known = {o.name: o for o in model.graph.output}
        cut.graph.output.extend(known.get(o, onnx.ValueInfoProto(name=o)) for o in outputs)
        return _compiled(cut.SerializeToString(), self.path)

    def run(self, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Run one batch, in the model's order; return outputs and the requested tensors by ONNX name."""
        check_inputs(inputs, self._sizes)
        given = [np.asarray(x, order="C") for x in inputs]
        try:
            results = self.model(given)
        except (RuntimeError, ValueError) as e:
            what = f"OpenVINO cannot run the file on these inputs: {_reason(e)}"
            hint = "is this the file that was written for this model?"
            raise RuntimeUnavailable(what, where=self.path, hint=hint) from e
        out = {name: np.array(results[k]) for k, name in enumerate(self.outputs)}
        for model, taps in self._more:
            results = model(given)
            out |= {t.name: t.integers(np.array(results[k])) for k, t in enumerate(taps, len(self.outputs))}
        return out

    def warnings(self, platform: Platform) -> list[str]:
        """Return a warning if this CPU saturates and the platform's does not."""
        if platform.arch_selected not in ("VNNI", "AMX") or not saturates():
            return []
        what = "this CPU has no VNNI: it adds two 8-bit products in 16 bits, with saturation: integers differ from"
        hint = f"quantize for '{platform.name}', whose weights saturate nowhere"
        return [f"{what} those of '{platform.name}@{platform.arch_selected}'; {hint}"]

    def executed(self) -> Mapping[str, int]:
        """Return layer kinds of the compiled model with the type they run in, and counts."""
        nodes = [n.get_rt_info() for n in self.model.get_runtime_model().get_ordered_ops()]
        kinds = Counter(f"{_text(n, 'layerType')} {_text(n, 'runtimePrecision')}" for n in nodes)
        return dict(sorted(kinds.items()))


@cache
def _core() -> Any:
    """Return the one OpenVINO core of the process, which is never released.

    A core moves the stack of signal handlers to memory of its own. Where two are released in the order in which they
    were made, the stack stays in memory that is gone, and the next signal (a child has ended) ends the process.
    """
    import openvino

    return openvino.Core()


def _compiled(source: str | bytes, where: str) -> Any:
    """Return a model of a path or of the bytes of a file, compiled for the CPU.

    Raises:
        RuntimeUnavailable: OpenVINO refuses the file.
    """
    try:
        return _core().compile_model(_core().read_model(source), "CPU", _OPTIONS)
    except RuntimeError as e:
        raise RuntimeUnavailable(f"OpenVINO refuses the file: {_reason(e)}", where=where) from e


def _reason(e: Exception) -> str:
    """Return the line of a message that names operators, or the first one that is not a place in OpenVINO's source."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    lines = [line.removeprefix("-- ") for line in lines if any(x in line for x in _LACKING)] or lines
    return next((line for line in lines if not line.startswith("Exception from")), first_line(e))


class _Tap:
    """A tensor to read: its name, the output that carries it, and, if that is dequantized, scale and zero point."""

    def __init__(self, name: str, read: str = "", scale: Any = None, zero_point: Any = None) -> None:
        self.name, self.read, self.scale, self.zero_point = name, read or name, scale, zero_point

    def integers(self, x: np.ndarray) -> np.ndarray:
        """Return the tensor's integers, or floats if it has none."""
        if self.scale is None:
            return x
        ends = np.iinfo(self.zero_point.dtype)
        q = np.rint(x / self.scale) + self.zero_point.astype(np.float32)
        return np.clip(q, ends.min, ends.max).astype(self.zero_point.dtype)


def _in_sessions(model: Any, tensors: Iterable[str]) -> list[list[_Tap]]:
    """Return the tensors of a model that can be read, by the session that reads them."""
    from onnx import numpy_helper

    constants = {i.name: i for i in model.graph.initializer}
    made = {o for n in model.graph.node for o in n.output} | {i.name for i in model.graph.input}
    reals = {n.input[0]: n for n in model.graph.node if n.op_type == "DequantizeLinear" and len(n.input) > 2}
    added = {i for n in model.graph.node if n.op_type == "Add" for i in n.input}
    together, alone = [], []
    for name in (t for t in tensors if t in made):
        tap, real = _Tap(name), reals.get(name)
        if real is not None and all(i in constants for i in real.input[1:3]):
            tap = _Tap(name, real.output[0], *(numpy_helper.to_array(constants[i]) for i in real.input[1:3]))
        if tap.read in added:
            alone.append([tap])
        else:
            together.append(tap)
    return [*([together] if together else []), *alone]


def _text(info: Mapping[str, object], key: str) -> str:
    """Return an entry of OpenVINO's information about a layer, boxed or not."""
    value = info[key] if key in info else "?"  # noqa: SIM401 -- an RTMap has no get()
    return str(getattr(value, "value", value))
