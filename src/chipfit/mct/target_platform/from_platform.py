"""Conversion of a platform to target platform capabilities."""

from typing import Any

from chipfit.graph.ops import OPS
from chipfit.mct.target_platform import capabilities, configs, model
from chipfit.platform.filters import Member
from chipfit.platform.load import groups
from chipfit.platform.schema import Format, OpRule, Option, Platform


def from_platform(platform: Platform) -> capabilities.TargetPlatformCapabilities:
    """Return a platform as capabilities to read, print and edit; the platform itself stays attached.

    Facts without a counterpart in these classes (rules across tensors other than ties and fixed outputs, conditions on
    shapes) are in the attached record only; editing the model and converting it back loses them.
    """
    default = configs.QuantizationConfigOptions([_config(platform, None, Option())])
    sets: dict[str, model.OperatorsSet] = {}
    words_of: dict[str, set[str]] = {}  # set -> every word that its rule matches
    layers: list[capabilities.OperationsSetToLayers] = []
    assigned: set[Member] = set()
    for rule in platform.ops:
        if not rule.use and rule.exec is None:
            continue
        options = _options(platform, rule)
        if rule.match == ("*",):
            default = configs.QuantizationConfigOptions([options.base])
            continue
        label = ", ".join(w.removeprefix("@") if w.removeprefix("@") in platform.sets else w for w in rule.match)
        words = {o for w in rule.match for o in (*groups().get(w, ()), w)}
        members = [m for w in rule.match for m in platform.sets.get(w.removeprefix("@"), ())]
        members += [Member(op=(o,)) for o in sorted(words) if o in OPS]
        members = [m for m in members if m not in assigned]
        if members and label not in sets:  # a second rule has conditions that sets cannot express
            assigned.update(members)
            layers.append(capabilities.OperationsSetToLayers(label, members))
            sets[label], words_of[label] = model.OperatorsSet(label, options), words
    fusings = []
    for f in platform.fuse:
        steps = [
            [s for s in sets.values() if words_of[s.name] & {o for w in step for o in (*groups().get(w, ()), w)}]
            for step in f.steps
        ]
        if all(steps):
            members_of_steps = [g[0] if len(g) == 1 else model.OperatorSetConcat(*g) for g in steps]
            fusings.append(model.Fusing(members_of_steps, name=f.note or None))
    parts: dict[str, Any] = {"operator_set": [*sets.values()], "fusing_patterns": fusings, "math": platform.math}
    made = model.TargetPlatformModel(default, platform.metadata, platform.name, **parts, is_simd_padding=True)
    attached: dict[str, Any] = {"op_sets_to_layers": capabilities.OperationsToLayers(layers), "platform": platform}
    return capabilities.TargetPlatformCapabilities(made, platform.name, platform.arch_selected, **attached)


def _options(platform: Platform, rule: OpRule) -> configs.QuantizationConfigOptions:
    choices = list(dict.fromkeys(_config(platform, rule, o) for o in (rule.use or (Option(),))))
    return configs.QuantizationConfigOptions(choices, choices[0])


def _config(platform: Platform, rule: OpRule | None, o: Option) -> configs.OpQuantizationConfig:
    fix = next((r for r in (rule.rules if rule else ()) if r.fix == "out"), None)
    follow = rule is not None and rule.how == "follow"
    out = platform.formats.get(o.out or "")
    data = platform.formats.get((o.in_ if isinstance(o.in_, str) else (o.in_ or ("",))[0]) or "")
    stored, weights = out or data, ((configs.KERNEL_ATTR, o.w), (configs.BIAS_ATTR, o.b))
    signed: Any = stored.signed if stored else "auto"
    return configs.OpQuantizationConfig(
        default_weight_attr_config=configs.AttributeQuantizationConfig(),
        attr_weights_configs_mapping={k: _attribute(platform.formats.get(n)) for k, n in weights if n is not None},
        activation_quantization_method=_method(stored),
        activation_n_bits=stored.bits if stored else 32,
        supported_input_activation_n_bits=o.in_bits or (data.bits if data else 32,),
        enable_activation_quantization=out is not None and not follow,
        quantization_preserving=follow,
        fixed_scale=fix.scale if fix else None,
        fixed_zero_point=fix.zp if fix else None,
        simd_size=o.simd,
        signedness=configs.Signedness.AUTO if signed == "auto" else signed,
    )


def _method(f: Format | None) -> configs.QuantizationMethod:
    if f is None:
        return configs.QuantizationMethod.POWER_OF_TWO
    return configs.QuantizationMethod.of(lut=f.kind == "lut", pot=f.scale == "pot", affine=f.zero == "any")


def _attribute(f: Format | None) -> configs.AttributeQuantizationConfig:
    if f is None or f.is_float:
        return configs.AttributeQuantizationConfig()
    return configs.AttributeQuantizationConfig(
        _method(f), f.bits, f.per == "channel", True, int(f.lut.get("value_bits", 8)) if f.lut else None
    )
