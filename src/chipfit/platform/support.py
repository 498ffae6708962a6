"""Settings of a platform file that chipfit does not implement, each with what is done instead."""

from collections.abc import Iterator

from chipfit.platform.schema import Gate, Platform
from chipfit.registry import entries, entry, lookup

#: forms of `math.requant` that need no more than an accumulator and a multiplier
REQUANT_FORMS = ("float", "q31", "shift")
#: what chipfit does instead of a condition that it cannot check, and of a format that it has not
_GATE_STAYS_CLOSED, _OPTIONS_ARE_SKIPPED = "the gate stays closed", "options with it are skipped"
Gap = tuple[str, object, str]  #: field, its value in the file, what chipfit does instead


def unsupported_features(platform: Platform) -> tuple[str, ...]:
    """Return the unsupported settings of a platform: "math.act_table pwl: activations are computed exactly"."""
    gaps = (*_formats(platform), *_operators(platform), *_fusions(platform), *_math(platform))
    return tuple(dict.fromkeys(f"{field} {value}: {instead}" for field, value, instead in gaps))


def features_with_other_results(platform: Platform) -> tuple[str, ...]:
    """Return the unsupported settings that may change results: not those whose options are never chosen."""
    return tuple(
        text for text in unsupported_features(platform) if not text.endswith((_GATE_STAYS_CLOSED, _OPTIONS_ARE_SKIPPED))
    )


def kernels_of(platform: Platform) -> str | None:
    """Return the name of the platform's kernels; None if nothing is known about its integer arithmetic.

    A platform that only defines how it requantizes gets ONNX Runtime's kernels, whose product sums follow that rule.
    """
    by_rule = "onnxruntime" if (platform.math.requant or {}).get("form") in REQUANT_FORMS else None
    return platform.math.kernels or by_rule


def simulates_arithmetic(platform: Platform) -> bool:
    """Return whether the whole arithmetic of a platform file is simulated, so that exactness may be claimed."""
    return kernels_of(platform) is not None and not list(_math(platform))


def file_suffixes(p: Platform) -> list[str]:
    """Return the suffixes of the platform's files that chipfit writes, first those of its runtimes."""
    runs = [entry("runtime", name).declares.suffix for name in p.runtimes]
    formats = [e.declares for e in entries("format").values()]
    named = [s for f in formats if not f.named for s in f.suffixes for d in p.deploy if s in d]
    kinds = {p.formats[d].kind for o in p.ops for u in o.use for d in (*u.ins, u.out) if d in p.formats}
    if any("ONNX" in d for d in p.deploy) and (not kinds or "int" in kinds):  # activations have integer grids there
        named.append(".onnx")
    return list(dict.fromkeys([*runs, *named]))


def _formats(p: Platform) -> Iterator[Gap]:
    for name, f in p.formats.items():
        if f.gap:
            yield f"formats.{name}", f, f"{f.gap} not supported: {_OPTIONS_ARE_SKIPPED}"
        elif f.is_float and f.float_ not in ("fp32", None):
            yield f"formats.{name}", f, "computed in float32"


def _operators(p: Platform) -> Iterator[Gap]:
    for i, op in enumerate(p.ops):
        if "fused_activation" in op.where:
            yield f"ops.{i}.where.fused_activation", op.where["fused_activation"], "counts as satisfied"
        for at, when in ((f"ops.{i}", op.when), *((f"ops.{i}.use.{k}", u.when) for k, u in enumerate(op.use))):
            if "runtime" in when:
                yield f"{at}.when.runtime", when["runtime"], _GATE_STAYS_CLOSED
        for k, rule in enumerate(op.rules):
            slots = {*(rule.tie or ()), rule.fix, rule.zero, *(rule.scale_product or ())}
            if not rule.hard:
                yield f"ops.{i}.rules.{k}.hard", "false", "a preference is not sought"
            elif "b" in slots and (rule.scale_product, rule.eq) != ({"b": 1, "in0": -1, "w": -1}, 1):
                yield f"ops.{i}.rules.{k}.{rule.head}", "b", "a bias has its own range, or input scale x weight scale"


def _fusions(p: Platform) -> Iterator[Gap]:
    for i, f in enumerate(p.fuse):
        if f.inner != "none":
            yield f"fuse.{i}.inner", f.inner, "nothing between the parts is rounded"
        if f.graph is not None and ("free_input" in f.graph or "." in str(f.graph["edges"])):
            yield f"fuse.{i}.graph", f.graph["edges"], "of the operands of each reader, any one counts"


def _math(p: Platform) -> Iterator[Gap]:
    m, kernels, requant = p.math, kernels_of(p), p.math.requant or {}
    simulated = lookup("kernels", m.kernels).supported_math if m.kernels else ()
    for key, value in (("q_round", m.q_round), ("requant", " ".join(str(v) for _, v in sorted(requant.items())))):
        if simulated and value and value not in simulated:
            yield f"math.{key}", value, f"the kernels {m.kernels} have their own"
    if m.kernels is None and kernels is not None:
        what = "product sums follow it, other operators are computed as ONNX Runtime does"
        yield "math.requant.form", requant["form"], what
    if kernels is None and (m.acc or requant.get("form", "none") != "none"):
        yield "math.requant.form" if requant else "math.acc", requant.get("form", ""), "integers are not simulated"
    if (requant.get("form"), requant.get("passes")) == ("float", 2):
        yield "math.requant.passes", 2, "one product"
    for k, a in enumerate(m.acc):
        if "terms" in a and p.allows(a.get("when", Gate())):
            yield f"math.acc.{k}.terms", a["terms"], "only the sum of all products is limited"
    if m.act_table:
        yield "math.act_table", m.act_table.get("kind", ""), "activations are computed in float32, then rounded"
