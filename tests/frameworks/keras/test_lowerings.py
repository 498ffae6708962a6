"""Operator by operator: what Keras computes, channels last, is what the engine computes."""

import pytest
import torch

keras = pytest.importorskip("keras")

from chipfit.engine.run import run  # noqa: E402
from chipfit.errors import UnsupportedError  # noqa: E402 -- after the import that may skip
from chipfit.frameworks.keras.lower import lower  # noqa: E402
from chipfit.frameworks.keras.lowerings import LOWERINGS  # noqa: E402
from chipfit.graph.ir import Graph, Node, Value  # noqa: E402
from chipfit.plan.record import Plan  # noqa: E402

IMAGE, ROWS, SIGNAL = (2, 4, 6, 7), (3, 8), (2, 4, 9)


def conv(**changed):
    n = changed.pop("n", 2)
    return {"stride": (1,) * n, "padding": ((0, 0),) * n, "dilation": (1,) * n, "groups": 1, **changed}


def W(*shape):
    """A constant of the model."""
    return ("weight", *shape)


REDUCE = ("Mean", "Sum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2")
UNARY = """
    Relu Relu6 Sigmoid Tanh HardSwish HardSigmoid Swish Mish Exp Abs Neg Sin Cos Erf Floor Ceil
    Atan Sinh Cosh Asinh Asin Acos Acosh Atanh
    Round Sign Reciprocal Identity Requantize Selu
"""


def pool(kernel, stride, padding, **more):
    return {"kernel": kernel, "stride": stride, "padding": padding, "ceil_mode": False, **more}


