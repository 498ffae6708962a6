"""A chip described in Python becomes the record that platform files load into, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chipfit.errors import ModelingError
from chipfit.facade.target_platform.capabilities import (
    OperationsSetToLayers,
    OperationsToLayers,
    TargetPlatformCapabilities,
)
from chipfit.facade.target_platform.configs import (
    BIAS_ATTR,
    KERNEL_ATTR,
    POSITIONAL_ATTR,
    AttributeQuantizationConfig,
    OpQuantizationConfig,
    QuantizationConfigOptions,
    QuantizationMethod,
    Signedness,
)
from chipfit.facade.target_platform.layers import SETS, member_of, squash
from chipfit.facade.target_platform.model import Fusing, OperatorSetConcat, OperatorsSet, TargetPlatformModel
from chipfit.graph.ops import OPS
from chipfit.platform.filters import Member
from chipfit.platform.load import groups
from chipfit.platform.schema import Format, Fuse, OpRule, Option, Placement, Platform, Rule

_POT = (QuantizationMethod.POWER_OF_TWO, QuantizationMethod.LUT_POT_QUANTIZER)
_LUT = (QuantizationMethod.LUT_POT_QUANTIZER, QuantizationMethod.LUT_SYM_QUANTIZER)
_SHORT = {
    QuantizationMethod.POWER_OF_TWO: "pot",
    QuantizationMethod.SYMMETRIC: "sym",
    QuantizationMethod.UNIFORM: "uni",
    QuantizationMethod.LUT_POT_QUANTIZER: "lutpot",
    QuantizationMethod.LUT_SYM_QUANTIZER: "lutsym",
}
#: operators whose results are some of their inputs' values: without a quantizer of their own they carry codes on
_CHOOSING = frozenset(
    {
        "MaxPool",
        "AdaptiveMaxPool",
        "ReduceMax",
        "ReduceMin",
        "Concat",
        "Roll",
        "ChannelShuffle",
        "Max",
        "Min",
        "ArgMax",
        "Size",
        "Cast",
    }
) | frozenset(groups()["@move"])
_ANY_SOURCE = ("python",)


def lower(tpc: TargetPlatformCapabilities | TargetPlatformModel) -> Platform:
    """The Platform that a modelled chip is.

    Operator sets become `sets` of the platform; a set without layers attached is known by its name (Conv, FullyConnected,
    Add ...). Quantizers belong to the operators that write.

    Raises:
        ModelingError: a set that has neither layers nor a known name; a fixed zero point outside the codes.
    """
    model = tpc if isinstance(tpc, TargetPlatformModel) else tpc.tp_model
    attached = (
        {} if isinstance(tpc, TargetPlatformModel) else {o.name: o for o in tpc.op_sets_to_layers.op_sets_to_layers}
    )
    formats: dict[str, Format] = {}
    sets: dict[str, tuple[Member, ...]] = {}
    rules: list[OpRule] = []
    for op_set in model.operator_set:
        if isinstance(op_set, OperatorSetConcat):
            continue
        members = _members(op_set.name, attached.get(op_set.name))
        if members:
            sets[op_set.name] = members
            rules += _rules(f"@{op_set.name}", members, op_set.qc_options or model.default_qco, formats)
    rules += _rules("*", (), model.default_qco, formats)
    fusings = []
    for f in model.fusing_patterns:
        steps = tuple(tuple(f"@{m.name}" for m in g.members if m.name in sets) for g in f.operator_groups_list)
        if all(steps):
            fusings.append(Fuse(chain=steps, src=_ANY_SOURCE, conf="D", note=f.name))
    base = model.default_qco.base
    io = _activation(base, formats) if base.enable_activation_quantization else None
    return Platform(
        name=model.name,
        title=f"{model.name}, described in Python",
        formats=formats,
        sets=sets,
        ops=tuple(rules),
        unlisted="float",
        fuse=tuple(fusings),
        place=Placement(at="outputs", io_in=(io,) if io else ()),
        sources={"python": "described in Python"},
        file=f"<{model.name}>",
        metadata=model.add_metadata,
        math=model.math,
    )


def _members(name: str, entry: OperationsSetToLayers | None) -> tuple[Member, ...]:
    if entry is not None:
        return entry.members
    key = squash(name)
    if key in SETS:
        return tuple(Member(op=(o,)) for o in SETS[key])
    try:
        return (member_of(name),)
    except ModelingError as e:
        raise ModelingError(
            f"No layers are attached to the operator set '{name}', and its name is no known operator",
            allowed=e.allowed,
            hint=f"OperationsSetToLayers('{name}', [...])",
        ) from None


def _rules(
    match: str, members: tuple[Member, ...], options: QuantizationConfigOptions, formats: dict[str, Format]
) -> list[OpRule]:
    """One rule, or two where some operators of the set carry codes and others compute."""
    configs = [options.base, *(c for c in options.quantization_config_list if c is not options.base)]
    base = configs[0]
    common: dict[str, Any] = {"src": _ANY_SOURCE, "conf": "D"}
    if base.quantization_preserving:
        return [OpRule(match=(match,), exec="follow", rules=(Rule(tie=("ins", "outs")),), **common)]
    quiet = not base.enable_activation_quantization
    if quiet and not any(
        a.enable_weights_quantization
        for a in (base.default_weight_attr_config, *base.attr_weights_configs_mapping.values())
    ):
        moving = OpRule(
            match=tuple(sorted(_CHOOSING & set(OPS))), exec="follow", rules=(Rule(tie=("ins", "outs")),), **common
        )
        ops = {o for m in members for o in m.op}
        if match == "*":
            return [moving, OpRule(match=("*",), exec="float", **common)]
        if ops and ops <= _CHOOSING:
            return [OpRule(match=(match,), exec="follow", rules=moving.rules, **common)]
        return [OpRule(match=(match,), exec="float", note="the platform does not quantize its result", **common)]
    use: list[Option] = []
    for c in configs:
        option = _option(c, formats)
        use += [option] * (option not in use)
    return [OpRule(match=(match,), use=tuple(use), rules=_fixed(base, formats), exec="int", **common)]


def _option(c: OpQuantizationConfig, formats: dict[str, Format]) -> Option:
    attrs = c.attr_weights_configs_mapping
    kernel = _pick(attrs, (KERNEL_ATTR, "kernel", "weight", POSITIONAL_ATTR), c.default_weight_attr_config)
    bias = _pick(attrs, (BIAS_ATTR, "bias"), c.default_weight_attr_config)
    supported = c.supported_input_activation_n_bits
    assert isinstance(supported, tuple)  # made one by the configuration
    return Option(
        in_="any",
        in_bits=supported,
        w=_weight(kernel, formats),
        b=_weight(bias, formats),
        out=_activation(c, formats) if c.enable_activation_quantization else "float",
        simd=c.simd_size,
    )


def _pick(
    attrs: Mapping[str, AttributeQuantizationConfig], names: tuple[str, ...], default: AttributeQuantizationConfig
) -> AttributeQuantizationConfig:
    """The configuration of a weight attribute, by its generic name or a framework's own."""
    exact = next((attrs[n] for n in names if n in attrs), None)
    if exact is not None:
        return exact
    return next(
        (
            v
            for k, v in attrs.items()
            if k.rpartition("_")[2] in names or k.rpartition("/")[2].partition(":")[0] in names
        ),
        default,
    )


