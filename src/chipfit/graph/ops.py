"""The canonical operators: one table that says, for each, its input slots and what its attributes mean.

A framework's reader turns its own operators into these, its engine runs them, and the writers export them.
Names are those that the platform files use. `slots` names the inputs in order; a trailing "?" marks an
optional one, "*" takes all remaining inputs. `w` and `b` are weight and bias of computing operators; they may
also be activations (MatMul of two activations has slots in0, in1).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpDef:
    """How one canonical operator is called."""

    slots: tuple[str, ...]
    attrs: tuple[str, ...] = ()
    note: str = ""


_CONV = ("stride", "padding", "dilation", "groups")
_NORM = ("in0", "w?", "b?")

#: stride, dilation: tuple per spatial axis. padding: ((lo, hi), ...) per spatial axis, zeros. groups: int.
#: axis: int, negative counts from the end. axes: tuple of ints. keepdims: bool.
OPS: dict[str, OpDef] = {
    **{c: OpDef(("in0", "w", "b?"), _CONV) for c in ("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2D")},
    **{
        f"TransposeConv{d}D": OpDef(("in0", "w", "b?"), (*_CONV, "output_padding"), "padding trims the output")
        for d in (1, 2, 3)
    },
    "Linear": OpDef(("in0", "w", "b?"), (), "y = x w^T + b, w [out, in]; x of any rank >= 1"),
    "MatMul": OpDef(("in0", "in1")),
    "BatchNorm": OpDef(("in0", "w?", "b?", "mean", "var"), ("eps",), "inference form, channel axis 1"),
    "LayerNorm": OpDef(_NORM, ("normalized_shape", "eps")),
    "GroupNorm": OpDef(_NORM, ("groups", "eps")),
    "InstanceNorm": OpDef(_NORM, ("eps",)),
    "RMSNorm": OpDef(("in0", "w?"), ("normalized_shape", "eps"), "eps None = machine epsilon of the dtype"),
    "SDPA": OpDef(("in0", "in1", "in2", "mask?"), ("is_causal", "scale", "enable_gqa"), "scale None = 1/sqrt(d)"),
    **{
        a: OpDef(("in0",))
        for a in (
            "Relu",
            "Relu6",
            "Sigmoid",
            "Tanh",
            "HardSwish",
            "HardSigmoid",
            "Swish",
            "Mish",
            "Exp",
            "Log",
            "Abs",
            "Neg",
            "Sqrt",
            "Rsqrt",
            "Sin",
            "Cos",
            "Erf",
            "Floor",
            "Ceil",
            "Round",
            "Sign",
            "Reciprocal",
            "LogicalNot",
            "Identity",
            "Requantize",
        )
    },
    "Clamp": OpDef(("in0",), ("min", "max"), "min or max None = unbounded; Hardtanh and clip are this"),
    "LeakyRelu": OpDef(("in0",), ("negative_slope",)),
    "PRelu": OpDef(("in0", "w"), (), "w has 1 or C entries, channel axis 1"),
    "Elu": OpDef(("in0",), ("alpha",)),
    "Selu": OpDef(("in0",)),
    "Softplus": OpDef(("in0",), ("beta", "threshold")),
    "Gelu": OpDef(("in0",), ("approximate",), '"none" or "tanh"'),
    "Softmax": OpDef(("in0",), ("axis",)),
    "LogSoftmax": OpDef(("in0",), ("axis",)),
    **{
        e: OpDef(("in0", "in1"))
        for e in (
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Pow",
            "Max",
            "Min",
            "Mod",
            "FloorDiv",
            "Equal",
            "NotEqual",
            "Less",
            "LessEqual",
            "Greater",
            "GreaterEqual",
            "LogicalAnd",
            "LogicalOr",
        )
    },
    "Concat": OpDef(("ins*",), ("axis",)),
    "Stack": OpDef(("ins*",), ("axis",)),
    "Split": OpDef(("in0",), ("axis", "sizes"), "several outputs, sizes in elements"),
    "Unstack": OpDef(("in0",), ("axis",), "several outputs, the axis is removed"),
    "MaxPool": OpDef(("in0",), ("kernel", "stride", "padding", "dilation", "ceil_mode")),
    "AvgPool": OpDef(("in0",), ("kernel", "stride", "padding", "ceil_mode", "count_include_pad")),
    "GlobalAvgPool": OpDef(("in0",), (), "mean over every spatial axis, kept as size 1"),
    "AdaptiveAvgPool": OpDef(("in0",), ("output_size",)),
    "AdaptiveMaxPool": OpDef(("in0",), ("output_size",)),
    **{r: OpDef(("in0",), ("axes", "keepdims")) for r in ("Mean", "Sum", "ReduceMax", "ReduceMin", "ReduceProd")},
    "ReduceL2": OpDef(("in0",), ("axes", "keepdims")),
    "ArgMax": OpDef(("in0",), ("axis", "keepdims"), "axis None = over the flattened tensor"),
    "CumSum": OpDef(("in0",), ("axis",)),
    "Pad": OpDef(
        ("in0",),
        ("padding", "mode", "value"),
        '((lo, hi), ...) per axis of the whole tensor; mode "constant", "reflect", "replicate", "circular"',
    ),
    "Reshape": OpDef(("in0",), ("shape",), "at most one -1; flatten and view are this"),
    "Transpose": OpDef(("in0",), ("perm",)),
    "Squeeze": OpDef(("in0",), ("axes",)),
    "Unsqueeze": OpDef(("in0",), ("axes",), "axes of the result"),
    "Expand": OpDef(("in0",), ("shape",), "every entry static; -1 keeps the size"),
    "Slice": OpDef(("in0",), ("axis", "start", "end", "step"), "start, end static; end None = to the end"),
    "Select": OpDef(("in0",), ("axis", "index"), "the axis is removed"),
    "Gather": OpDef(("in0", "index"), ("axis",), "index_select and x[..., idx, ...] with one integer tensor"),
    "Embedding": OpDef(("w", "in0"), (), "rows of w [V, D] by integer in0"),
    "Where": OpDef(("mask", "in0", "in1")),
    "Roll": OpDef(("in0",), ("shifts", "axes")),
    "Tile": OpDef(("in0",), ("repeats",)),
    "Resize": OpDef(
        ("in0",),
        ("mode", "size", "scale", "align_corners"),
        'mode "nearest", "linear", "cubic"; size or scale per spatial axis',
    ),
    "DepthToSpace": OpDef(("in0",), ("block",), "channel order as PixelShuffle (CRD)"),
    "SpaceToDepth": OpDef(("in0",), ("block",)),
    "ChannelShuffle": OpDef(("in0",), ("groups",)),
    "Cast": OpDef(("in0",), ("dtype",)),
    "Size": OpDef(("in0",), ("axis",), "a Python integer"),
    "Dropout": OpDef(("in0",), ("p",), "identity in eval mode"),
}

#: activations that a kernel may apply to its own result
ACTIVATIONS = frozenset(
    {
        "Relu",
        "Relu6",
        "Clamp",
        "LeakyRelu",
        "PRelu",
        "HardSwish",
        "HardSigmoid",
        "Swish",
        "Gelu",
        "Sigmoid",
        "Tanh",
        "Elu",
        "Selu",
        "Softplus",
        "Mish",
        "Softmax",
    }
)

#: names that platform files use for the same operator: the platform's word -> a predicate on our node
ALIASES: dict[str, tuple[str, dict[str, float | str]]] = {
    "ReluN1To1": ("Clamp", {"min": -1.0, "max": 1.0}),
    "HardTanh": ("Clamp", {}),
    "Flatten": ("Reshape", {}),
    "PixelShuffle": ("DepthToSpace", {}),
    "Unstack": ("Unstack", {}),
    "GetItem": ("Select", {}),
    "StridedSlice": ("Slice", {}),
    "MirrorPad": ("Pad", {"mode": "reflect"}),
    "PadV2": ("Pad", {}),
    "Attention": ("SDPA", {}),
    "SquaredDifference": ("SquaredDifference", {}),
}
