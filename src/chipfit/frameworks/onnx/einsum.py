"""The reader of Einsum: matrix products between permutations and reshapes."""

import math
from collections.abc import Sequence
from typing import Any

from chipfit.frameworks.onnx.call import OnnxCall, Operand
from chipfit.frameworks.onnx.read import reads, reshaped_step
from chipfit.frameworks.reading import require
from chipfit.graph.einsum import letters_of


@reads("Einsum")
def _einsum(c: OnnxCall) -> Any:
    """Read an einsum, two operands after the other, as matrix products between permutations and reshapes."""
    ins, arrow, result = c.attr("equation").replace(" ", "").partition("->")
    names = ins.split(",")
    require(arrow and "." not in ins and len(names) >= 2 and all(len({*n}) == len(n) for n in names))
    x, left = c.operand(0), names[0]
    for k, right in enumerate(names[1:], 1):
        x, left = _contracted(c, x, left, k, right, {*result, *"".join(names[k + 1 :])})
    return _permuted(c, x, left, result)


def _contracted(c: OnnxCall, x: Operand, left: str, k: int, right: str, kept: set[str]) -> tuple[Operand, str]:
    """Return the product of an operand with the k-th, summed over letters that are not kept, and its letters."""
    y = c.operand(k)
    batch, summed, first, second = letters_of(left, right, kept)
    require(kept.issuperset([*first, *second]))
    sizes = [{**dict(zip(right, b.shape)), **dict(zip(left, a.shape))} for a, b in zip(x.metas, y.metas, strict=True)]
    made = [*batch, *first, *second]
    if y.constant is not None and not y.name and not batch:
        order, width = [right.index(n) for n in (*second, *summed)], math.prod(sizes[0][n] for n in second)
        w = c.weight(k, right + left, lambda t: t.permute(order).reshape(width, -1))
        a = _merged(c, _permuted(c, x, left, [*first, *summed]), sizes, [*first, summed])
        z = c.step("Linear", [a, w])
    else:
        a = _merged(c, _permuted(c, x, left, [*batch, *first, *summed]), sizes, [*batch, first, summed])
        b = _merged(c, _permuted(c, y, right, [*batch, *summed, *second]), sizes, [*batch, summed, second])
        z = c.step("MatMul", [a, b])
    return _merged(c, z, sizes, made), "".join(made)


def _permuted(c: OnnxCall, x: Operand, letters: str, wanted: Sequence[str]) -> Operand:
    perm = tuple(letters.index(n) for n in wanted)
    return x if perm == tuple(range(x.rank)) else c.step("Transpose", [x], perm=perm)


def _merged(c: OnnxCall, x: Operand, sizes: Sequence[dict[str, int]], groups: Sequence[Sequence[str]]) -> Operand:
    """Return an operand with one axis for each group of letters."""
    shapes = [[math.prod(s[n] for n in group) for group in groups] for s in sizes]
    return reshaped_step(c, x, shapes)