def _weight(a: AttributeQuantizationConfig, formats: dict[str, Format]) -> str:
    if not a.enable_weights_quantization:
        return "float"
    method = a.weights_quantization_method
    name = f"w{a.weights_n_bits}_{_SHORT[method]}" + ("_ch" if a.weights_per_channel_threshold else "")
    name += f"_v{a.lut_values_bitwidth}" if method in _LUT and a.lut_values_bitwidth else ""
    formats[name] = Format(
        bits=a.weights_n_bits,
        kind="lut" if method in _LUT else "int",
        scale="pot" if method in _POT else "any",
        zero="any" if method is QuantizationMethod.UNIFORM else 0,
        per="channel" if a.weights_per_channel_threshold else "tensor",
        lut={"value_bits": a.lut_values_bitwidth or 8} if method in _LUT else None,
    )
    return name


def _activation(c: OpQuantizationConfig, formats: dict[str, Format]) -> str:
    method, bits = c.activation_quantization_method, c.activation_n_bits
    affine = method is QuantizationMethod.UNIFORM
    signed: bool | str = {
        Signedness.SIGNED: True,
        Signedness.UNSIGNED: False,
        Signedness.AUTO: True if affine else "auto",
    }[c.signedness]
    name = f"a{bits}_{_SHORT[method]}" + {True: "" if affine else "_s", False: "_u", "auto": ""}[signed]
    formats[name] = Format(
        bits=bits,
        kind="lut" if method in _LUT else "int",
        signed=signed,
        scale="pot" if method in _POT else "any",
        zero="any" if affine else 0,
        lut={"value_bits": 8} if method in _LUT else None,
    )  # type: ignore[arg-type]  # signed is one of the three words
    return name


def _fixed(c: OpQuantizationConfig, formats: dict[str, Format]) -> tuple[Rule, ...]:
    if c.fixed_scale is None or not c.enable_activation_quantization:
        return ()
    f = formats[_activation(c, formats)]
    zero = c.fixed_zero_point or 0
    low, high = (0, (1 << f.bits) - 1) if f.signed is False else (-(1 << f.bits - 1), (1 << f.bits - 1) - 1)
    if f.zero == 0 and zero != 0:
        raise ModelingError(
            "fixed_zero_point must be 0 on a symmetric grid", got=zero, hint="use QuantizationMethod.UNIFORM"
        )
    if not low <= zero <= high:
        raise ModelingError(f"fixed_zero_point is outside the codes {low}..{high}", got=zero, hint="set signedness")
    return (Rule(fix="out", scale=c.fixed_scale, zp=zero),)


