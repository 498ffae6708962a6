"""Conversion of a platform to target platform capabilities."""

from collections.abc import Iterable
from typing import Any

from chipfit.mct.target_platform import capabilities, configs, model
from chipfit.operators.table import OPS
from chipfit.platform.filters import Member
from chipfit.platform.load import groups
from chipfit.platform.schema import Format, OpRule, Option, Platform


def from_platform(platform: Platform) -> capabilities.TargetPlatformCapabilities:
    """Return a platform as capabilities to read, print and edit; the platform itself stays attached.

    Facts without a counterpart in these classes (rules across tensors other than ties and fixed outputs, conditions on
    shapes) are in the attached record only; editing the model and converting it back loses them.
    """
    rules = [r for r in platform.ops if r.use or r.exec is not None]
    general = next((r for r in reversed(rules) if r.match == ("*",)), None)
    default = configs.QuantizationConfigOptions([_options(platform, general).base])
    words_of: dict[str, set[str]] = {}  # set -> every word that its rule matches
    layers: dict[str, list[Member]] = {}
    options = default, platform.metadata, platform.name
    with model.TargetPlatformModel(*options, math=platform.math, is_simd_padding=True) as made:
        for rule in rules:
            label = ", ".join(w.removeprefix("@") if w.removeprefix("@") in platform.sets else w for w in rule.match)
            members = [m for w in rule.match for m in platform.sets.get(w.removeprefix("@"), ())]
            members += [Member(op=(o,)) for o in sorted(_words(rule.match)) if o in OPS]
            members = [m for m in members if not any(m in others for others in layers.values())]
            if members and label not in layers:  # a second rule has conditions that sets cannot express
                layers[label], words_of[label] = members, _words(rule.match)
                model.OperatorsSet(label, _options(platform, rule))
        for f in platform.fuse:
            steps: list[list[Any]] = [
                [name for name, words in words_of.items() if words & _words(step)] for step in f.steps
            ]
            if all(steps):
                alternatives = [g[0] if len(g) == 1 else model.OperatorSetConcat(*g) for g in steps]
                model.Fusing(alternatives, f.note or None)
    with capabilities.TargetPlatformCapabilities(made, platform.name, platform.arch_selected, platform=platform) as tpc:
        for label, members in layers.items():
            capabilities.OperationsSetToLayers(label, members)
    return tpc


def _words(match: Iterable[str]) -> set[str]:
    """Return words of a platform file with the operators of its @groups."""
    return {o for w in match for o in (*groups().get(w, ()), w)}


def _options(platform: Platform, rule: OpRule | None) -> configs.QuantizationConfigOptions:
    uses = rule.use if rule and rule.use else (Option(),)
    choices = list(dict.fromkeys(_config(platform, rule, o) for o in uses))
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
