"""OpenVINO on the CPU: compared with the simulation, never promised to be equal."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from chipfit.errors import RuntimeUnavailable, first_line
from chipfit.registry import register
from chipfit.runtimes.onnxruntime import read


@register("runtime", "openvino", suffix=".onnx", libraries=("onnx", "openvino"), extra="openvino", codes="{}_q")
class OpenVino:
    """A loaded ONNX file, with float layers kept in float32 (they would run in bfloat16 on CPUs that have it)."""

    def __init__(self, path: str | Path, tensors: Sequence[str] = ()) -> None:
        """Load `path` and make the ONNX values named in `tensors` readable.

        Raises:
            RuntimeUnavailable: OpenVINO refuses the file.
        """
        import openvino

        model = read(path, tensors)
        self.outputs = [o.name for o in model.graph.output]
        how = {"INFERENCE_PRECISION_HINT": "f32"}
        try:
            core = openvino.Core()
            self.model = core.compile_model(core.read_model(model.SerializeToString()), "CPU", how)
        except RuntimeError as e:
            raise RuntimeUnavailable(f"OpenVINO refuses the file: {first_line(e)}", where=str(path)) from e
        self.inputs = [i.get_any_name() for i in self.model.inputs]

    def run(self, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Run one batch, in the model's order; return outputs and the requested tensors by ONNX name."""
        results = self.model([np.ascontiguousarray(x) for x in inputs[: len(self.inputs)]])
        return {name: results[k] for k, name in enumerate(self.outputs)}

    def executed(self) -> Mapping[str, int]:
        """Return layer kinds of the compiled model with the type they run in, and counts."""
        nodes = [n.get_rt_info() for n in self.model.get_runtime_model().get_ordered_ops()]
        kinds = Counter(f"{_text(n, 'layerType')} {_text(n, 'runtimePrecision')}" for n in nodes)
        return dict(sorted(kinds.items()))


def _text(info: Mapping[str, object], key: str) -> str:
    """Return an entry of OpenVINO's information about a layer, boxed or not."""
    value = info[key] if key in info else "?"  # noqa: SIM401 -- an RTMap has no get()
    return str(getattr(value, "value", value))
