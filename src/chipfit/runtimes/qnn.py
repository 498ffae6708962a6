"""Qualcomm's QNN for the HTP, emulated on x86 by a plugin of ONNX Runtime: measured, not promised to be equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from chipfit.errors import RuntimeUnavailable
from chipfit.operators.table import read_column
from chipfit.registry import register
from chipfit.runtimes import check_inputs
from chipfit.runtimes.child import Child
from chipfit.runtimes.onnxruntime import input_sizes, read

NAME = "QNN"
#: operator -> largest difference from ONNX Runtime's kernels [codes], as `benchmarks/qnn.py` measures. A product rounds
#: its second operand again unless its zero point is 128, which costs more the smaller the results are
WITHIN = {"*": 1}
read_column("qnn", lambda op, within: WITHIN.update({op: within}), WITHIN)


@register(
    "runtime",
    "qnn",
    suffix=".onnx",
    libraries=("onnx", "onnxruntime", "onnxruntime_qnn"),
    extra="qnn",
    kernels="onnxruntime",
    codes="{}_q",
    within=WITHIN,
)
class Qnn:
    """A loaded ONNX file, in a process of its own; nodes that the HTP does not take run on ONNX Runtime's CPU."""

    def __init__(self, path: str | Path, tensors: Sequence[str] = ()) -> None:
        """Load `path` and make the ONNX values named in `tensors` readable.

        Raises:
            RuntimeUnavailable: the library refuses the file, crashes or hangs.
        """
        self._path, self.child = str(path), Child("qnn_child.py", NAME, path=str(path))
        model = read(path, tensors)
        try:
            self.inputs: list[str] = self.child.ask("load", model.SerializeToString())
            self._nodes: list[tuple[str, str]] = self.child.ask("executed")
        except RuntimeUnavailable as e:
            raise RuntimeUnavailable(f"The file does not load: {e.what}", where=self._path) from e
        self._sizes = input_sizes(model, self.inputs)

    def run(self, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Run one batch, in the model's order; return outputs and the requested tensors by ONNX name.

        Raises:
            RuntimeUnavailable: the library refuses the inputs, crashes or hangs.
        """
        check_inputs(inputs, self._sizes)
        given = [np.asarray(x, order="C") for x in inputs]
        results: dict[str, np.ndarray] = self.child.ask("run", given)
        return results

    def executed(self) -> Mapping[str, int]:
        """Return the operators that run on the HTP, and on the CPU, with counts."""
        places = {True: "CPU", False: "HTP"}
        kinds = Counter(f"{op} {places['CPU' in provider]}" for op, provider in self._nodes)
        return dict(sorted(kinds.items()))
