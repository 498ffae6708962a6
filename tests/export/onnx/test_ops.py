"""Each operator as ONNX Runtime computes what is written for it, with attributes other than the usual ones."""

from __future__ import annotations

import numpy as np
import pytest

from chipfit.errors import UnsupportedError
from chipfit.export.onnx.writer import export_onnx
from chipfit.runtimes.onnxruntime import OnnxRuntime
from tests.export.operators import CASES, alone

REFUSED = {"circle": "circular padding"}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_computes_what_the_engine_computes(name, tmp_path):
    graph, inputs, want = alone(name)
    if name in REFUSED:
        with pytest.raises(UnsupportedError, match=REFUSED[name]):
            export_onnx(graph, None, tmp_path / "m.onnx")
        return
    got = OnnxRuntime(export_onnx(graph, None, tmp_path / "m.onnx")).run([x.numpy() for x in inputs])
    for y, found in zip(want, got.values(), strict=True):
        assert found.dtype == y.numpy().dtype
        np.testing.assert_allclose(found, y.numpy(), atol=1e-5, rtol=1e-5)