#: operator, operands, attributes, dtype of the result
CASES = [
    *((op, [IMAGE], {}) for op in UNARY.split()),
    *((op, [IMAGE], {}) for op in ("Sqrt", "Rsqrt", "Log")),
    *(
        ("DynamicQuantize", [IMAGE], {"qmin": low, "qmax": 127, "affine": low == -128, "per": per, "block": 1})
        for low in (-128, -127)
        for per in ("tensor", "row")
    ),
    *(
        (op, [IMAGE, IMAGE], {})
        for op in ("Add", "Sub", "Mul", "Max", "Min", "Div", "Mod", "FloorDiv", "SquaredDifference")
    ),
    *((op, [IMAGE, W(4, 1, 1)], {}) for op in ("Add", "Sub", "Mul", "Max", "Pow")),
    *((op, [IMAGE, IMAGE], {}) for op in ("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual")),
    *((op, [IMAGE], {"axes": (2, 3), "keepdims": keep}) for op in REDUCE for keep in (True, False)),
    ("Div", [(3, 8, "int"), (3, 8, "int")], {}),
    ("Clamp", [IMAGE], {"min": -0.5, "max": None}),
    ("DepthToSpace", [(2, 8, 3, 5)], {"block": 2}),
    ("SpaceToDepth", [(2, 3, 4, 6)], {"block": 2}),
    ("LeakyRelu", [IMAGE], {"negative_slope": 0.2}),
    ("Elu", [IMAGE], {"alpha": 0.7}),
    ("PRelu", [IMAGE, W(4)], {}),
    ("PRelu", [IMAGE, W(1)], {}),
    ("Softplus", [IMAGE], {"beta": 2.0, "threshold": 20.0}),
    ("Gelu", [IMAGE], {"approximate": "none"}),
    ("Gelu", [IMAGE], {"approximate": "tanh"}),
    ("Dropout", [IMAGE], {"p": 0.3}),
    ("Softmax", [IMAGE], {"axis": 1}),
    ("L2Norm", [IMAGE], {"axis": 1, "eps": 1e-12}),
    ("LogSoftmax", [ROWS], {"axis": -1}),
    ("Conv2D", [IMAGE, W(5, 4, 3, 2), W(5)], conv(stride=(2, 2), padding=((1, 0), (0, 2)))),
    ("Conv2D", [IMAGE, W(6, 2, 3, 3), None], conv(groups=2, padding=((1, 1), (1, 1)))),
    ("Conv1D", [SIGNAL, W(5, 4, 3), W(5)], conv(n=1, padding=((2, 0),))),
    ("Conv3D", [(2, 3, 4, 5, 4), W(5, 3, 2, 2, 2), W(5)], conv(n=3)),
    ("DepthwiseConv2D", [IMAGE, W(8, 1, 3, 3), W(8)], conv(groups=4, stride=(2, 2), padding=((0, 1), (1, 1)))),
    ("DepthwiseConv2D", [IMAGE, W(4, 1, 3, 3), None], conv(groups=4, stride=(2, 1))),
    ("Linear", [ROWS, W(5, 8), W(5)], {}),
    ("Linear", [(2, 3, 8), W(5, 8), None], {}),
    ("MatMul", [(2, 3, 4), (2, 4, 5)], {}),
    ("MatMul", [(2, 3, 4), W(4, 5)], {}),
    ("Linear", [(3, 8), (5, 8)], {}),
    ("BatchNorm", [IMAGE, W(4), W(4), W(4), W(4)], {"eps": 1e-3}),
    ("BatchNorm", [IMAGE, None, None, W(4), W(4)], {"eps": 1e-3}),
    ("LayerNorm", [ROWS, W(8), W(8)], {"normalized_shape": (8,), "eps": 1e-5}),
    ("LayerNorm", [IMAGE], {"normalized_shape": (7,), "eps": 1e-5}),
    ("GroupNorm", [IMAGE, W(4), W(4)], {"groups": 2, "eps": 1e-5}),
    ("InstanceNorm", [IMAGE, W(4), W(4)], {"eps": 1e-5}),
    ("RMSNorm", [ROWS, W(8)], {"normalized_shape": (8,), "eps": 1e-6}),
    (
        "LSTM",
        [(2, 5, 3), ("weight", 16, 3), ("weight", 16, 4), ("weight", 16)],
        {"gates": "ifgo", "reverse": False, "cell_clip": 0.4},
    ),
    ("LSTM", [(2, 3), ("weight", 16, 3), ("weight", 16, 4)], {"gates": "iofg", "reverse": False, "cell_clip": None}),
    (
        "GRU",
        [(2, 5, 3), ("weight", 12, 3), ("weight", 12, 4), ("weight", 12), ("weight", 12)],
        {"gates": "zrn", "reverse": True, "reset_after": True},
    ),
    (
        "GRU",
        [(2, 5, 3), ("weight", 12, 3), ("weight", 12, 4), ("weight", 12), ("weight", 12)],
        {"gates": "rzn", "reverse": False, "reset_after": False},
    ),
    (
        "RNN",
        [(2, 5, 3), ("weight", 4, 3), ("weight", 4, 4), ("weight", 4), ("weight", 4), (2, 4)],
        {"reverse": True, "activation": "relu"},
    ),
    ("SDPA", [(2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4)], {"is_causal": False, "scale": None, "enable_gqa": False}),
    ("SDPA", [(2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4)], {"is_causal": True, "scale": 0.3, "enable_gqa": False}),
    ("Concat", [IMAGE, IMAGE], {"axis": 1}),
    ("Stack", [ROWS, ROWS], {"axis": 1}),
    ("Split", [IMAGE], {"axis": 1, "sizes": (1, 3)}),
    ("Unstack", [(2, 3, 4)], {"axis": 1}),
    ("CumSum", [ROWS], {"axis": 1}),
    ("ArgMax", [ROWS], {"axis": 1, "keepdims": True}),
    ("ArgMin", [ROWS], {"axis": -1, "keepdims": False}),
    ("TopK", [ROWS], {"k": 2, "axis": 1, "largest": True}),
    ("TopK", [ROWS], {"k": None, "axis": -1, "largest": False}),
    ("MaxPool", [IMAGE], pool((2, 3), (2, 2), ((0, 0), (0, 0)), dilation=(1, 1))),
    ("MaxPool", [IMAGE], pool((3, 3), (1, 1), ((1, 1), (0, 1)), dilation=(1, 1))),
    ("AvgPool", [IMAGE], pool((3, 3), (2, 2), ((0, 1), (1, 1)), count_include_pad=False)),
    ("AvgPool", [IMAGE], pool((3, 3), (2, 2), ((1, 1), (1, 1)), count_include_pad=True)),
    ("GlobalAvgPool", [IMAGE], {}),
    ("GlobalAvgPool", [SIGNAL], {}),
    ("Pad", [IMAGE], {"padding": ((0, 0), (0, 0), (1, 2), (0, 3)), "mode": "constant", "value": 0.0}),
    ("Pad", [IMAGE], {"padding": ((0, 0), (1, 0), (1, 2), (0, 3)), "mode": "constant", "value": 1.5}),
    ("Pad", [IMAGE], {"padding": ((0, 0), (0, 0), (1, 2), (0, 3)), "mode": "reflect", "value": 0.0}),
    ("Pad", [IMAGE], {"padding": ((0, 0), (0, 0), (1, 2), (0, 3)), "mode": "replicate", "value": 0.0}),
    ("Reshape", [IMAGE], {"shape": (-1, 4, 42)}),
    ("Reshape", [IMAGE], {"shape": (-1, 168)}),
    ("Reshape", [IMAGE], {"shape": (-1, 7)}),
    ("Transpose", [IMAGE], {"perm": (0, 3, 1, 2)}),
    ("Transpose", [(2, 3)], {"perm": (1, 0)}),
    ("Squeeze", [(2, 1, 4)], {"axes": (1,)}),
    ("Unsqueeze", [ROWS], {"axes": (1,)}),
    ("Expand", [(2, 1, 4)], {"shape": (-1, 3, -1)}),
    ("Slice", [IMAGE], {"axis": 1, "start": 1, "end": None, "step": 2}),
    ("Select", [IMAGE], {"axis": 2, "index": -1}),
    ("Gather", [ROWS, W(3, "int")], {"axis": 1}),
    ("GatherElements", [(3, 4, 8), (3, 4, 2, "int")], {"axis": 2}),
    ("Embedding", [W(5, 3), (2, 4, "int")], {}),
    ("Where", [(3, 8, "bool"), ROWS, ROWS], {}),
    ("Roll", [IMAGE], {"shifts": (1, -2), "axes": (2, 3)}),
    ("Tile", [ROWS], {"repeats": (1, 3)}),
    ("Cast", [ROWS], {"dtype": "int32"}),
    ("Curve", [IMAGE], {"steps": '[["Greater", ["0", 0.5], {}], ["Where", ["1", "0", 0.0], {}]]'}),
    ("Resize", [IMAGE], {"mode": "nearest", "size": None, "scale": (2.0, 3.0), "align_corners": False}),
    ("Resize", [IMAGE], {"mode": "linear", "size": (9, 5), "scale": None, "align_corners": False}),
    ("Resize", [SIGNAL], {"mode": "nearest", "size": None, "scale": (2.0,), "align_corners": False}),
    *((op, [(3, 8, "bool"), (3, 8, "bool")], {}) for op in ("LogicalAnd", "LogicalOr")),
    ("LogicalNot", [(3, 8, "bool")], {}),
]


