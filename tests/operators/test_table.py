"""Every fact in the table of operators is true of the kernels, and missed if it is taken away."""

from dataclasses import fields, replace

import pytest
import torch

from chipfit.engine.kernels import KERNELS, execute
from chipfit.errors import ConfigError
from chipfit.export.onnx.ops import WRITERS, OnnxOp
from chipfit.frameworks.torch.read import READERS
from chipfit.graph.ir import Node
from chipfit.operators.table import OPS, OpDef, add_operators, words_of

IMAGE = (2, 4, 6, 6)
POOL = {"kernel": (2, 2), "stride": (2, 2), "padding": ((0, 0), (0, 0)), "ceil_mode": False}
REDUCE = {"axes": (2, 3), "keepdims": True}
INT, BOOL = "int", "bool"


def conv(n: int, **more):
    return {"stride": (1,) * n, "padding": ((1, 1),) * n, "dilation": (1,) * n, "groups": 1, **more}


def cell(gates: int):
    """Shapes of the weights and biases of a recurrent layer."""
    return [(gates * 4, 3), (gates * 4, 4), (gates * 4,), (gates * 4,)]


#: operator -> (shapes of its inputs, attributes); every other operator takes one image, or as many as it has data slots
CASES: dict[str, tuple[list[tuple], dict]] = {
    **{f"Conv{n}D": ([(2, 4, *[6] * n), (5, 4, *[3] * n), (5,)], conv(n)) for n in (1, 2, 3)},
    "DepthwiseConv2D": ([IMAGE, (8, 1, 3, 3), (8,)], conv(2, groups=4)),
    **{
        f"TransposeConv{n}D": ([(2, 4, *[6] * n), (4, 3, *[3] * n), (6,)], conv(n, groups=2, output_padding=(0,) * n))
        for n in (1, 2, 3)
    },
    "Linear": ([IMAGE, (5, 6), (5,)], {}),
    "MatMul": ([IMAGE, IMAGE], {}),
    "BatchNorm": ([IMAGE, (4,), (4,), (4,), (4,)], {"eps": 1e-3}),
    "LayerNorm": ([IMAGE, (6,), (6,)], {"normalized_shape": (6,), "eps": 1e-3}),
    "RMSNorm": ([IMAGE, (6,)], {"normalized_shape": (6,), "eps": 1e-3}),
    "GroupNorm": ([IMAGE, (4,), (4,)], {"groups": 2, "eps": 1e-3}),
    "InstanceNorm": ([IMAGE, (4,), (4,)], {"eps": 1e-3}),
    "SDPA": ([IMAGE, IMAGE, IMAGE], {"is_causal": False, "scale": None, "enable_gqa": False}),
    "LSTM": ([(2, 5, 3), *cell(4), (2, 4), (2, 4)], {"gates": "ifgo", "reverse": False, "cell_clip": 0.5}),
    "GRU": ([(2, 5, 3), *cell(3), (2, 4)], {"gates": "rzn", "reverse": False, "reset_after": True}),
    "RNN": ([(2, 5, 3), *cell(1), (2, 4)], {"reverse": False, "activation": "tanh"}),
    "SVDF": ([(5, 4), (6, 4), (6, 3), (6,), (1, 18)], {"rank": 1}),
    "Clamp": ([IMAGE], {"min": -0.5, "max": 0.5}),
    "LeakyRelu": ([IMAGE], {"negative_slope": 0.1}),
    "PRelu": ([IMAGE, (4,)], {}),
    "Elu": ([IMAGE], {"alpha": 1.0}),
    "Softplus": ([IMAGE], {"beta": 1.0, "threshold": 20.0}),
    "Gelu": ([IMAGE], {"approximate": "none"}),
    "L2Norm": ([IMAGE], {"axis": 1, "eps": 1e-12}),
    **{op: ([IMAGE], {"axis": 1}) for op in ("Softmax", "LogSoftmax", "CumSum", "Unstack", "Size")},
    **{op: ([IMAGE, IMAGE], {"axis": 1}) for op in ("Concat", "Stack")},
    "Split": ([IMAGE], {"axis": 1, "sizes": (1, 3)}),
    "MaxPool": ([IMAGE], {**POOL, "dilation": (1, 1)}),
    "AvgPool": ([IMAGE], {**POOL, "count_include_pad": False}),
    **{op: ([IMAGE], {"output_size": (4, 4)}) for op in ("AdaptiveAvgPool", "AdaptiveMaxPool")},
    **{op: ([IMAGE], REDUCE) for op in ("Mean", "Sum", "ReduceL2", "ReduceMax", "ReduceMin", "ReduceProd")},
    "ArgMax": ([IMAGE], {"axis": 1, "keepdims": True}),
    "ArgMin": ([IMAGE], {"axis": 1, "keepdims": True}),
    "DetectionPostProcess": (
        [(1, 9, 4), (1, 9, 4), (9, 4)],
        {
            "max_detections": 3,
            "max_classes_per_detection": 1,
            "detections_per_class": 2,
            "use_regular_nms": False,
            "nms_score_threshold": 0.1,
            "nms_iou_threshold": 0.75,
            "num_classes": 4,
            **{f"{axis}_scale": 1.0 for axis in "yxhw"},
        },
    ),
    "TopK": ([IMAGE], {"k": 2, "axis": 1, "largest": True}),
    "Pad": ([IMAGE], {"padding": ((0, 0), (1, 0), (1, 1), (0, 2)), "mode": "constant", "value": 0.0}),
    "Reshape": ([IMAGE], {"shape": (2, -1)}),
    "Transpose": ([IMAGE], {"perm": (0, 2, 1, 3)}),
    "Squeeze": ([(2, 1, 4)], {"axes": (1,)}),
    "Unsqueeze": ([IMAGE], {"axes": (1,)}),
    "Expand": ([(2, 1, 4)], {"shape": (2, 3, 4)}),
    "Slice": ([IMAGE], {"axis": 1, "start": 1, "end": None, "step": 2}),
    "Select": ([IMAGE], {"axis": 1, "index": 1}),
    "Gather": ([IMAGE, (3, INT)], {"axis": 1}),
    "GatherElements": ([IMAGE, (*IMAGE, INT)], {"axis": 1}),
    "Embedding": ([(5, 3), (2, 4, INT)], {}),
    "Where": ([(*IMAGE, BOOL), IMAGE, IMAGE], {}),
    "Roll": ([IMAGE], {"shifts": (1,), "axes": (1,)}),
    "Tile": ([IMAGE], {"repeats": (1, 2, 1, 1)}),
    "Resize": ([IMAGE], {"mode": "linear", "size": (9, 7), "scale": None, "align_corners": False}),
    "GridSample": ([IMAGE, (2, 3, 4, 2)], {"mode": "bilinear", "padding_mode": "zeros", "align_corners": False}),
    "DepthToSpace": ([(2, 8, 6, 6)], {"block": 2}),  # two channels come out, which tells their order
    "SpaceToDepth": ([IMAGE], {"block": 2}),
    "ChannelShuffle": ([IMAGE], {"groups": 2}),
    "Cast": ([IMAGE], {"dtype": "int32"}),
    "Curve": ([IMAGE], {"steps": '[["Exp", ["0"], {}], ["Add", ["1", 1.0], {}]]'}),
    "Dropout": ([IMAGE], {"p": 0.5}),
    "DynamicQuantize": ([IMAGE], {"qmin": 0, "qmax": 255, "affine": True, "per": "tensor", "block": 1}),
    **{op: ([(*IMAGE, BOOL)] * 2, {}) for op in ("LogicalAnd", "LogicalOr")},
    "LogicalNot": ([(*IMAGE, BOOL)], {}),
}
POSITIVE = {"Log", "Sqrt", "Rsqrt", "Pow", "DetectionPostProcess"}
#: operators of numbers in [-1, 1], and from 1 on
SINES, ABOVE_ONE = {"Asin", "Acos", "Atanh"}, {"Acosh"}


