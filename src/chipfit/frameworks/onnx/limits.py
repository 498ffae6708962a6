"""Limits of what a node of an ONNX file may take, checked before it is computed: sizes, counts, divisions that trap.

A file of a few bytes can name a tensor of any size, and ONNX Runtime fills it, or ends the process on a division that
the processor cannot make. No runtime has such limits of its own.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chipfit.errors import CaptureError, raise_bug

#: greatest number of elements of a result, for each sample
MOST_ELEMENTS = 1 << 28
#: greatest integer among the attributes of a node, such as a stride or a number of heads
_LARGEST = 1 << 24
#: operators whose attributes are values or ends of ranges
_VALUES = "Constant ConstantOfShape Slice".split()
#: attributes that divide sizes
_DIVISORS = "group num_groups blocksize q_num_heads kv_num_heads".split()
#: operators that divide integers
TRAPPING = ("Div", "Mod")
#: operands with more elements are not sizes
_FEW = 64


def check_attributes(node: Any) -> None:
    """Check the integers in the attributes of a node.

    Raises:
        CaptureError: One is too large for a size, or not positive although sizes are divided by it.
    """
    if node.op_type in _VALUES:
        return
    for name, attribute in node.attributes.items():
        value = attribute.value
        numbers = value if isinstance(value, (list, tuple)) else (value,)
        least = 1 if name in _DIVISORS else -_LARGEST
        outside = [v for v in numbers if isinstance(v, int) and not least <= v <= _LARGEST]
        if outside:
            what = f"{name} of operator '{node.op_type}' is beyond all bounds"
            where, allowed = node.name or node.op_type, f"{least:,} to {_LARGEST:,}"
            raise CaptureError(what, where=where, got=outside[0], allowed=allowed)


def check_shape(shape: Sequence[int], rows: int, kind: str, where: str) -> None:
    """Check the size of a result.

    Args:
        rows: number of samples.
        kind: the operator.

    Raises:
        CaptureError: It has too many elements, or a negative size.
    """
    if min(shape, default=0) < 0:
        hint = "give larger inputs: this one is smaller than a window that moves over it"
        raise CaptureError(f"Operator '{kind}' makes a negative size", where=where, got=list(shape), hint=hint)
    if math.prod(shape) > MOST_ELEMENTS * max(rows, 1):
        allowed = f"at most {MOST_ELEMENTS:,} elements for each sample"
        raise CaptureError(f"Operator '{kind}' makes too large a tensor", where=where, got=list(shape), allowed=allowed)


def check_results(node: onnx.NodeProto, opset: int, operands: Mapping[str, Any], rows: int, where: str) -> None:
    """Check the sizes of a node's results by ONNX's inference of shapes, without computing them.

    Args:
        operands: by name, numbers as arrays, and tensors that depend on data as (type of NumPy, shape).

    Raises:
        CaptureError: A result has too many elements, or a division of integers traps.
    """
    if traps(node.op_type, *operands.values()):
        raise CaptureError(f"Operator '{node.op_type}' divides the least integer by -1", where=where)
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
        types = {k: _type(x) for k, x in operands.items()}
        numbers = {k: numpy_helper.from_array(x, k) for k, x in operands.items() if _is_few(x)}
        opsets = [helper.make_opsetid(node.domain, opset)]
        found = onnx.shape_inference.infer_node_outputs(schema, node, types, numbers, opset_imports=opsets)
    except Exception as e:  # onnx's own types; the operator's reader says more
        raise_bug(e)
        return
    for made in found.values():
        sizes = made.tensor_type.shape.dim
        if all(d.HasField("dim_value") for d in sizes):
            check_shape([d.dim_value for d in sizes], rows, node.op_type, where)


def traps(kind: str, *operands: Any) -> bool:
    """Return whether a processor traps on an operator of two integer arrays: it divides the least integer by -1."""
    if kind not in TRAPPING or not all(isinstance(x, np.ndarray) and x.dtype.kind == "i" for x in operands):
        return False
    left, right = operands
    return bool((right == -1).any() and (left == np.iinfo(left.dtype).min).any())


def _is_few(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.size <= _FEW


def _type(x: Any) -> onnx.TypeProto:
    kind, shape = (x.dtype, x.shape) if isinstance(x, np.ndarray | np.generic) else x
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(np.dtype(kind)), shape)
