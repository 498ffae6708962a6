"""Rules of the files that a platform reads, for operators about which the platform's own rules are silent."""

from collections.abc import Sequence
from functools import cache

from chipfit.operators.table import CELLS, OPS, dictated_outputs
from chipfit.platform.schema import Platform, Rule


def file_rules(platform: Platform, op: str, rules: Sequence[Rule], bits: int) -> tuple[Rule, ...]:
    """Return the rules that the integer kernels of the platform's files have beyond those of the platform.

    A format dictates the scales of some results, and its pass-through kernels have equal scales at both ends. They
    are known when scales are chosen, so that plan, simulation and file agree.

    Args:
        rules: the platform's rules of the operator; a scale or tie in them comes first.
        bits: width of the result.
    """
    if any(r.fix == "out" or r.tie for r in rules):
        return ()
    files = {text.split()[0] for text in platform.deploy if text.startswith(".")}
    return next((found for f in sorted(files) if (found := _rules(f[1:], op, bits))), ())


@cache
def _rules(column: str, op: str, bits: int) -> tuple[Rule, ...]:
    cell = CELLS.get(column, {}).get(op)
    facts = cell.get("facts", "").split() if isinstance(cell, dict) else []
    if cell is None or "integer" not in facts:
        return ()
    if dictated := dictated_outputs(cell).get(bits):
        scale, zero = dictated
        return (Rule(fix="out", scale=scale, zp=zero),)
    return (Rule(tie=("ins", "outs")),) if OPS[op].moves or "moves" in facts else ()