def value(shape: tuple, op: str) -> torch.Tensor:
    if shape[-1] == INT:
        return torch.randint(0, 3, shape[:-1])
    if shape[-1] == BOOL:
        return torch.rand(shape[:-1]) > 0.5
    if op in SINES:
        return torch.rand(shape) * 1.8 - 0.9
    return torch.rand(shape) + 0.5 + (op in ABOVE_ONE) if op in POSITIVE | ABOVE_ONE else torch.randn(shape) * 2


def made(op: str) -> tuple[Node, list[torch.Tensor]]:
    """A node and inputs for it."""
    shapes, attrs = CASES.get(op) or ([IMAGE] * len(OPS[op].slots), {})
    inputs = [value(s, op) for s in shapes]
    if op == "BatchNorm":
        inputs[4] = inputs[4].abs() + 0.1
    return Node("n", op, tuple(f"x{k}" for k in range(len(inputs))), ("y",), attrs), inputs


def results(node: Node, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results, of several the floats."""
    found = [torch.as_tensor(y) for y in execute(node, inputs)]
    return [y for y in found if y.is_floating_point()] or found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-4) for x, y in zip(a, b, strict=True))


def moves(node: Node, inputs: list[torch.Tensor]) -> bool:
    known = torch.cat([x.double().reshape(-1) for x in inputs if x.is_floating_point()] or [torch.zeros(0)])
    return all(bool(torch.isin(y.double(), known).all()) for y in results(node, inputs))


def one_data_input(node: Node, inputs: list[torch.Tensor]) -> bool:
    """Facts about functions of one variable; Requantize is left out, whose result is on another grid."""
    data = [k for k in range(len(inputs)) if OPS[node.op].slot(k).startswith("in")]
    return data == [0] and inputs[0].is_floating_point() and node.op != "Requantize"


def homogeneous(node: Node, inputs: list[torch.Tensor]) -> bool:
    x, *rest = inputs
    return same(results(node, [3 * x, *rest]), [3 * y for y in results(node, inputs)])


def shifts(node: Node, inputs: list[torch.Tensor]) -> bool:
    x, *rest = inputs
    there = node.with_(attrs={**node.attrs, "value": 2.5}) if node.op == "Pad" else node
    return same(results(there, [x + 2.5, *rest]), [y + 2.5 for y in results(node, inputs)])


def clips(node: Node, inputs: list[torch.Tensor]) -> bool:
    """The operator clips its data to the range of its row; without a row, to any range."""
    low, high = node.clip_range or (float(results(node, inputs)[0].min()), float(results(node, inputs)[0].max()))
    (y, *_), x = results(node, inputs), inputs[0]
    return y.shape == x.shape and not torch.equal(x, y) and torch.equal(y, x.clamp(low, high))


def by_channel(node: Node, inputs: list[torch.Tensor]) -> bool:
    other = [x.clone() for x in inputs]
    for x in other:
        if x.dim() == 4:
            x[:, 1] = ~x[:, 1] if x.dtype == torch.bool else x[:, 1] + 1
    (before,), (after,) = results(node, inputs), results(node, other)
    return torch.equal(before[:, [0, 2, 3]], after[:, [0, 2, 3]])


def fresh(node: Node, inputs: list[torch.Tensor]) -> bool:
    taken = {x.untyped_storage().data_ptr() for x in inputs}
    return not any(
        isinstance(y, torch.Tensor) and y.untyped_storage().data_ptr() in taken for y in execute(node, inputs)
    )


def elementwise(node: Node, inputs: list[torch.Tensor]) -> bool:
    """It computes the same whatever the order of the axes."""
    turned = [x.permute(0, 2, 3, 1) for x in inputs]
    return same(results(node, turned), [y.permute(0, 2, 3, 1) for y in results(node, inputs)])


def ieee(node: Node, inputs: list[torch.Tensor]) -> bool:
    """One correctly rounded operation: computed in float64 and rounded, it is the same (Figueroa 1995)."""
    inputs = [torch.randn_like(x) if x.is_floating_point() else x for x in inputs]
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    pairs = zip(results(node, inputs), results(node, wide), strict=True)
    return all(torch.equal(y, z.to(y.dtype)) for y, z in pairs)


def additive(node: Node, inputs: list[torch.Tensor]) -> bool:
    a, b = inputs[0], torch.randn_like(inputs[0])
    (x,), (y,), (both,) = results(node, [a]), results(node, [b]), results(node, [a + b])
    return torch.allclose(x + y, both, atol=1e-5)


def wrong(op: str, row: OpDef) -> list[str]:
    """The facts of a row that the operator's kernel contradicts, or that it has although the row denies them."""
    node, inputs = made(op)
    out = []
    if moves(node, inputs) != row.moves and op != "Requantize":
        out.append("moves")
    if one_data_input(node, inputs):
        out += [f.__name__ for f in (homogeneous, shifts) if f(node, inputs) != getattr(row, f.__name__)]
    if row.by_channel and not by_channel(node, inputs):
        out.append("by_channel")
    if one_data_input(node, inputs) and clips(node, inputs) != bool(row.clips):
        out.append("clips")
    if not row.view and not fresh(node, inputs):
        out.append("view")
    if row.ieee and not ieee(node, inputs):
        out.append("ieee")
    if row.identity and not same(results(node, inputs), inputs[:1]):
        out.append("identity")
    if row.sums and not additive(node, inputs):
        out.append("sums")
    if row.bounded and not all(
        row.bounded[0] <= v <= row.bounded[1] for y in results(node, inputs) for v in y.aminmax()
    ):
        out.append("bounded")
    if row.layout == "elementwise" and not elementwise(node, inputs):
        out.append("layout")
    if row.kind:
        (y,), groups = results(node, inputs), node.attrs.get("groups", 1) if row.kind == "transposed" else 1
        if y.shape[-1 if row.kind == "linear" else 1] != inputs[1].shape[row.weight_axis] * groups:
            out.append("weight_axis")
    return out


@pytest.mark.parametrize("op", OPS)
def test_the_table_says_what_the_kernel_does(op):
    assert wrong(op, OPS[op]) == []


@pytest.mark.parametrize(
    ("op", "fact", "value"),
    [
        ("MaxPool", "moves", False),
        ("AvgPool", "moves", True),
        ("Relu", "homogeneous", False),
        ("Relu6", "homogeneous", True),
        ("Mean", "shifts", False),
        ("Sum", "shifts", True),
        ("ChannelShuffle", "by_channel", True),
        ("Reshape", "view", False),
        ("Relu", "identity", True),
        ("ReduceMax", "sums", True),
        ("Tanh", "bounded", (0.0, 1.0)),
        ("Softmax", "layout", "elementwise"),
        ("Sigmoid", "ieee", True),
        ("Mean", "ieee", True),
        ("LeakyRelu", "ieee", True),
        ("TransposeConv2D", "weight_axis", 0),
        ("Clamp", "clips", ()),
        ("LeakyRelu", "clips", (0.0, None)),
    ],
)
def test_a_wrong_fact_is_noticed(op, fact, value):
    assert fact in wrong(op, replace(OPS[op], **{fact: value}))


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("AvgPool", {"count_include_pad": True, "padding": ((0, 0), (0, 0))}),
        ("AvgPool", {"count_include_pad": True, "padding": ((0, 0), (1, 0))}),
        ("AvgPool", {"count_include_pad": False, "padding": ((1, 1), (0, 1))}),
        ("Pad", {"value": 0.0}),
        ("Pad", {"value": 1.5}),
    ],
)
def test_facts_hold_for_the_attributes_of_a_node(op, attrs):
    node, inputs = made(op)
    node = node.with_(attrs=node.attrs | attrs)
    assert node.facts.homogeneous == homogeneous(node, inputs)
    if op == "AvgPool":  # a shifted Pad pads with another value
        assert node.facts.shifts == shifts(node, inputs)


