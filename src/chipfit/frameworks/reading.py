"""Parts that all readers share: the exception of a call that they cannot read, and integers by axis."""

from collections.abc import Sequence


class Unreadable(Exception):
    """A call has no canonical equivalent."""


def per_axis(value: int | Sequence[int], n: int) -> tuple[int, ...]:
    """Return one integer for each of n axes.

    >>> per_axis(3, 2), per_axis([3], 2), per_axis((1, 2), 2)
    ((3, 3), (3, 3), (1, 2))
    """
    values = tuple(map(int, value)) if isinstance(value, Sequence) else (int(value),)
    return values * n if len(values) == 1 else values
