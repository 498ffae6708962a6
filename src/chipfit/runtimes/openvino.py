"""OpenVINO on the CPU: reported beside the simulator, never promised to be equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from chipfit.errors import RuntimeUnavailable
from chipfit.registry import register
from chipfit.runtimes.onnxruntime import read


@register("runtime", "openvino", suffix=".onnx", libraries=("onnx", "openvino"), extra="openvino", codes="{}_q")
class OpenVino:
    """A loaded ONNX file, with float layers kept in float32 (they would run in bfloat16 on CPUs that have it)."""

    def __init__(self, path: str | Path, tensors: Sequence[str] = (), *, threads: int = 0) -> None:
        """Load `path` and make the ONNX values named in `tensors` readable.

        Raises:
            RuntimeUnavailable: OpenVINO is not installed or refuses the file.
        """
        try:
            import onnx
            import openvino
        except ImportError as e:
            raise RuntimeUnavailable("OpenVINO is not installed", hint="pip install 'chipfit[openvino]'") from e
        model = read(path)
        made = {o for n in model.graph.node for o in n.output}
        self.outputs = [o.name for o in model.graph.output]
        wanted = [t for t in tensors if t in made and t not in self.outputs]
        model.graph.output.extend(onnx.ValueInfoProto(name=t) for t in wanted)
        self.outputs += wanted
        config = {"INFERENCE_PRECISION_HINT": "f32", **({"INFERENCE_NUM_THREADS": threads} if threads else {})}
        try:
            core = openvino.Core()
            self.model = core.compile_model(core.read_model(model.SerializeToString()), "CPU", config)
        except Exception as e:  # OpenVINO raises RuntimeError and others
            raise RuntimeUnavailable(
                f"OpenVINO refuses the file: {str(e).splitlines()[0][:300]}", where=str(path)
            ) from e
        self.inputs = [i.get_any_name() for i in self.model.inputs]

    def run(self, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """One batch; `inputs` in the model's order. Returns outputs and the requested tensors by ONNX name."""
        results = self.model([np.ascontiguousarray(x) for x in inputs[: len(self.inputs)]])
        return {name: results[k] for k, name in enumerate(self.outputs)}

    def executed(self) -> Mapping[str, int]:
        """Layer kinds of the compiled model with the type they run in, and counts."""
        counts: dict[str, int] = {}
        for n in self.model.get_runtime_model().get_ordered_ops():
            info = n.get_rt_info()

            def text(key: str, info: Mapping[str, object] = info) -> str:
                value = info[key] if key in info else "?"  # noqa: SIM401 -- an RTMap has no get()
                return str(getattr(value, "value", value))

            key = f"{text('layerType')} {text('runtimePrecision')}"
            counts[key] = counts.get(key, 0) + 1
        return dict(sorted(counts.items()))
