"""A `.tflite` file as a C array, for microcontrollers without a file system, and the memory of its tensors."""

import contextlib
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from chipfit.errors import RuntimeUnavailable
from chipfit.export.tflite.file import INT4, NUMPY
from chipfit.registry import entry, require

ALIGNMENT = 16  #: of TensorFlow Lite Micro's tensors [bytes]
_BYTES_PER_LINE = 16


def header(content: bytes, name: str) -> str:
    """Return C11 and C++11 source with the bytes of a file, their number, and the smallest tensor arena.

    Args:
        name: of the array; characters that C does not allow in a name become "_".
    """
    name = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
    name = f"_{name}" if name[:1].isdigit() else name
    rows = (content[k : k + _BYTES_PER_LINE] for k in range(0, len(content), _BYTES_PER_LINE))
    body = "\n".join("    " + "".join(f"0x{byte:02x}," for byte in row) for row in rows)
    size, comment = _arena_and_comment(content)
    return f"""#ifndef {name.upper()}_H
#define {name.upper()}_H

{comment}
#define {name.upper()}_TENSOR_ARENA {size}

#ifdef __cplusplus
alignas({ALIGNMENT})
#else
_Alignas({ALIGNMENT})
#endif
static const unsigned char {name}[] = {{
{body}
}};
static const unsigned int {name}_len = {len(content)};

#endif
"""


def _arena_and_comment(content: bytes) -> tuple[int, str]:
    """Return what TensorFlow Lite Micro needs where it is installed, else what the tensors take; and what it is."""
    runtime = entry("runtime", "tflm")
    with contextlib.suppress(RuntimeUnavailable):  # not installed, or it lacks an operator, which `lint` names
        require(runtime)
        return runtime.thing.arena(content), (
            "// The least arena with which TensorFlow Lite Micro loads the file, measured by its interpreter on a\n"
            "// 64-bit processor; kernels of other libraries, such as CMSIS-NN, may need scratch buffers."
        )
    return arena(content), (
        "// Bytes of all computed tensors, placed to share memory. The runtime's own records and scratch buffers of\n"
        "// kernels come on top: TensorFlow Lite Micro reports the sum in arena_used_bytes()."
    )


def arena(content: bytes, aligned: int = ALIGNMENT) -> int:
    """Return the bytes of a `.tflite` file's computed tensors; those that live at different times share memory.

    They are placed greedily as TensorFlow Lite Micro does: the largest first, each at the lowest offset that is free
    while it lives ("greedy by size for offset calculation", Pisarchyk and Lee 2020, arXiv:2001.03288).
    """
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
    g = model.subgraphs[0]
    lives: dict[int, list[int]] = {int(t): [0, 0] for t in g.inputs}
    for k, op in enumerate(g.operators):
        for t in (*op.inputs, *op.outputs):
            if t >= 0 and model.buffers[g.tensors[t].buffer].data is None:
                lives.setdefault(int(t), [k, k])[1] = k
    for t in g.outputs:
        lives.setdefault(int(t), [0, 0])[1] = len(g.operators)
    sizes = {t: -(-_bytes(g.tensors[t]) // aligned) * aligned for t in lives}
    placed: list[tuple[int, int, list[int]]] = []
    for t in sorted(lives, key=lambda t: (-sizes[t], lives[t])):
        begin, end = lives[t]
        at = 0
        for low, high, (first, last) in sorted(placed):
            if first <= end and begin <= last and low < at + sizes[t]:
                at = max(at, high)
        placed.append((at, at + sizes[t], lives[t]))
    return max((high for _, high, _ in placed), default=0)


def _bytes(tensor: Any) -> int:
    count = int(np.prod(tensor.shape, dtype=np.int64)) if tensor.shape is not None else 1
    return (count + 1) // 2 if tensor.type == INT4 else count * NUMPY[tensor.type].itemsize
