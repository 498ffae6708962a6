"""What a platform's file says and chipfit does not do: one line for each word, with what is done instead."""

from __future__ import annotations

from collections.abc import Iterator

from chipfit.platform.schema import Accumulator, Platform
from chipfit.registry import lookup

#: forms of `math.requant` that need no more than an accumulator and a multiplier
FORMS = ("float", "q31")
Gap = tuple[str, object, str]  #: field, what the file says there, what chipfit does instead


def not_modelled(platform: Platform) -> tuple[str, ...]:
    """The words of a platform that nothing executes: "math.act_table pwl: activations are computed exactly"."""
    gaps = (*_formats(platform), *_operators(platform), *_fusions(platform), *_placement(platform), *_math(platform))
    return tuple(dict.fromkeys(f"{field} {said}: {instead}" for field, said, instead in gaps))


def kernels_of(platform: Platform) -> str | None:
    """The name of the platform's kernels; None when nothing is known about its integers.

    A platform that says no more than how it requantizes gets ONNX Runtime's kernels: their product sums requantize by
    that rule.
    """
    by_rule = "onnxruntime" if (platform.math.requant or {}).get("form") in FORMS else None
    return platform.math.kernels or by_rule


def whole_arithmetic(platform: Platform) -> bool:
    """All that the platform says of its arithmetic is simulated, so that exactness may be claimed."""
    return kernels_of(platform) is not None and not list(_math(platform))


def _formats(p: Platform) -> Iterator[Gap]:
    for name, f in p.formats.items():
        if f.gap:
            yield f"formats.{name}", f, f"{f.gap} cannot be decided yet, and choices with it are passed over"
        elif f.is_float and f.float_ not in ("fp32", None):
            yield f"formats.{name}", f, "computed in float32"
        if f.dynamic:
            yield f"formats.{name}.dynamic", "true", "the range comes from calibration"
        if f.scale_bits is not None:
            yield f"formats.{name}.scale_bits", f.scale_bits, "scales are not rounded"
        if f.grid_offset:
            yield f"formats.{name}.grid", f.grid_offset, "codes have no offset"


def _operators(p: Platform) -> Iterator[Gap]:
    for i, op in enumerate(p.ops):
        if "fused_activation" in op.where:
            yield f"ops.{i}.where.fused_activation", op.where["fused_activation"], "counts as satisfied"
        for at, when in ((f"ops.{i}", op.when), *((f"ops.{i}.use.{k}", u.when) for k, u in enumerate(op.use))):
            if "runtime" in when:
                yield f"{at}.when.runtime", when["runtime"], "the gate stays closed"
        for k, rule in enumerate(op.rules):
            if not rule.hard:
                yield f"ops.{i}.rules.{k}.hard", "false", "a preference is not sought"
            if rule.wsum_max is not None or rule.dtype:
                yield f"ops.{i}.rules.{k}.{rule.head}", rule.wsum_max or ", ".join(rule.dtype or ()), "is not checked"


def _fusions(p: Platform) -> Iterator[Gap]:
    for i, f in enumerate(p.fuse):
        for key in ("phase", "single_use"):
            if key in f.when:
                yield f"fuse.{i}.when.{key}", f.when[key], "the gate is open"
        if f.inner != "none":
            yield f"fuse.{i}.inner", f.inner, "nothing between the parts is rounded"
        if f.graph is not None and any("." in name for edge in f.graph["edges"] for name in edge):
            yield f"fuse.{i}.graph.edges", f.graph["edges"], "any operand of the reader counts"


def _placement(p: Platform) -> Iterator[Gap]:
    if p.place.io_out:
        yield "place.io_out", ", ".join(p.place.io_out), "outputs are stored as their operator writes them"
    if p.place.first_last and "slots" in p.place.first_last:
        yield "place.first_last.slots", ", ".join(p.place.first_last["slots"]), "in, w and out take the width"


def _math(p: Platform) -> Iterator[Gap]:
    m = p.math
    computes = lookup("kernels", m.kernels).says if m.kernels else {}
    for key, values in computes.items():
        said = getattr(m, key)
        if said is not None and said not in values:
            words = " ".join(map(str, said.values())) if isinstance(said, dict) else said
            yield f"math.{key}", words, f"the kernels {m.kernels} have their own"
    if m.kernels is None and kernels_of(p) is not None:
        form = (m.requant or {}).get("form")
        yield "math.requant.form", form, "product sums follow it, other operators are computed as ONNX Runtime does"
    if m.requant and kernels_of(p) is None and m.requant.get("form") != "none":
        yield "math.requant.form", m.requant.get("form"), "integers are not simulated"
    if m.requant and m.requant.get("form") == "float" and m.requant.get("passes") == 2:
        yield "math.requant.passes", 2, "one product"
    for k, a in enumerate(m.acc):
        if p.allows(a.get("when", {})) and _overflows(p, a):
            yield f"math.acc.{k}", f"{a['bits']} bits over {a.get('terms', 'all')} terms", "sums do not overflow"
    if m.acc and kernels_of(p) is None:
        yield "math.acc", f"{len(m.acc)} stages", "integers are not simulated"
    if m.act_table:
        yield "math.act_table", m.act_table.get("kind", ""), "activations are computed in float32, then rounded"


def _overflows(p: Platform, stage: Accumulator) -> bool:
    """Whether a sum of `terms` products of codes that the platform may multiply exceeds an accumulator's width.

    The accumulator of all products is simulated: it wraps around or saturates. One of some of them is not: which of
    them it sums depends on the kernel's order.
    """
    if "terms" not in stage:
        return False
    options = [(o, name) for op in p.ops if p.allows(op.when) for o in op.use if p.allows(o.when) for name in o.ins]
    pairs = [(p.formats[name], p.formats[o.w]) for o, name in options if {name, o.w} <= set(p.formats) and o.w]
    largest = [[max(-g.qmin, g.qmax) for g in (f.grid(bool(f.signed)) for f in pair)] for pair in pairs]
    return any(stage["terms"] * a * b > (1 << stage["bits"] - 1) - 1 for a, b in largest)