def values(shape):
    *dims, last = shape
    if last == "int":
        return torch.randint(1, 4, dims)
    if last == "bool":
        return torch.rand(dims) > 0.5
    return torch.randn(shape).abs() + 0.1


def alone(op, operands, attrs):
    """A graph of one node, and inputs for it."""
    graph = Graph([], [], [], {}, {}, framework="keras")
    names, inputs = [], []
    for k, shape in enumerate(operands):
        names.append(None if shape is None else f"x{k}")
        if shape is None:
            continue
        if shape[0] == "weight":
            graph.weights[f"x{k}"] = values(shape[1:])
            continue
        x = values(shape)
        if op == "Div" or (op not in ("Sqrt", "Rsqrt", "Log", "Pow") and x.is_floating_point()):
            x = x * torch.where(torch.rand(x.shape) > 0.5, 1, -1)
        inputs.append(x)
        graph.inputs.append(f"x{k}")
        graph.values[f"x{k}"] = Value(f"x{k}", (None, *x.shape[1:]), str(x.dtype).removeprefix("torch."))
    node = Node("y", op, tuple(names), ("y",), attrs)
    from chipfit.engine.kernels import execute

    outs = execute(
        node,
        [
            None if n is None else graph.weights[n] if n in graph.weights else inputs[graph.inputs.index(n)]
            for n in names
        ],
    )
    graph.outputs = ["y"] if len(outs) == 1 else [f"y.{k}" for k in range(len(outs))]
    graph.nodes = [node.with_(outputs=tuple(graph.outputs))]
    for name, y in zip(graph.outputs, outs, strict=True):
        graph.values[name] = Value(name, (None, *y.shape[1:]), str(y.dtype).removeprefix("torch."))
    leaves = [{"output": k} for k in range(len(outs))]
    from torch.utils import _pytree as pytree

    from chipfit.engine.trees import dump_tree

    spec = dump_tree(pytree.tree_structure([0] * len(outs)), [0] * len(outs))
    import json

    graph.out_spec = json.dumps({**spec, "leaves": leaves})
    graph.in_spec = json.dumps({"kwargs": [], "packed": True})
    return graph, inputs


@pytest.mark.parametrize("op, operands, attrs", CASES, ids=[f"{k}-{c[0]}" for k, c in enumerate(CASES)])
def test_an_operator_computes_what_the_engine_computes(op, operands, attrs):
    graph, inputs = alone(op, operands, attrs)
    env = run(graph, inputs)
    for got, name in zip(lower(graph, Plan()).run_flat(inputs), graph.outputs, strict=True):
        nan = op in ("Asin", "Acos", "Acosh", "Atanh")  # of numbers beyond their domain
        torch.testing.assert_close(got.to(env[name].dtype), env[name], rtol=2e-5, atol=2e-6, equal_nan=nan)


def test_every_operator_that_has_a_keras_form_is_among_them():
    by_layers_only = {f"TransposeConv{n}D" for n in (1, 2, 3)}  # whose settings do not follow from attributes
    sizes = {"Size"}  # a vector of that length stands for the number
    assert set(LOWERINGS) - {c[0] for c in CASES} == by_layers_only | sizes


def test_an_operator_without_keras_form_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="ChannelShuffle 'y' has no Keras form"):
        lower(alone("ChannelShuffle", [(2, 4, 4, 4)], {"groups": 2})[0], Plan())
