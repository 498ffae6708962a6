"""Every operator, and many with unusual attributes and unequal axes: files compute what the engine makes of them."""

from typing import Any

import torch

from chipfit.engine.kernels import execute
from chipfit.graph.ir import Graph, Node, Value
from chipfit.operators.table import OPS
from tests.operators.test_table import BOOL, INT, made

I = (2, 4, 5, 6)  # noqa: E741 -- an image
ROW = (2, 4, 7)


def pool(*kernel: int, stride=None, padding=None, **more) -> dict[str, Any]:
    n = len(kernel)
    given = {"kernel": kernel, "stride": stride or (1,) * n, "padding": padding or ((0, 0),) * n, "ceil_mode": False}
    return given | more


def average(*kernel: int, counted: bool = False, **more) -> dict[str, Any]:
    return pool(*kernel, count_include_pad=counted, **more)


def conv(n: int, **more) -> dict[str, Any]:
    return {"stride": (1,) * n, "padding": ((0, 0),) * n, "dilation": (1,) * n, "groups": 1, **more}


def resize(mode: str, size=None, scale=None, corners: bool = False) -> dict[str, Any]:
    return {"mode": mode, "size": size, "scale": scale, "align_corners": corners}


def attention(causal: bool = False, scale=None, shared: bool = False) -> dict[str, Any]:
    return {"is_causal": causal, "scale": scale, "enable_gqa": shared}


def transposed(n: int, **more) -> dict[str, Any]:
    return conv(n, **{"output_padding": (0,) * n, **more})


def padding(*pairs, mode="constant", value=0.0) -> dict[str, Any]:
    return {"padding": pairs, "mode": mode, "value": value}


def detections(**more) -> dict[str, Any]:
    """Attributes that differ from those of the table's case, with a background before the classes."""
    scales = {"y_scale": 10.0, "x_scale": 8.0, "h_scale": 5.0, "w_scale": 4.0}
    limits = {"max_detections": 5, "nms_score_threshold": 0.5, "nms_iou_threshold": 0.5, "num_classes": 3}
    return made("DetectionPostProcess")[0].attrs | scales | limits | more


