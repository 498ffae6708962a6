"""Each operator as LiteRT computes what is written for it, with attributes other than the usual ones."""

from __future__ import annotations

import numpy as np
import pytest

from chipfit.errors import UnsupportedError
from chipfit.export.tflite.writer import export_tflite
from chipfit.runtimes.litert import LiteRtReference
from tests.export.operators import CASES, alone

REFUSED = {
    "max with gaps": "its window is dilated",
    "conv of a volume in groups": "it has groups",
    "transposed with gaps": "it has dilation",
    "transposed beyond": "reaches beyond the last window",
    "replicate": "padding mode 'replicate'",
    "circle": "padding mode 'circular'",
    "cut off": "it cuts off",
    "cubic": "mode 'cubic' over 2 axes",
    "cubic between corners": "mode 'cubic' over 2 axes",
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_computes_what_the_engine_computes(name, tmp_path):
    graph, inputs, want = alone(name)
    if name in REFUSED:
        with pytest.raises(UnsupportedError, match=REFUSED[name]):
            export_tflite(graph, None, tmp_path / "m.tflite")
        return
    path = export_tflite(graph, None, tmp_path / "m.tflite", keep_layout=True)
    got = LiteRtReference(path).run([x.numpy() for x in inputs])
    for y, found in zip(want, got.values(), strict=True):
        np.testing.assert_allclose(found, y.numpy(), atol=1e-5, rtol=1e-5)
