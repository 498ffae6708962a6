"""Conversion of a target platform model to a `Platform`, the record of platform files."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chipfit.errors import ModelingError
from chipfit.mct.target_platform import configs
from chipfit.mct.target_platform.layers import layer_table
from chipfit.operators.table import OPS
from chipfit.platform.filters import Member
from chipfit.platform.schema import Format, Fuse, OpRule, Option, Placement, Platform, Rule
from chipfit.quantizers.grids import all_codes
from chipfit.validation import translate_errors

#: operators that pass quantized values on if their results have no quantizer: pass-through operators, and a few more
_CARRYING = {o for o, facts in OPS.items() if facts.moves or facts.extreme} | {"Cast", "Pad", "Size"}
_COMMON: dict[str, Any] = {"src": ("python",), "conf": "D"}


def build_platform(model: Any, attached: Mapping[str, tuple[Member, ...]]) -> Platform:
    """Return the Platform of a target platform model. Producers quantize their results.

    Args:
        model: a TargetPlatformModel, whose module imports this one.
        attached: operator set -> its members; each set becomes one of the platform's `sets`.

    Raises:
        ModelingError: a fixed zero point is outside the quantized range.
    """
    formats: dict[str, Format] = {}
    members_of = model.members(attached)
    of_inputs = [label for label, members in members_of.items() if _about_inputs(label, members)]
    sets = {label: members for label, members in members_of.items() if members and label not in of_inputs}
    rules = []
    for label, members in list(sets.items()):
        for part, rule in _rules(members, model.get_config_options_by_operators_set(label), formats):
            own = label if part is None else f"{label}: {', '.join(sorted(part))}"
            if part is not None:
                inside = ((m, tuple(o for o in m.op if o in part)) for m in members)
                sets[own] = tuple(m.model_copy(update={"op": ops}) for m, ops in inside if ops)
            rules.append(rule.model_copy(update={"match": (f"@{own}",)}))
    every = (Member(op=tuple(OPS)),)
    for part, rule in _rules(every, model.default_qco, formats):
        rules.append(rule.model_copy(update={"match": ("*",) if part is None else tuple(sorted(part))}))
    fusings = []
    for f in model.fusing_patterns:
        steps = tuple(tuple(f"@{m.name}" for m in g.members if m.name in sets) for g in f.operator_groups_list)
        if all(steps):
            fusings.append(Fuse(chain=steps, note=f.name or "", **_COMMON))
    own = next(iter(of_inputs), None)
    options = model.default_qco if own is None else model.get_config_options_by_operators_set(own)
    ordered = [options.base, *options.quantization_config_list]
    given = tuple(dict.fromkeys(_activation(c, formats) for c in ordered if c.enable_activation_quantization))
    return Platform(
        name=model.name,
        title=f"{model.name}, described in Python",
        formats=formats,
        sets=sets,
        ops=tuple(rules),
        unlisted="float",
        fuse=tuple(fusings),
        place=Placement(at="outputs", io_in=given),
        sources={"python": "described in Python"},
        file=f"<{model.name}>",
        metadata=model.add_metadata,
        simd_padding=model.is_simd_padding,
        math=model.math,
    )


def _about_inputs(label: str, members: tuple[Member, ...]) -> bool:
    """Return whether an operator set stands for the inputs of a model, by its name or by its layers."""
    names = layer_table()["inputs"]
    return label in names or any(m.type in names for m in members)


def _rules(
    members: tuple[Member, ...], options: configs.QuantizationConfigOptions, formats: dict[str, Format]
) -> Iterator[tuple[set[str] | None, OpRule]]:
    """Yield the rules of a set, each with its operators; None: all remaining operators.

    A set whose results are quantized needs one rule. Otherwise pass-through operators, operators with weights to
    quantize, and the others have different rules. So have linear operators, whose weights are kernels, and others.
    """
    configs = [options.base, *(c for c in options.quantization_config_list if c is not options.base)]
    ops = {o for m in members for o in m.op}
    linear = {o for o in ops if OPS[o].kind}
    kernels, others = (_distinct([_option(c, formats, w) for c in configs]) for w in (_KERNELS, _FACTORS))
    apart = bool(linear) and kernels != others
    parts = [*_parts(linear, kernels, options.base, formats)] if apart else []
    parts += _parts(ops - linear if apart else ops, kernels if ops == linear else others, options.base, formats)
    alone = all(m.op for m in members)  # every layer has known operators
    parts = [p for k, p in enumerate(parts) if p[0] or (k == len(parts) - 1 and not alone)]
    yield from ((None if p is parts[-1] else p[0], p[1]) for p in parts)


def _distinct(options: Sequence[Option]) -> tuple[Option, ...]:
    return tuple(o for k, o in enumerate(options) if o not in options[:k])


def _parts(
    ops: set[str], use: tuple[Option, ...], base: configs.OpQuantizationConfig, formats: dict[str, Format]
) -> list[tuple[set[str], OpRule]]:
    """Return operators and their rules, of those that have these options for their results and weights."""
    weighted = {o for o in ops if any(option.w != "float" for option in use) and _holds_constants(o)}
    kernel = OpRule(match=("*",), use=use, rules=_fixed(base, formats), exec="int", **_COMMON)
    follow = OpRule(match=("*",), exec="follow", rules=(Rule(tie=("ins", "outs")),), **_COMMON)
    if base.quantization_preserving:
        same = tuple(o.model_copy(update={"out": "same"}) for o in use)
        preserving = OpRule(match=("*",), use=same, rules=(Rule(tie=("in0", "out")),), exec="int", **_COMMON)
        return [(weighted, preserving), (ops - weighted, follow)]
    if base.enable_activation_quantization:
        return [(ops, kernel)]
    plain = OpRule(match=("*",), exec="float", note="the platform does not quantize its result", **_COMMON)
    return [(weighted, kernel), (ops & _CARRYING - weighted, follow), (ops - weighted - _CARRYING, plain)]


def _holds_constants(op: str) -> bool:
    """Return whether an operator may have weights, or constant operands."""
    several = sum(s.startswith("in") for s in OPS[op].slots) > 1
    return OPS[op].weighted or (several and op not in _CARRYING)


#: names of the weights of linear operators, and of others: constant operands, norms, PReLU and embeddings
_KERNELS = (configs.KERNEL_ATTR, "kernel", "weight")
_FACTORS = (configs.POSITIONAL_ATTR, "weight", "gamma", "alpha", "embeddings")


def _option(c: configs.OpQuantizationConfig, formats: dict[str, Format], weights: tuple[str, ...]) -> Option:
    bias = _pick(c, configs.BIAS_ATTR, "bias", "beta")
    return Option(
        in_="any",
        in_bits=c.supported_input_activation_n_bits,
        w=_weight(_pick(c, *weights), formats),
        b=_weight(bias, formats),
        out=_activation(c, formats) if c.enable_activation_quantization else "float",
        simd=c.simd_size,
    )


def _pick(c: configs.OpQuantizationConfig, *names: str) -> configs.AttributeQuantizationConfig:
    """Return the configuration of a weight attribute by its generic or framework name."""
    attrs = c.attr_weights_configs_mapping
    exact = [attrs[n] for n in names if n in attrs]
    last_words = {k: {k.rpartition("_")[2], k.rpartition("/")[2].partition(":")[0]} for k in attrs}
    similar = (v for k, v in attrs.items() if last_words[k] & {*names})
    return next(iter([*exact, *similar]), c.default_weight_attr_config)


def _weight(a: configs.AttributeQuantizationConfig, formats: dict[str, Format]) -> str:
    if not a.enable_weights_quantization:
        return "float"
    method, entries = a.weights_quantization_method, a.lut_values_bitwidth
    per = "channel" if a.weights_per_channel_threshold else "tensor"
    mark = ("_ch" if per == "channel" else "") + (f"_v{entries}" if method.lut and entries else "")
    return _add(formats, "w", mark, method, a.weights_n_bits, entries, per=per)


def _activation(c: configs.OpQuantizationConfig, formats: dict[str, Format]) -> str:
    method, auto = c.activation_quantization_method, c.signedness is configs.Signedness.AUTO
    signed = "auto" if auto and not method.affine else c.signedness is not configs.Signedness.UNSIGNED
    mark = "_u" if not signed else "" if auto or method.affine else "_s"
    return _add(formats, "a", mark, method, c.activation_n_bits, signed=signed)


def _add(formats: Any, role: str, mark: str, method: Any, bits: int, entries: int | None = None, **more: Any) -> str:
    """Add a format of a quantization method; return its name, which ends with `mark`."""
    short = ("lut" if method.lut else "") + ("uni" if method.affine else "pot" if method.pot else "sym")
    name = f"{role}{bits}_{short}{mark}"
    formats[name] = translate_errors(Format, ModelingError, f"a {bits}-bit format of {method}", {"bits": True})(
        bits=bits,
        kind="lut" if method.lut else "int",
        scale="pot" if method.pot else "any",
        zero="any" if method.affine else 0,
        lut={"value_bits": entries or 8} if method.lut else None,
        **more,
    )
    return name


def _fixed(c: configs.OpQuantizationConfig, formats: dict[str, Format]) -> tuple[Rule, ...]:
    if c.fixed_scale is None or not c.enable_activation_quantization:
        return ()
    f = formats[_activation(c, formats)]
    zero = c.fixed_zero_point or 0
    low, high = all_codes(f.bits, f.signed is not False)
    if f.zero == 0 and zero != 0:
        hint = "use QuantizationMethod.UNIFORM"
        raise ModelingError("fixed_zero_point must be 0 on a symmetric grid", got=zero, hint=hint)
    if not low <= zero <= high:
        raise ModelingError(f"fixed_zero_point must be in {low}..{high}", got=zero, hint="set signedness")
    return (Rule(fix="out", scale=c.fixed_scale, zp=zero),)