AROUND, TOP, ASKEW, WIDE = ((1, 1), (1, 1)), ((1, 1), (0, 0)), ((0, 1), (1, 1)), ((1, 1), (2, 2))
BEYOND = {"stride": (2,), "dilation": (2,), "output_padding": (1,)}
MORE = {"output_padding": (2, 1)}  # behind the last window
FAR = {"stride": (3, 3), "padding": AROUND, "output_padding": (2, 2)}
DETECTED, BOXES = "DetectionPostProcess", [(1, 9, 6), (1, 9, 4), (9, 4)]
VOLUME = {"stride": (2, 1, 2), "padding": (*TOP, (1, 1)), "dilation": (1, 2, 1), "output_padding": (0, 0, 1)}
#: name -> operator, shapes of its operands, attributes
CASES: dict[str, tuple[str, list[tuple], dict[str, Any]]] = {
    "conv of unequal steps": ("Conv2D", [I, (3, 4, 2, 3), (3,)], conv(2, stride=(2, 1), padding=((1, 0), (0, 2)))),
    "conv of unequal gaps": ("Conv2D", [I, (3, 4, 3, 2), (3,)], conv(2, dilation=(1, 3), padding=((2, 1), (1, 1)))),
    "conv without bias": ("Conv2D", [I, (3, 4, 3, 3), None], conv(2, padding=((1, 1), (1, 1)))),
    "conv in groups": ("Conv2D", [I, (6, 2, 3, 3), (6,)], conv(2, groups=2)),
    "conv of a row": ("Conv1D", [ROW, (3, 4, 3), (3,)], conv(1, stride=(2,), padding=((2, 1),))),
    "conv of a row with gaps": ("Conv1D", [ROW, (3, 4, 2), None], conv(1, dilation=(3,))),
    "conv of a volume": ("Conv3D", [(1, 2, 4, 5, 6), (3, 2, 2, 3, 1), (3,)], conv(3, stride=(1, 2, 3))),
    "a padded volume": ("Conv3D", [(1, 2, 3, 5, 6), (3, 2, 3, 3, 3), (3,)], conv(3, padding=((1, 1), (0, 2), (1, 0)))),
    "depthwise": ("DepthwiseConv2D", [I, (12, 1, 2, 3), (12,)], conv(2, groups=4, stride=(1, 2), padding=ASKEW)),
    "transposed": ("TransposeConv2D", [I, (4, 3, 2, 3), (3,)], transposed(2, stride=(2, 3))),
    "transposed and cut": ("TransposeConv2D", [I, (4, 3, 4, 3), (3,)], transposed(2, stride=(3, 2), padding=TOP)),
    "transposed and more": ("TransposeConv2D", [I, (4, 3, 2, 2), None], transposed(2, stride=(3, 3), **MORE)),
    "transposed row": ("TransposeConv1D", [ROW, (4, 3, 4), None], transposed(1, stride=(2,), padding=((1, 1),))),
    "conv of a row in groups": ("Conv1D", [ROW, (6, 2, 3), None], conv(1, groups=2)),
    "a volume with gaps": ("Conv3D", [(1, 2, 4, 5, 6), (3, 2, 2, 2, 2), None], conv(3, dilation=(1, 2, 3))),
    "depthwise with gaps": ("DepthwiseConv2D", [(2, 3, 5, 6), (6, 1, 2, 2), None], conv(2, groups=3, dilation=(2, 3))),
    "transposed row beyond": ("TransposeConv1D", [ROW, (4, 3, 3), None], transposed(1, **BEYOND)),
    "transposed volume": ("TransposeConv3D", [(1, 2, 2, 3, 2), (2, 3, 2, 3, 3), None], transposed(3, **VOLUME)),
    "linear of rows": ("Linear", [(2, 3, 5), (4, 5), (4,)], {}),
    "linear of images": ("Linear", [(2, 3, 4, 5), (6, 5), None], {}),
    "a layer of states in other orders": (
        "LSTM",
        [(2, 3, 5), (8, 5), (8, 2), (8,), None, (2, 2), None],
        {"gates": "iofg", "reverse": True, "cell_clip": None},
    ),
    "one step": ("LSTM", [(2, 5), (8, 5), (8, 2), None, (8,)], {"gates": "ifgo", "reverse": False, "cell_clip": None}),
    "a state that is reset before": (
        "GRU",
        [(2, 3, 5), (6, 5), (6, 2), (6,), (6,), None],
        {"gates": "zrn", "reverse": True, "reset_after": False},
    ),
    "states above zero": ("RNN", [(2, 3, 5), (2, 5), (2, 2)], {"reverse": True, "activation": "relu"}),
    "max": ("MaxPool", [I], pool(2, 3, stride=(1, 2), padding=((0, 0), (1, 1)), dilation=(1, 1))),
    "max beyond the image": ("MaxPool", [(2, 4, 6, 5)], pool(3, 2, stride=(2, 2), dilation=(1, 1), ceil_mode=True)),
    "max with gaps": ("MaxPool", [I], pool(2, 3, dilation=(2, 1))),
    "conv of a volume in groups": ("Conv3D", [(1, 4, 3, 3, 3), (2, 2, 2, 2, 2), None], conv(3, groups=2)),
    "transposed with gaps": ("TransposeConv2D", [I, (4, 3, 2, 2), None], transposed(2, dilation=(1, 2))),
    "transposed beyond": ("TransposeConv2D", [I, (4, 3, 2, 2), None], transposed(2, **FAR)),
    "max of a row": ("MaxPool", [ROW], pool(3, stride=(2,), padding=((1, 1),), dilation=(1,))),
    "max with padding behind": ("MaxPool", [I], pool(2, 2, padding=((0, 1), (0, 1)), dilation=(1, 1))),
    "average": ("AvgPool", [I], average(2, 3, stride=(2, 1), counted=True)),
    "average with padding": ("AvgPool", [I], average(3, 3, stride=(2, 1), padding=AROUND, counted=True)),
    "average with unequal padding": ("AvgPool", [I], average(3, 2, padding=((1, 0), (0, 1)), counted=True)),
    "average of what is there": ("AvgPool", [I], average(3, 3, padding=((1, 1), (1, 1)))),
    "average of what is there in steps": ("AvgPool", [(2, 4, 5, 7)], average(3, 5, stride=(2, 3), padding=WIDE)),
    "nine windows": ("AdaptiveAvgPool", [(2, 4, 6, 6)], {"output_size": (3, 3)}),
    "the largest of windows of two sizes": ("AdaptiveMaxPool", [(2, 4, 6, 6)], {"output_size": (2, 3)}),
    "average beyond the image": ("AvgPool", [(2, 4, 6, 5)], average(3, 2, stride=(2, 2), ceil_mode=True)),
    "average of a row": ("AvgPool", [ROW], average(4, stride=(3,), counted=True)),
    "mean of rows": ("Mean", [I], {"axes": (2,), "keepdims": True}),
    "mean from the end": ("Mean", [I], {"axes": (-1, -3), "keepdims": False}),
    "sum": ("Sum", [I], {"axes": (1, 3), "keepdims": False}),
    "largest": ("ReduceMax", [I], {"axes": (-2,), "keepdims": False}),
    "least": ("ReduceMin", [(3, 5, 2)], {"axes": (0,), "keepdims": True}),
    "least, dropped": ("ReduceMin", [(3, 5, 2)], {"axes": (2,), "keepdims": False}),
    "length of columns": ("ReduceL2", [I], {"axes": (-2,), "keepdims": False}),
    "size of the last": ("Size", [I], {"axis": -1}),
    "product": ("ReduceProd", [(3, 5, 2)], {"axes": (1,), "keepdims": False}),
    "global": ("GlobalAvgPool", [I], {}),
    "index of the largest": ("ArgMax", [I], {"axis": 1, "keepdims": False}),
    "index of the largest, kept": ("ArgMax", [I], {"axis": -2, "keepdims": True}),
    "index of the largest of all": ("ArgMax", [(2, 3, 5)], {"axis": None, "keepdims": False}),
    "index of the least": ("ArgMin", [I], {"axis": -1, "keepdims": False}),
    "index of the least of all": ("ArgMin", [(2, 3, 5)], {"axis": None, "keepdims": False}),
    "three largest rows": ("TopK", [I], {"k": 3, "axis": 2, "largest": True}),
    "all columns in order": ("TopK", [I], {"k": None, "axis": -1, "largest": True}),
    "two least channels": ("TopK", [I], {"k": 2, "axis": 1, "largest": False}),
    "sums so far": ("CumSum", [(2, 5, 3)], {"axis": -2}),
    "softmax of channels": ("Softmax", [I], {"axis": 1}),
    "softmax of the first of three": ("Softmax", [(3, 5, 2)], {"axis": -3}),
    "softmax of the last": ("Softmax", [(3, 5, 2)], {"axis": -1}),
    "unit length along channels": ("L2Norm", [I], {"axis": 1, "eps": 1e-12}),
    "unit length of the last": ("L2Norm", [(3, 5, 2)], {"axis": -1, "eps": 1e-6}),
    "log softmax of the middle": ("LogSoftmax", [(3, 5, 2)], {"axis": 1}),
    "log softmax of the last": ("LogSoftmax", [(3, 5, 2)], {"axis": -1}),
    "slope for each channel": ("PRelu", [I, (4,)], {}),
    "slope of rows": ("PRelu", [(3, 4), (4,)], {}),
    "slope of a vector": ("PRelu", [(5,), (1,)], {}),
    "leaky": ("LeakyRelu", [I], {"negative_slope": -0.3}),
    "clamp below": ("Clamp", [I], {"min": -0.25, "max": None}),
    "clamp above": ("Clamp", [I], {"min": None, "max": 0.75}),
    "clamp between": ("Clamp", [I], {"min": -0.25, "max": 0.75}),
    "clamp to one": ("Clamp", [I], {"min": -1.0, "max": 1.0}),
    "clamp to the unit": ("Clamp", [I], {"min": 0.0, "max": 1.0}),
    "rectifier as a clamp": ("Clamp", [I], {"min": 0.0, "max": None}),
    "clamp of six": ("Clamp", [I], {"min": 0.0, "max": 6.0}),
    "hard sigmoid": ("HardSigmoid", [I], {}),
    "curve": ("Curve", [I], {"steps": '[["Abs", ["0"], {}], ["Add", ["1", 1.0], {}], ["Div", ["0", "2"], {}]]'}),
    "hyperbolic gelu": ("Gelu", [I], {"approximate": "tanh"}),
    "concat from the end": ("Concat", [(2, 3, 4), (2, 3, 5)], {"axis": -1}),
    "concat of three": ("Concat", [(2, 3, 4), (2, 1, 4), (2, 2, 4)], {"axis": 1}),
    "stack behind": ("Stack", [(2, 3, 4)] * 3, {"axis": -1}),
    "stack in the middle": ("Stack", [(2, 3, 4)] * 2, {"axis": 2}),
    "taken apart from the end": ("Unstack", [(2, 6, 3)], {"axis": -1}),
    "unequal parts": ("Split", [(2, 6, 3)], {"axis": -2, "sizes": (1, 3, 2)}),
    "equal parts": ("Split", [(2, 6, 3)], {"axis": 1, "sizes": (2, 2, 2)}),
    "reshape": ("Reshape", [(2, 6, 5)], {"shape": (-1, 3, 10)}),
    "transpose of four": ("Transpose", [(2, 3, 4, 5)], {"perm": (0, 3, 1, 2)}),
    "transpose of three": ("Transpose", [(2, 3, 5)], {"perm": (2, 0, 1)}),
    "squeeze of two": ("Squeeze", [(2, 1, 4, 1)], {"axes": (1, 3)}),
    "squeeze of none": ("Squeeze", [(2, 1, 4)], {"axes": ()}),
    "unsqueeze of two": ("Unsqueeze", [(2, 3)], {"axes": (1, 3)}),
    "expand": ("Expand", [(2, 1, 4)], {"shape": (2, 3, -1)}),
    "expand in front": ("Expand", [(3, 1)], {"shape": (2, 3, 4)}),
    "a strided slice": ("Slice", [(2, 9, 3)], {"axis": 1, "start": 2, "end": 8, "step": 3}),
    "a slice from the end": ("Slice", [(2, 3, 9)], {"axis": -1, "start": -5, "end": -1, "step": 1}),
    "a slice to the end": ("Slice", [(2, 5, 3)], {"axis": 1, "start": 3, "end": None, "step": 1}),
    "a slice of the first": ("Slice", [(7, 5, 3)], {"axis": 0, "start": 1, "end": 4, "step": 2}),
    "the last": ("Select", [(2, 5, 3)], {"axis": 1, "index": -1}),
    "the last but one": ("Select", [(2, 5, 3)], {"axis": -1, "index": -2}),
    "the first": ("Select", [(2, 5, 3)], {"axis": 2, "index": 0}),
    "gather": ("Gather", [(2, 5, 3), (4, INT)], {"axis": -2}),
    "gather of rows": ("GatherElements", [(2, 5, 3), (2, 4, 3, INT)], {"axis": 1}),
    "gather of the last": ("GatherElements", [(2, 3, 5), (2, 3, 7, INT)], {"axis": -1}),
    "a table": ("Embedding", [(7, 3), (2, 4, INT)], {}),
    "roll of two": ("Roll", [(2, 5, 3)], {"shifts": (2, -1), "axes": (1, 2)}),
    "tile": ("Tile", [(2, 3, 4)], {"repeats": (1, 3, 2)}),
    "tile in front": ("Tile", [(3, 4)], {"repeats": (2, 1, 3)}),
    "pad": ("Pad", [I], padding((0, 0), (0, 0), (1, 2), (3, 0))),
    "pad with a number": ("Pad", [(2, 3, 4)], padding((0, 0), (2, 0), (1, 3), value=-0.7)),
    "reflect": ("Pad", [(2, 3, 4)], padding((0, 0), (1, 2), (3, 0), mode="reflect")),
    "replicate": ("Pad", [(2, 3, 4)], padding((0, 0), (1, 2), (3, 0), mode="replicate")),
    "cut off": ("Pad", [(2, 5, 4)], padding((0, 0), (-1, 0), (0, 1))),
    "nearest": ("Resize", [I], resize("nearest", (8, 9))),
    "nearest by a factor": ("Resize", [I], resize("nearest", scale=(2.0, 3.0))),
    "linear": ("Resize", [I], resize("linear", (3, 11))),
    "linear by a factor": ("Resize", [I], resize("linear", scale=(3.0, 0.5))),
    "linear between corners": ("Resize", [I], resize("linear", (8, 9), corners=True)),
    "linear row": ("Resize", [ROW], resize("linear", (12,))),
    "nearest row": ("Resize", [ROW], resize("nearest", (12,))),
    **{
        f"{mode} sample, {outside}": ("GridSample", [I, (2, 3, 4, 2)], sample | {"align_corners": mode == "nearest"})
        for mode in ("bilinear", "nearest", "bicubic")
        for outside in ("zeros", "border", "reflection")
        if (sample := {"mode": mode, "padding_mode": outside})
    },
    "cubic": ("Resize", [I], resize("cubic", (8, 9))),
    "cubic between corners": ("Resize", [I], resize("cubic", (8, 9), corners=True)),
    "blocks to pixels": ("DepthToSpace", [(2, 18, 3, 2)], {"block": 3}),
    "pixels to blocks": ("SpaceToDepth", [(2, 2, 9, 6)], {"block": 3}),
    "shuffled channels": ("ChannelShuffle", [(2, 6, 3, 5)], {"groups": 3}),
    "shuffled channels of lines": ("ChannelShuffle", [(2, 6, 5)], {"groups": 2}),
    "batch norm": ("BatchNorm", [I, (4,), (4,), (4,), (4,)], {"eps": 0.1}),
    "batch norm without gain": ("BatchNorm", [I, None, None, (4,), (4,)], {"eps": 0.1}),
    "layer norm of two axes": ("LayerNorm", [(2, 3, 4, 5), (4, 5), (4, 5)], {"normalized_shape": (4, 5), "eps": 0.1}),
    "layer norm without shift": ("LayerNorm", [(2, 3, 5), (5,), None], {"normalized_shape": (5,), "eps": 0.1}),
    "root mean square of two axes": ("RMSNorm", [(2, 3, 4, 5), (4, 5)], {"normalized_shape": (4, 5), "eps": 0.1}),
    "group norm": ("GroupNorm", [(2, 6, 3, 5), (6,), (6,)], {"groups": 3, "eps": 0.1}),
    "group norm without shift": ("GroupNorm", [(2, 6, 5), (6,), None], {"groups": 2, "eps": 0.1}),
    "instance norm": ("InstanceNorm", [(2, 6, 3, 5), (6,), (6,)], {"eps": 0.1}),
    "attention": ("SDPA", [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)], attention(scale=0.7)),
    "causal attention": ("SDPA", [(2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4)], attention(causal=True)),
    "attention with a mask": ("SDPA", [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6), (5, 7)], attention()),
    "attention to some": ("SDPA", [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6), (5, 7, BOOL)], attention()),
    "heads that share keys": ("SDPA", [(2, 6, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)], attention(True, shared=True)),
    "softplus": ("Softplus", [(2, 30)], {"beta": 2.0, "threshold": 3.0}),
    "softplus without an end": ("Softplus", [(2, 30)], {"beta": 2.0, "threshold": 99.0}),
    "to integers": ("Cast", [(2, 3)], {"dtype": "int64"}),
    "detections of two classes": (DETECTED, BOXES, detections(max_classes_per_detection=2)),
    "detections by class": (DETECTED, BOXES, detections(use_regular_nms=True, detections_per_class=4)),
    "fewer detections": (DETECTED, BOXES, detections(use_regular_nms=True, max_detections=26, nms_score_threshold=1.5)),
    "elu": ("Elu", [I], {"alpha": 0.6}),
}


