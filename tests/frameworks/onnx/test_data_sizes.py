"""Networks that end in lists whose length depends on data: boxes that suppression keeps, places above a threshold."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import chipfit
from tests.build import randn

BOXES, SCORES = (np.random.default_rng(k).normal(size=s).astype(np.float32) for k, s in ((0, (4, 3)), (1, (1, 3))))
#: results of a network's ends, from boxes [N, 4, 64] and scores [N, 1, 64] of 64 places
ENDS = {
    "the kept boxes": """kept = Gather <axis = 1> (selected, two)
        flat = Reshape (kept, all)
        first = Gather <axis = 0> (corners, zero)
        some = Gather <axis = 0> (first, flat)
        n = Shape (flat)
        zeros = ConstantOfShape (n)
        column = Unsqueeze (zeros, one)
        long = Concat <axis = 1> (column, some)
        y = Slice (long, start, most, axis)""",
    "pairs of coordinates of boxes whose sample and number are listed": """
        places = Gather <axis = 1> (selected, ends)
        some = GatherND (corners, places)
        y = Reshape (some, pairs)""",
    "boxes above a threshold": """
        places = NonZero (high)
        ordered = Transpose <perm = [1, 0]> (places)
        pick = Gather <axis = 1> (ordered, ends)
        some = GatherND (corners, pick)
        s = Shape (some)
        count = Slice (s, start, one)
        sizes = Concat <axis = 0> (count, twice)
        y = Reshape (some, sizes)""",
    "rows that a mask selects": """
        flags = Reshape (high, all)
        list = Reshape (corners, rows_of_four)
        some = Compress <axis = 0> (list, flags)
        y = Identity (some)""",
    "distinct scores": """
        rounded = Round (scores)
        some = Unique (rounded)
        y = Unsqueeze (some, one)""",
}
NUMBERS = {"zero": 0, "start": [0], "one": [1], "two": [2], "all": [-1], "axis": [0], "most": [50], "pairs": [-1, 2]}
NUMBERS |= {"rows_of_four": [-1, 4], "ends": [0, 2], "twice": [2, 2], "many": [30]}


def network(end: str, batch: str) -> onnx.ModelProto:
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[{batch}, 3, 8, 8] x) => (float[n, k] y) {{
        b = Conv (x, wb)
        c = Conv (x, ws)
        columns = Reshape (b, columnwise)
        boxes = Exp (columns)
        corners = Transpose <perm = [0, 2, 1]> (boxes)
        rows = Reshape (c, rowwise)
        scores = Sigmoid (rows)
        high = Greater (scores, half)
        selected = NonMaxSuppression (corners, scores, many, half, half)
        {ENDS[end]}
    }}"""
    model = onnx.parser.parse_model(text)
    held = {k: np.array(v, np.int64) for k, v in NUMBERS.items()}
    held |= {"wb": BOXES[:, :, None, None], "ws": SCORES[:, :, None, None], "half": np.array(0.5, np.float32)}
    held |= {"columnwise": np.array([0, 4, -1]), "rowwise": np.array([0, 1, -1])}
    used = {i for n in model.graph.node for i in n.input}
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in held.items() if k in used)
    if "selected" not in ENDS[end]:
        model.graph.node.remove(next(n for n in model.graph.node if n.op_type == "NonMaxSuppression"))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, None))
    return model


@pytest.mark.parametrize("batch", ["1", "N"])
@pytest.mark.parametrize("end", ENDS)
def test_a_list_of_any_length_stands_in_float_behind_integers(end, batch, tmp_path):
    data = [randn(1 if batch == "1" else 2, 3, 8, 8, seed=k) for k in range(4)]
    result = chipfit.quantize(network(end, batch), data, platform="ort_cpu", progress=False)
    result.export(tmp_path / "m.onnx")
    assert result.verify(data).exact
    assert "some" not in result.similarity(data).layers
