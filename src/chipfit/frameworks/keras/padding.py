"""Convert padding between Keras's words ("valid", "same", "causal") and zeros before and after each spatial axis."""

import math
from collections.abc import Sequence

Pairs = tuple[tuple[int, int], ...]
Ints = Sequence[int]  #: one integer for each spatial axis
Sizes = Sequence[int | None]  #: one size for each spatial axis, None if unknown


def same_padding(size: Sizes, kernel: Ints, stride: Ints, dilation: Ints) -> Pairs | None:
    """Return the zeros of padding="same", which complete the last window; an odd zero is behind.

    Along a strided axis of unknown size these are the most that any size needs: zeros behind the last window do no
    harm. Return None if the zeros in front depend on the size.

    >>> same_padding((8, 7), (3, 3), (2, 2), (1, 1))
    ((0, 1), (1, 1))
    >>> same_padding((None, None), (4, 2), (2, 2), (1, 1))
    ((1, 2), (0, 1))
    """
    out = []
    for n, k, s, d in zip(size, kernel, stride, dilation, strict=True):
        span = d * (k - 1) + 1
        totals = [max((math.ceil(m / s) - 1) * s + span - m, 0) for m in ([n] if n else range(s, 2 * s))]
        if len({total // 2 for total in totals}) > 1:
            return None
        out.append((totals[0] // 2, max(totals) - totals[0] // 2))
    return tuple(out)


def numbers(word: str, size: Sizes, kernel: Ints, stride: Ints, dilation: Ints) -> Pairs | None:
    """Return the zeros of a convolution or pool, or None if they do not follow from the word and the sizes."""
    if word == "valid":
        return ((0, 0),) * len(kernel)
    if word == "causal":
        return tuple((d * (k - 1), 0) for k, d in zip(kernel, dilation, strict=True))
    return same_padding(size, kernel, stride, dilation) if word == "same" else None


def word(padding: Sequence[Ints], size: Sizes, kernel: Ints, stride: Ints, dilation: Ints) -> str:
    """Return the word for some zeros, as the inverse of `numbers`, or "" if Keras has no word for them."""
    pairs = tuple((int(lo), int(hi)) for lo, hi in padding)
    if not any(map(any, pairs)):
        return "valid"
    return "same" if pairs == same_padding(size, kernel, stride, dilation) else ""


def trim(span: int, stride: int, mode: str, extra: int | None) -> tuple[int, int]:
    """Return how much a transposed convolution cuts before and behind from its full result, (n - 1) stride + span long.

    The length of Keras's result is n stride for "same", and (n - 1) stride + max(span, stride) for "valid". With
    `output_padding` it is (n - 1) stride + span % 2 + output_padding, or (n - 1) stride + span + output_padding. An odd
    element is cut behind.

    Args:
        span: length of the dilated kernel.
        extra: `output_padding`, or None.

    >>> trim(3, 2, "same", None), trim(2, 3, "valid", None)
    ((0, 1), (0, -1))
    """
    if mode == "valid":
        return 0, span - (max(span, stride) if extra is None else span + extra)
    kept = stride if extra is None else span % 2 + extra
    total = span - kept
    before = max(total // 2, 0) if extra is None else max(span - 1 - math.ceil((2 * (span - 1) - total) / 2), 0)
    return before, total - before
