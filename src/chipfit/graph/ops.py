"""The canonical operators: one table with everything that is known about each of them.

A framework's reader turns its own operators into these, the engine runs them, and the writers export them. Names are
those that the platform files use. Whoever needs a fact about an operator asks this table; a new operator is a row here,
a kernel, and a row in each reader and writer that knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDef:
    """What is known about one canonical operator, whatever its attributes."""

    #: names of the inputs in order; "?" marks an optional one, "*" takes all that remain. "w" and "b" are weight and
    #: bias, "in0", "in1", ... and "ins" are data
    slots: tuple[str, ...]
    attrs: tuple[str, ...] = ()
    note: str = ""
    #: of y = W x + b with W and b in slots "w" and "b": "conv", "transposed" (convolution) or "linear"; "" for others
    kind: str = ""
    weight_axis: int = 0  #: axis of the weight that counts output channels
    #: what a change between channels first and last does to it (`passes.layout`): "spatial" operators find their
    #: channels by the layout, "natural" ones compute in the model's own order, the others follow their operands
    layout: str = "natural"
    activation: bool = False  #: a kernel may apply it to its own result
    moves: bool = False  #: its result holds numbers of its inputs and no others
    view: bool = False  #: its result may share memory with an input
    homogeneous: bool = False  #: f(k x) = k f(x) for k > 0, of one data input; of Pad where it pads with 0
    shifts: bool = (
        False  #: f(x + c) = f(x) + c, likewise; of AvgPool where it counts no padding, of Pad where it pads c
    )
    by_channel: bool = False  #: each channel of its result is made of that channel of its inputs
    negative_tail: bool = False  #: a non-linearity that is bounded or flat on its negative side
    #: operators of which it is a case, nearest first: how platforms may list it that do not name it
    case_of: tuple[str, ...] = ()

    def slot(self, index: int) -> str:
        """The name of the input at `index`, without marks; those that "ins*" takes are "in0", "in1", ..."""
        name = self.slots[min(index, len(self.slots) - 1)].rstrip("?*")
        return f"in{index}" if name == "ins" else name

    def index(self, name: str) -> int | None:
        """Where the slot `name` stands; None when the operator has none of that name."""
        return next((k for k, s in enumerate(self.slots) if s.rstrip("?*") == name), None)

    @property
    def weighted(self) -> bool:
        """It may have weights of its own."""
        return any(s.startswith("w") for s in self.slots)


def _op(slots: str = "in0", attrs: str = "", note: str = "", **facts: Any) -> OpDef:
    return OpDef(slots=tuple(slots.split()), attrs=tuple(attrs.split()), note=note, **facts)


def _each(names: str, row: OpDef) -> dict[str, OpDef]:
    return dict.fromkeys(names.split(), row)


_MOVE: dict[str, Any] = {"moves": True, "homogeneous": True, "shifts": True}
_VIEW: dict[str, Any] = {**_MOVE, "view": True}
_POOL: dict[str, Any] = {"layout": "spatial", "by_channel": True, "homogeneous": True, "shifts": True}
_ELEMENT: dict[str, Any] = {"layout": "elementwise", "by_channel": True}
_ACT: dict[str, Any] = {**_ELEMENT, "activation": True}
_TAIL: dict[str, Any] = {**_ACT, "negative_tail": True}

#: stride, dilation: tuple per spatial axis. padding: ((lo, hi), ...) per spatial axis, zeros. groups: int.
#: axis: int, negative counts from the end. axes: tuple of ints. keepdims: bool.
OPS: dict[str, OpDef] = {
    **_each(
        "Conv1D Conv2D Conv3D DepthwiseConv2D",
        _op("in0 w b?", "stride padding dilation groups", kind="conv", layout="spatial"),
    ),
    **_each(
        "TransposeConv1D TransposeConv2D TransposeConv3D",
        _op(
            "in0 w b?",
            "stride padding dilation groups output_padding",
            "padding trims the output",
            kind="transposed",
            weight_axis=1,
            layout="spatial",
        ),
    ),
    "Linear": _op("in0 w b?", note="y = x w^T + b, w [out, in]; x of any rank >= 1", kind="linear"),
    "MatMul": _op("in0 in1", note="a constant in1 is its weight", weight_axis=-1),
    "BatchNorm": _op("in0 w? b? mean var", "eps", "inference form, channel axis 1", layout="spatial"),
    "LayerNorm": _op("in0 w? b?", "normalized_shape eps"),
    "GroupNorm": _op("in0 w? b?", "groups eps", layout="spatial"),
    "InstanceNorm": _op("in0 w? b?", "eps", layout="spatial"),
    "RMSNorm": _op("in0 w?", "normalized_shape eps", "eps None = machine epsilon of the dtype"),
    "SDPA": _op("in0 in1 in2 mask?", "is_causal scale enable_gqa", "scale None = 1/sqrt(d)"),
    **_each("Exp Log Sqrt Rsqrt Sin Cos Erf Floor Ceil Round Sign Reciprocal LogicalNot", _op(**_ELEMENT)),
    **_each("Abs Neg", _op(**_ELEMENT, homogeneous=True)),
    "Relu": _op(**_ACT, homogeneous=True),
    "Relu6": _op(**_ACT),
    **_each("Sigmoid Tanh HardSigmoid", _op(**_ACT)),
    **_each("Selu Swish HardSwish Mish", _op(**_TAIL)),
    "Identity": _op(**_ELEMENT, **_VIEW),
    "Requantize": _op(note="the same reals on another grid", **_ELEMENT, view=True),
    "Clamp": _op("in0", "min max", "min or max None = unbounded; Hardtanh and clip are this", **_ACT),
    "LeakyRelu": _op("in0", "negative_slope", **_TAIL, homogeneous=True),
    "PRelu": _op(
        "in0 w", note="w has 1 or C entries, channel axis 1", **{**_TAIL, "layout": "spatial"}, homogeneous=True
    ),
    "Elu": _op("in0", "alpha", **_TAIL),
    "Softplus": _op("in0", "beta threshold", **_ACT),
    "Gelu": _op("in0", "approximate", '"none" or "tanh"', **_TAIL),
    "Softmax": _op("in0", "axis", layout="along", activation=True),
    "LogSoftmax": _op("in0", "axis", layout="along"),
    **_each("Add Sub Mul Div Pow Mod FloorDiv", _op("in0 in1", **_ELEMENT)),
    **_each("Max Min", _op("in0 in1", **_ELEMENT, moves=True)),
    **_each("Equal NotEqual Less LessEqual Greater GreaterEqual LogicalAnd LogicalOr", _op("in0 in1", **_ELEMENT)),
    "Concat": _op("ins*", "axis", layout="concat", moves=True),
    "Stack": _op("ins*", "axis", moves=True),
    "Split": _op("in0", "axis sizes", "several outputs, sizes in elements", layout="along", **_VIEW),
    "Unstack": _op("in0", "axis", "several outputs, the axis is removed", layout="remove_axis", **_VIEW),
    "MaxPool": _op("in0", "kernel stride padding dilation ceil_mode", moves=True, **_POOL),
    "AvgPool": _op("in0", "kernel stride padding ceil_mode count_include_pad", **_POOL),
    "GlobalAvgPool": _op(note="mean over every spatial axis, kept as size 1", **_POOL, case_of=("Mean", "AvgPool")),
    "AdaptiveAvgPool": _op("in0", "output_size", **_POOL),
    "AdaptiveMaxPool": _op("in0", "output_size", moves=True, **_POOL),
    "Mean": _op("in0", "axes keepdims", layout="reduce", homogeneous=True, shifts=True),
    **_each("Sum ReduceL2", _op("in0", "axes keepdims", layout="reduce", homogeneous=True)),
    **_each("ReduceMax ReduceMin", _op("in0", "axes keepdims", layout="reduce", **_MOVE)),
    "ReduceProd": _op("in0", "axes keepdims", layout="reduce", view=True),
    "ArgMax": _op("in0", "axis keepdims", "axis None = over the flattened tensor", layout="arg_max"),
    "CumSum": _op("in0", "axis", layout="along", homogeneous=True),
    "Pad": _op(
        "in0",
        "padding mode value",
        '((lo, hi), ...) per axis of the whole tensor; mode "constant", "reflect", "replicate", "circular"',
        layout="pad",
        homogeneous=True,
        shifts=True,
    ),
    "Reshape": _op("in0", "shape", "at most one -1; flatten and view are this", layout="reshape", **_VIEW),
    "Transpose": _op("in0", "perm", layout="transpose", **_VIEW),
    "Squeeze": _op("in0", "axes", layout="squeeze", **_VIEW),
    "Unsqueeze": _op("in0", "axes", "axes of the result", **_VIEW),
    "Expand": _op("in0", "shape", "every entry static; -1 keeps the size", **_VIEW),
    "Slice": _op("in0", "axis start end step", "start, end static; end None = to the end", layout="along", **_VIEW),
    "Select": _op(
        "in0",
        "axis index",
        "the axis is removed",
        layout="remove_axis",
        case_of=("Slice", "StridedSlice", "Gather"),
        **_VIEW,
    ),
    "Gather": _op("in0 index", "axis", "index_select and x[..., idx, ...] with one integer tensor", **_MOVE),
    "Embedding": _op("w in0", note="rows of w [V, D] by integer in0", moves=True),
    "Where": _op("mask in0 in1", **_ELEMENT, moves=True),
    "Roll": _op("in0", "shifts axes", layout="roll", **_MOVE),
    "Tile": _op("in0", "repeats", layout="tile", **_MOVE),
    "Resize": _op(
        "in0",
        "mode size scale align_corners",
        'mode "nearest", "linear", "cubic"; size or scale per spatial axis',
        **_POOL,
    ),
    "DepthToSpace": _op("in0", "block", "channel order as PixelShuffle (CRD)", layout="spatial", **_VIEW),
    "SpaceToDepth": _op("in0", "block", layout="spatial", **_VIEW),
    "ChannelShuffle": _op("in0", "groups", layout="spatial", **_VIEW),
    "Cast": _op("in0", "dtype", **_ELEMENT, view=True),
    "Size": _op("in0", "axis", "a Python integer", layout="size"),
    "Dropout": _op("in0", "p", "identity in eval mode", **_ELEMENT, **_VIEW),
}

#: names that platform files use for the same operator: the platform's word -> (operator, attributes that it must have)
ALIASES: dict[str, tuple[str, dict[str, float | str]]] = {
    "Clamp": ("Relu6", {}),
    "ReluN1To1": ("Clamp", {"min": -1.0, "max": 1.0}),
    "HardTanh": ("Clamp", {}),
    "Flatten": ("Reshape", {}),
    "PixelShuffle": ("DepthToSpace", {}),
    "GetItem": ("Select", {}),
    "StridedSlice": ("Slice", {}),
    "MirrorPad": ("Pad", {"mode": "reflect"}),
    "PadV2": ("Pad", {}),
    "Attention": ("SDPA", {}),
}


def words_of(op: str, attrs: Mapping[str, Any]) -> set[str]:
    """Every word that a platform file may use for an operator: its canonical name and the aliases that fit."""
    fits = (
        word
        for word, (canonical, needed) in ALIASES.items()
        if canonical == op and all(attrs.get(k) == v for k, v in needed.items())
    )
    return {op, *fits}