def test_every_fact_of_a_row_is_read_somewhere():
    """A fact that no code asks for would be a lie in waiting."""
    from pathlib import Path

    import chipfit

    package = Path(chipfit.__file__).parent
    code = "\n".join(p.read_text() for p in package.rglob("*.py") if p.name != "ops.py" or "graph" not in p.parts)
    assert [f.name for f in fields(OpDef) if f".{f.name}" not in code and f.name != "note"] == []


def test_a_platforms_words_for_an_operator():
    assert words_of("Relu6", {}) == {"Relu6", "Clamp"}
    assert words_of("Clamp", {"min": -1.0, "max": 1.0}) == {"Clamp", "ReluN1To1", "HardTanh"}
    assert words_of("Pad", {"mode": "constant"}) == {"Pad", "PadV2"}


def test_depth_to_space_takes_the_pixels_of_a_channel_from_neighbouring_channels():
    """CRD in ONNX's words: channel 4 c + 2 i + j is pixel (i, j) of channel c; DCR would take 2 (2 i + j) + c."""
    node, (x,) = made("DepthToSpace")
    (y,), (back,) = results(node, [x]), results(node.with_(op="SpaceToDepth"), results(node, [x]))
    for c in range(2):
        for i in range(2):
            for j in range(2):
                assert torch.equal(y[:, c, i::2, j::2], x[:, 4 * c + 2 * i + j])
    assert torch.equal(back, x)


