"""Each operator as ONNX Runtime computes what is written for it, with usual and with other attributes."""

import numpy as np
import pytest

from chipfit.errors import UnsupportedError
from chipfit.export.onnx.ops import REFUSED, WRITERS
from chipfit.export.onnx.writer import export_onnx
from chipfit.operators.table import OPS
from chipfit.passes.decompose import RULES
from chipfit.runtimes.onnxruntime import OnnxRuntime
from tests.export.operators import CASES, alone, operands

REASONS = {op: f"no ONNX writer. Got: {op} 'n' .{why}" for op, why in REFUSED.items()}


@pytest.mark.parametrize("name", [*OPS, *CASES])
def test_an_operator_is_written_as_the_engine_computes_it_or_refused_with_the_reason(name, tmp_path):
    graph, inputs, want = alone(name)
    if name in REASONS:
        assert name not in WRITERS and name not in RULES
        with pytest.raises(UnsupportedError, match=REASONS[name]):
            export_onnx(graph, None, tmp_path / "m.onnx")
        return
    got = OnnxRuntime(export_onnx(graph, None, tmp_path / "m.onnx")).run([x.numpy() for x in inputs])
    for y, found in zip(want, got.values(), strict=True):
        assert found.dtype == y.numpy().dtype
        np.testing.assert_allclose(found, y.numpy(), atol=1e-5, rtol=1e-5)


def test_every_attribute_of_every_operator_has_two_values_among_the_cases():
    known: dict[tuple[str, str], set[str]] = {}
    for node, _ in map(operands, (*OPS, *CASES)):
        for key, value in node.attrs.items():
            known.setdefault((node.op, key), set()).add(repr(value))
    once = {op for (op, _), values in known.items() if len(values) == 1}
    assert once == {"DynamicQuantize", "Dropout", "SVDF"}  # of one file format, without an effect, read and not written
