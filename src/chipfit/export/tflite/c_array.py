"""A `.tflite` file as a C array, for microcontrollers without a file system, and the memory that it needs."""

import contextlib

from chipfit.errors import RuntimeUnavailable
from chipfit.export.tflite.arena import ALIGNMENT, arena
from chipfit.registry import entry, require_libraries

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
    """Return the arena that TensorFlow Lite Micro needs, measured where it is installed, else predicted; and which."""
    runtime = entry("runtime", "tflm")
    with contextlib.suppress(RuntimeUnavailable):  # not installed, or it lacks an operator, which `lint` names
        require_libraries(runtime)
        return runtime.thing.arena(content), (
            "// The least arena with which TensorFlow Lite Micro loads the file, measured by its interpreter on a\n"
            "// 64-bit processor; kernels of other libraries, such as CMSIS-NN, may need scratch buffers."
        )
    return arena(content).total, (
        "// The least arena with which TensorFlow Lite Micro loads the file, as predicted for a 64-bit processor;\n"
        "// kernels of other libraries, such as CMSIS-NN, may need scratch buffers. arena_used_bytes() reports it."
    )
