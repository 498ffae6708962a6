"""Parts that all readers share: the exception of a call that they cannot read, and words of their tables."""

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


def attribute_words(text: str) -> list[tuple[str, str, str]]:
    """Split words "attribute=source:conversion" into (attribute, source, conversion).

    Where the source is left out, it has the attribute's name; where the conversion is left out, it is "".

    >>> attribute_words("eps=epsilon:float axis")
    [('eps', 'epsilon', 'float'), ('axis', 'axis', '')]
    """
    words = []
    for word in text.split():
        name, _, conversion = word.partition(":")
        attribute, _, source = name.partition("=")
        words.append((attribute, source or attribute, conversion))
    return words
