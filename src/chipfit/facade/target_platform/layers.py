"""From a framework's layer, function or operator to the canonical operators that it may become.

Entries are recognised by name, so that neither PyTorch nor Keras nor TensorFlow is imported; `tf.add`, `keras.layers.Add`,
`keras.ops.add`, `torch.add`, `operator.add` and "Add" are all the operator Add.
"""

from __future__ import annotations

from typing import Any

from chipfit.errors import ModelingError, UnknownNameError
from chipfit.graph.ops import OPS
from chipfit.platform.filters import Member

#: canonical operators by name, lower case without underscores; a "!" demands that the user's layer has this very name,
#: since other layers become the same operators
_TABLE = """
conv1d Conv1D DepthwiseConv1D | conv2d Conv2D DepthwiseConv2D | conv3d Conv3D | depthwiseconv2d DepthwiseConv2D
depthwiseconv1d Conv1D ! | separableconv2d DepthwiseConv2D Conv2D !
convtranspose1d TransposeConv1D | convtranspose2d TransposeConv2D | convtranspose3d TransposeConv3D
conv1dtranspose TransposeConv1D | conv2dtranspose TransposeConv2D | conv3dtranspose TransposeConv3D
linear Linear | dense Linear | embedding Embedding | matmul MatMul | bmm MatMul | dot MatMul
batchnorm1d BatchNorm | batchnorm2d BatchNorm | batchnorm3d BatchNorm | batchnorm BatchNorm | batchnormalization BatchNorm
layernorm LayerNorm | layernormalization LayerNorm | groupnorm GroupNorm | groupnormalization GroupNorm
instancenorm2d InstanceNorm | rmsnorm RMSNorm | rmsnormalization RMSNorm
multiheadattention Linear MatMul SDPA Softmax ! | scaleddotproductattention SDPA
relu Relu | relu6 Relu6 | hardtanh Clamp Relu6 Relu ! | clamp Clamp Relu Relu6 | clip Clamp Relu Relu6 | leakyrelu LeakyRelu | prelu PRelu
silu Swish | swish Swish | hardswish HardSwish | hardsilu HardSwish | sigmoid Sigmoid | hardsigmoid HardSigmoid | logsigmoid Sigmoid Log !
tanh Tanh | gelu Gelu | elu Elu | selu Selu | mish Mish | softplus Softplus | softmax Softmax | logsoftmax LogSoftmax
activation Relu Relu6 Clamp LeakyRelu Swish HardSwish Sigmoid HardSigmoid Tanh Gelu Elu Selu Mish Softplus Softmax LogSoftmax Exp Identity !
add Add | sub Sub | subtract Sub | mul Mul | multiply Mul | div Div | truediv Div | truedivide Div | divide Div | pow Pow | power Pow
maximum Max | max Max ReduceMax | amax ReduceMax | minimum Min | min Min ReduceMin | amin ReduceMin | mod Mod | remainder Mod
floordiv FloorDiv | floordivide FloorDiv | neg Neg | negative Neg | abs Abs | absolute Abs | exp Exp | log Log | sqrt Sqrt | rsqrt Rsqrt
sin Sin | cos Cos | erf Erf | floor Floor | ceil Ceil | round Round | sign Sign | reciprocal Reciprocal | square Mul Pow !
mean Mean | average Mean ! | sum Sum | reducemean Mean | reducesum Sum | reducemax ReduceMax | reducemin ReduceMin | prod ReduceProd
argmax ArgMax | cumsum CumSum | concat Concat | cat Concat | concatenate Concat | stack Stack | unstack Unstack | unbind Unstack
split Split | chunk Split | maxpool1d MaxPool | maxpool2d MaxPool | maxpool3d MaxPool | maxpooling1d MaxPool | maxpooling2d MaxPool
maxpooling3d MaxPool | maxpool MaxPool | avgpool1d AvgPool | avgpool2d AvgPool | avgpool3d AvgPool | averagepooling1d AvgPool
averagepooling2d AvgPool | averagepooling3d AvgPool | averagepool AvgPool | avgpool AvgPool
adaptiveavgpool1d AdaptiveAvgPool GlobalAvgPool | adaptiveavgpool2d AdaptiveAvgPool GlobalAvgPool | adaptivemaxpool2d AdaptiveMaxPool
globalaveragepooling1d GlobalAvgPool Mean ! | globalaveragepooling2d GlobalAvgPool Mean ! | globalmaxpooling2d ReduceMax !
pad Pad | zeropadding1d Pad | zeropadding2d Pad | zeropad2d Pad | constantpad2d Pad | reflectionpad2d Pad | cropping2d Slice !
reshape Reshape | view Reshape | flatten Reshape | transpose Transpose | permute Transpose | t Transpose | squeeze Squeeze
unsqueeze Unsqueeze | expanddims Unsqueeze | expand Expand | broadcastto Expand | repeat Tile | tile Tile | roll Roll
getitem Slice Select Gather | slice Slice | stridedslice Slice | narrow Slice | select Select | gather Gather | indexselect Gather | take Gather
interpolate Resize | upsample Resize | upsamplingnearest2d Resize | upsamplingbilinear2d Resize | upsampling2d Resize | resize Resize
resizenearestneighbor Resize | resizebilinear Resize | resizing Resize
pixelshuffle DepthToSpace | depthtospace DepthToSpace | pixelunshuffle SpaceToDepth | spacetodepth SpaceToDepth | channelshuffle ChannelShuffle
dropout Dropout Identity | dropout2d Dropout Identity | spatialdropout2d Dropout Identity | identity Identity | cast Cast | to Cast | size Size | shape Size
equal Equal | eq Equal | notequal NotEqual | less Less | lt Less | lessequal LessEqual | greater Greater | gt Greater | greaterequal GreaterEqual
logicaland LogicalAnd | logicalor LogicalOr | logicalnot LogicalNot | where Where | l2normalize ReduceL2 !
"""