# ---------------------------------------------------------------- rows that are added


def test_a_row_adds_an_operator_to_every_column_that_is_in_use(drop_ins):
    add_operators({"Tan": {"facts": "element", "torch": "tan", "kernel": "torch:tan", "onnx": "Tan"}})
    assert OPS["Tan"].by_channel and KERNELS["Tan"] is torch.tan
    assert isinstance(WRITERS["Tan"], OnnxOp) and "tan" in READERS


@pytest.mark.parametrize(
    "row, message",
    [
        ({"fact": "element"}, "'Odd' has unknown fields.*Got: fact.*Allowed: .*facts"),
        ({"onnx": {"nmae": "Odd"}}, "'Odd' does not fit column 'onnx'.*nmae"),
    ],
)
def test_a_row_that_fits_no_column_is_refused(row, message, drop_ins):
    with pytest.raises(ConfigError, match=message):
        add_operators({"Odd": row})
    assert "Odd" not in OPS


def test_a_name_that_is_taken_is_refused(drop_ins):
    before = OPS["Relu"]
    with pytest.raises(ConfigError, match="'Relu' exists already"):
        add_operators({"Relu": {"facts": "element", "kernel": "torch:tan"}})
    assert OPS["Relu"] is before and KERNELS["Relu"] is not torch.tan


@pytest.mark.parametrize("wrong", [{"onnx": {"nmae": "Odd"}}, {"kernel": {"nmae": "Odd"}}, {"torch": {"nmae": "odd"}}])
def test_rows_leave_nothing_behind_if_one_cell_is_refused(wrong, drop_ins):
    good = {"torch": "tan", "kernel": "torch:tan", "onnx": "Tan"}
    with pytest.raises(ConfigError, match="'Odd' does not fit column"):
        add_operators({"Tan": good, "Odd": good | wrong})
    found = [table for table in (OPS, KERNELS, WRITERS) for op in ("Tan", "Odd") if op in table]
    assert not found and "tan" not in READERS
    add_operators({"Tan": good})
    assert KERNELS["Tan"] is torch.tan
