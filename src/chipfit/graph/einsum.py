"""Einsums of two operands: what becomes of their axes, and those that are one matrix product."""

from collections.abc import Container
from typing import NamedTuple

Perm = tuple[int, ...]


class Product(NamedTuple):
    """einsum(a, b) = (a.permute(left) @ b.permute(right)).permute(result)."""

    left: Perm  #: to [*batch, first, summed]
    right: Perm  #: to [*batch, summed, second]
    result: Perm  #: from [*batch, first, second]


class Letters(NamedTuple):
    """The letters of two operands, by what becomes of their axes."""

    batch: list[str]  #: of both operands and kept
    summed: list[str]  #: of both operands and summed over
    first: list[str]  #: of the first operand alone
    second: list[str]  #: of the second operand alone


def letters_of(left: str, right: str, kept: Container[str]) -> Letters:
    """Return the letters of two operands of an einsum, of which those in `kept` are axes of the result."""
    both = [c for c in left if c in right]
    batch, summed = [c for c in both if c in kept], [c for c in both if c not in kept]
    return Letters(batch, summed, [c for c in left if c not in right], [c for c in right if c not in left])


def as_product(equation: str) -> Product | None:
    """Return an einsum equation as a matrix product, None if it is not one.

    The letters of "bqd,bkd->bqk" fall into four groups: of both operands and the result (b), of the first alone (q), of
    both but not the result (d, summed over), of the second alone (k). All but the first group must be one letter.
    """
    ins, arrow, result = equation.replace(" ", "").partition("->")
    left, comma, right = ins.partition(",")
    # repeated letters of `left` fail the next test
    if not (arrow and comma) or "." in ins or len({*right}) < len(right):
        return None
    batch, summed, first, second = letters_of(left, right, result)
    made = [*batch, *first, *second]
    if not len(summed) == len(first) == len(second) == 1 or sorted(result) != sorted(made):
        return None
    return Product(
        tuple(left.index(c) for c in [*batch, *first, *summed]),
        tuple(right.index(c) for c in [*batch, *summed, *second]),
        tuple(made.index(c) for c in result),
    )