# ---------------------------------------------------------------- and back


def from_platform(platform: Platform) -> TargetPlatformCapabilities:
    """A platform as capabilities that can be read, printed and edited; the platform itself stays attached.

    What has no counterpart in these classes (rules across tensors other than ties and fixed outputs, conditions on shapes) is kept in the
    attached record only: a model that is edited and lowered again is a chip without it.
    """
    default = QuantizationConfigOptions([_config(platform, None, Option())])
    sets: dict[str, OperatorsSet] = {}
    words_of: dict[str, set[str]] = {}  # set -> every word that its rule is known by
    layers: list[OperationsSetToLayers] = []
    taken: set[Member] = set()
    for rule in platform.ops:
        if not rule.use and rule.exec is None:
            continue
        options = _options(platform, rule)
        if rule.match == ("*",):
            default = QuantizationConfigOptions([options.base])
            continue
        label = ", ".join(w.removeprefix("@") if w.removeprefix("@") in platform.sets else w for w in rule.match)
        words = {o for w in rule.match for o in (*groups().get(w, ()), w)}
        members = [m for w in rule.match for m in platform.sets.get(w.removeprefix("@"), ())]
        members += [Member(op=(o,)) for o in sorted(words) if o in OPS]
        members = [m for m in members if m not in taken]
        if (
            members and label not in sets
        ):  # a second rule for the same operators holds under conditions that sets cannot say
            taken.update(members)
            layers.append(OperationsSetToLayers(label, members))
            sets[label], words_of[label] = OperatorsSet(label, options), words
    fusings = []
    for f in platform.fuse:
        steps = [
            [s for s in sets.values() if words_of[s.name] & {o for w in step for o in (*groups().get(w, ()), w)}]
            for step in f.steps
        ]
        if all(steps):
            fusings.append(Fusing([g[0] if len(g) == 1 else OperatorSetConcat(*g) for g in steps], name=f.note or None))
    model = TargetPlatformModel(
        default,
        platform.metadata,
        platform.name,
        operator_set=sets.values(),
        fusing_patterns=fusings,
        math=platform.math,
    )
    return TargetPlatformCapabilities(
        model, platform.name, platform.arch_selected, op_sets_to_layers=OperationsToLayers(layers), platform=platform
    )


def _options(platform: Platform, rule: OpRule) -> QuantizationConfigOptions:
    configs = list(dict.fromkeys(_config(platform, rule, o) for o in (rule.use or (Option(),))))
    return QuantizationConfigOptions(configs, configs[0])


def _config(platform: Platform, rule: OpRule | None, o: Option) -> OpQuantizationConfig:
    fix = next((r for r in (rule.rules if rule else ()) if r.fix == "out"), None)
    follow = rule is not None and rule.how == "follow"
    out = platform.formats.get(o.out or "")
    data = platform.formats.get((o.in_ if isinstance(o.in_, str) else (o.in_ or ("",))[0]) or "")
    stored = out or data
    return OpQuantizationConfig(
        default_weight_attr_config=AttributeQuantizationConfig(),
        attr_weights_configs_mapping={
            k: _attribute(platform.formats.get(n)) for k, n in ((KERNEL_ATTR, o.w), (BIAS_ATTR, o.b)) if n is not None
        },
        activation_quantization_method=_method(stored),
        activation_n_bits=stored.bits if stored else 32,
        supported_input_activation_n_bits=o.in_bits or (data.bits if data else 32,),
        enable_activation_quantization=out is not None and not follow,
        quantization_preserving=follow,
        fixed_scale=fix.scale if fix else None,
        fixed_zero_point=fix.zp if fix else None,
        simd_size=o.simd,
        signedness={True: Signedness.SIGNED, False: Signedness.UNSIGNED, "auto": Signedness.AUTO}[stored.signed]
        if stored
        else Signedness.AUTO,
    )


def _method(f: Format | None) -> QuantizationMethod:
    if f is None:
        return QuantizationMethod.POWER_OF_TWO
    if f.kind == "lut":
        return QuantizationMethod.LUT_POT_QUANTIZER if f.scale == "pot" else QuantizationMethod.LUT_SYM_QUANTIZER
    if f.zero == "any":
        return QuantizationMethod.UNIFORM
    return QuantizationMethod.POWER_OF_TWO if f.scale == "pot" else QuantizationMethod.SYMMETRIC


def _attribute(f: Format | None) -> AttributeQuantizationConfig:
    if f is None or f.is_float:
        return AttributeQuantizationConfig()
    return AttributeQuantizationConfig(
        _method(f), f.bits, f.per == "channel", True, int(f.lut.get("value_bits", 8)) if f.lut else None
    )
