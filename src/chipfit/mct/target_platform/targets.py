"""Built-in targets as capabilities: every version of the chips in `platform/builtin/modelled`, and any platform."""

import functools
import pkgutil
from collections.abc import Iterable
from importlib import import_module, resources
from typing import Any

import yaml

from chipfit.errors import ModelingError, RuntimeUnavailable, UnknownNameError, import_optional
from chipfit.mct.target_platform import capabilities, configs, model
from chipfit.mct.target_platform.layers import layer_table, normalize_name
from chipfit.operators.table import GROUPS, OPS
from chipfit.platform import load as platforms
from chipfit.platform.filters import Member
from chipfit.platform.schema import Format, OpRule, Option, Platform
from chipfit.platform.yaml_file import merged

__all__ = ["get_target_platform_capabilities"]

FRAMEWORKS = {"pytorch": "torch", "tensorflow": "keras", "keras": "keras"}  #: framework -> package
FILE = "file"  #: version that selects the platform file where `modelled` has a chip of the same name


def get_target_platform_capabilities(
    fw_name: str, target_platform_name: str = "default", target_platform_version: str | None = None
) -> capabilities.TargetPlatformCapabilities:
    """Return the capabilities of a built-in target for a framework, to read, print (`.show()`) and edit.

    Args:
        fw_name: "pytorch", "keras" or "tensorflow".
        target_platform_name: "default", "imx500", ..., or any platform of `chipfit platforms list`.
        target_platform_version: for a chip with versions one of them ("v1", "v1_pot", ...), or "file" for the platform
            file of the same name; for any other platform a revision. By default the first version or newest revision.

    Raises:
        ModelingError: the framework, platform or version is unknown; the message lists the known ones. It is an
            AssertionError and a ValueError too.
        RuntimeUnavailable: a chip with versions needs the framework, which is not installed.
    """
    if fw_name not in FRAMEWORKS:
        raise _unknown("framework", fw_name, list(FRAMEWORKS))
    name, version, chips = target_platform_name, target_platform_version, chip_descriptions()
    if name in chips and version != FILE:
        versions = list(chips[name]["versions"])
        if version not in (None, *versions):
            raise _unknown(f"version of '{name}'", version, [*versions, FILE])
        return _with_layers(chips[name], version or versions[0], FRAMEWORKS[fw_name])
    if name not in platforms.names():
        raise _unknown("platform", name, sorted({*chips, *platforms.names()}))
    try:
        return from_platform(platforms.load(name, None if version == FILE else version))
    except UnknownNameError as e:
        raise ModelingError(e.what, **e.choices) from None


def _unknown(what: str, name: Any, known: list[str]) -> ModelingError:
    e = UnknownNameError(what, str(name), known)
    return ModelingError(e.what, **{**e.choices, "allowed": ", ".join(known) if len(known) < 10 else e.allowed})


# ---------------------------------------------------------------- chips


@functools.cache
def chip_descriptions() -> dict[str, dict[str, Any]]:
    """Return the data of every chip in `modelled`, by name and alias."""
    out = {}
    files = (resources.files("chipfit.platform") / "builtin" / "modelled").iterdir()
    for file in sorted(files, key=lambda f: f.name):
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
        out[file.name.removesuffix(".yaml")] = data
        if "also" in data:
            out[data["also"]] = data
    return out


def _model(chip: dict[str, Any], version: str) -> model.TargetPlatformModel:
    """Return the model of a chip from its data, into which those of the version are already merged."""

    def options(words: str) -> Any:
        names = chip.get("options", {}).get(words, words).split()
        return configs.QuantizationConfigOptions.from_data({"options": [_config(chip, name) for name in names]})

    math = platforms.load(chip["math"]).math if "math" in chip else None
    general = options(chip["default"]), chip.get("add_metadata", False), chip["name"].format(version=version)
    with model.TargetPlatformModel(*general, math=math, is_simd_padding=chip.get("simd_padding", False)) as made:
        for names, words in chip["sets"].items():
            for name in names.split() if words != "absent" else ():
                model.OperatorsSet(name, None if words == "default" else options(words))
        for chain in chip["fusings"]:
            model.Fusing([model.OperatorSetConcat(*step.split()) if " " in step else step for step in chain])
    return made