#: Keras layers and functions that become other operators than PyTorch's of the same name
_OF_KERAS = """
conv2d Conv2D | relu Relu Relu6 Clamp LeakyRelu ! | depthwiseconv2d DepthwiseConv2D | max Max ReduceMax ! | add Add
"""


def _rows(text: str) -> dict[str, tuple[tuple[str, ...], bool]]:
    out = {}
    for row in text.replace("\n", "|").split("|"):
        name, *ops = row.split() or [""]
        if name:
            out[name] = tuple(o for o in ops if o in OPS), "!" in ops
    return out


_COMMON, _KERAS = _rows(_TABLE), _rows(_OF_KERAS)
#: names that an operator set may have when no layers are attached to it -> its operators
SETS: dict[str, tuple[str, ...]] = {
    "conv": ("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2D"),
    "convtranspose": ("TransposeConv1D", "TransposeConv2D", "TransposeConv3D"),
    "fullyconnected": ("Linear",),
    "anyrelu": ("Relu", "Relu6", "Clamp", "LeakyRelu"),
    "noquantization": (),
    "logistic": ("Sigmoid",),
    "biasadd": ("Add",),
    "l2normalization": ("ReduceL2",),
    "batchnorm": ("BatchNorm",),
}


def squash(name: str) -> str:
    """A name without case, underscores, and TensorFlow's version suffix."""
    return name.lower().replace("_v2", "").replace("_", "")


def package_of(entry: Any) -> str:
    """ "torch", "keras", "tensorflow", ... of a class or function; "" for text and for C functions of PyTorch."""
    home = getattr(entry, "__module__", None) or getattr(getattr(entry, "__objclass__", None), "__module__", None) or ""
    return home.partition(".")[0]


def member_of(entry: Any) -> Member:
    """The operator-set member that a layer stands for.

    Args:
        entry: a class (`torch.nn.Conv2d`, `keras.layers.ReLU`, a module of the user's own), a function (`torch.add`, `tf.nn.relu`,
            `keras.ops.add`, `operator.add`, `torch.Tensor.add`), or a name.

    Raises:
        ModelingError: a function or name that is no known operator; lists near names.
    """
    if isinstance(entry, Member):
        return entry
    name = entry if isinstance(entry, str) else getattr(entry, "__name__", "")
    key, package = squash(name), package_of(entry)
    if name in OPS:
        return Member(op=(name,))
    table = {**_COMMON, **_KERAS} if package in ("keras", "tensorflow", "tf_keras") else _COMMON
    if key in table:
        ops, exact = table[key]
        return Member(op=ops, type=name if exact else None)
    if isinstance(entry, type) or package in ("torch", "keras", "tensorflow", "tf_keras"):
        return Member(type=name)  # a layer without operator of its own: what is inside it
    if key in SETS:
        return Member(op=SETS[key])
    near = UnknownNameError("layer or operator", name or repr(entry), [*OPS, *(n for n in _COMMON)])
    raise ModelingError(near.what, got=repr(entry), allowed=near.allowed)