def drawn(shape: tuple, generator: torch.Generator) -> torch.Tensor:
    if shape[-1] == INT:
        return torch.randint(0, 3, shape[:-1], generator=generator)
    if shape[-1] == BOOL:
        return (torch.rand(shape[:-1], generator=generator) > 0.4) | (torch.arange(shape[-2]) == 0)
    return torch.randn(shape, generator=generator) * 2


def operands(name: str) -> tuple[Node, list[torch.Tensor | None]]:
    """Return a node of the operator or of the case with this name, and its operands."""
    if name in OPS:
        return made(name)
    op, shapes, attrs = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    tensors = [None if s is None else drawn(s, generator) for s in shapes]
    if op == DETECTED:
        tensors = [x.abs() for x in tensors]
    if op == "BatchNorm":
        tensors[4] = tensors[4].abs() + 0.1
    return Node("n", op, tuple(None if x is None else f"x{k}" for k, x in enumerate(tensors)), ("y",), attrs), tensors


def alone(name: str) -> tuple[Graph, list[torch.Tensor], list[torch.Tensor]]:
    """Return a graph of one node, its inputs, and its results."""
    node, tensors = operands(name)
    results = [torch.as_tensor(y) for y in execute(node, tensors)]
    node = node.with_(outputs=tuple(f"y{k}" for k in range(len(results))))
    graph, inputs = Graph([node], [], list(node.outputs), {}, {}), []
    for k, (i, x) in enumerate(zip(node.inputs, tensors, strict=True)):
        if x is None:
            continue
        if OPS[node.op].slot(k) in ("w", "r", "b", "rb", "mean", "var") or (node.op == "Embedding" and k == 0):
            graph.weights[i] = x
        else:
            graph.inputs.append(i)
            inputs.append(x)
    for i, x in [*zip(graph.inputs, inputs, strict=True), *zip(node.outputs, results, strict=True)]:
        graph.values[i] = Value(i, tuple(x.shape), str(x.dtype).removeprefix("torch."))
    return graph, inputs, results