def _config(chip: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration of the chip in the format of a file."""
    fields = _entry(chip["configs"], name)
    weights = {attribute: _entry(chip["weights"], entry) for attribute, entry in fields.pop("weights").items()}
    others = weights.pop("others", {})
    return {"default_weight_attr_config": others, "attr_weights_configs_mapping": weights, **fields}


def _entry(table: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an entry of a table; what it leaves out comes from the entries that its `like` names."""
    own = dict(table[name])
    return merged(*(_entry(table, other) for other in own.pop("like", "").split()), own)


# ---------------------------------------------------------------- layers


def _with_layers(data: dict[str, Any], version: str, package: str) -> capabilities.TargetPlatformCapabilities:
    """Return the chip with the framework's layers attached to its operator sets."""
    chip = merged(data, _entry(data["versions"], version))
    made = _model(chip, version)
    install = "torch" if package == "torch" else "'chipfit[keras]'"
    import_optional(package, "This target", RuntimeUnavailable, install)
    known = layer_table()
    attributes = {k: capabilities.DefaultDict({}, name) for k, name in known["weights"][package].items()}
    with capabilities.TargetPlatformCapabilities(made, made.name, version) as tpc:
        for name in (o.name for o in made.operator_set if isinstance(o, model.OperatorsSet)):
            rows = [
                known["layers"].get(normalize_name(row), {}) for row in chip.get("layers", {}).get(name, name).split()
            ]
            words = " ".join(row.get(package, "") for row in rows).split()
            if words:
                layers = [layer for word in words for layer in _layers(word, package)]
                capabilities.OperationsSetToLayers(name, layers, attributes)
    return tpc


#: framework -> the modules that hold its layers and functions
_MODULES = {"torch": ("torch.nn", "torch", "torch.nn.functional"), "keras": ("keras.layers", "keras.ops")}


def _layers(word: str, package: str) -> list[Any]:
    """Return the classes and functions that a name in layers.yaml stands for; "*name" may stand for several."""
    if not word.startswith("*"):
        return [_layer(word, package)]
    name, members = word[1:], [vars(import_module(m)).items() for m in _MODULES[package]]
    public = [(k, v) for many in members for k, v in many if "_" not in k[0] + k[-1]]
    alike = [v for k, v in public if normalize_name(k) == normalize_name(name)]
    if package == "keras" and hasattr(import_module("keras.activations"), name):
        alike.append(_layer(f"layers.Activation?activation={name}", package))
    return list(dict.fromkeys(alike))


def _layer(word: str, package: str) -> Any:
    """Return the class or function of one name; "name?attribute=value" filters its layers."""
    path, _, condition = word.partition("?")
    layer = pkgutil.resolve_name(path if path.startswith("operator.") else f"{package}.{path}")
    attribute, _, value = condition.partition("=")
    return capabilities.LayerFilterParams(layer, **{attribute: yaml.safe_load(value)}) if condition else layer


# ---------------------------------------------------------------- from platforms


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
    with model.TargetPlatformModel(*options, math=platform.math, is_simd_padding=platform.simd_padding) as made:
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
    return {o for w in match for o in (*GROUPS.get(w, ()), w)}


def _options(platform: Platform, rule: OpRule | None) -> configs.QuantizationConfigOptions:
    uses = rule.use if rule and rule.use else (Option(),)
    choices = list(dict.fromkeys(_config_of(platform, rule, o) for o in uses))
    return configs.QuantizationConfigOptions(choices, choices[0])


def _config_of(platform: Platform, rule: OpRule | None, o: Option) -> configs.OpQuantizationConfig:
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
