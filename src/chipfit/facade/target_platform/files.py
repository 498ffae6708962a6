"""Modelled chips as JSON: enumerations by name, layers by name or as filters, a schema version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

from chipfit.errors import ModelingError
from chipfit.facade.target_platform.capabilities import (
    DefaultDict,
    OperationsSetToLayers,
    OperationsToLayers,
    TargetPlatformCapabilities,
)
from chipfit.facade.target_platform.configs import (
    AttributeQuantizationConfig,
    OpQuantizationConfig,
    QuantizationConfigOptions,
    QuantizationMethod,
    Signedness,
)
from chipfit.facade.target_platform.model import Fusing, Group, OperatorSetConcat, OperatorsSet, TargetPlatformModel
from chipfit.files import write_atomically
from chipfit.platform.filters import Member

SCHEMA_VERSION = 1


class MissingFile(ModelingError, FileNotFoundError):
    """There is no such file."""


class NotCapabilities(ModelingError, TypeError):
    """Something else than capabilities or the path of a file with them."""


def export_target_platform_capabilities(
    tpc: TargetPlatformCapabilities | TargetPlatformModel, path: str | Path
) -> Path:
    """Write a modelled chip to a `.json` file; folders above it are made.

    Layers are written as the operators and conditions that they stand for, so the file needs no framework to be read.

    Raises:
        ModelingError: the suffix is not .json.
        NotCapabilities: `tpc` is something else.
    """
    if isinstance(tpc, TargetPlatformModel):
        tpc = TargetPlatformCapabilities(tpc)
    if not isinstance(tpc, TargetPlatformCapabilities):
        raise NotCapabilities("Only capabilities or a model can be written", got=type(tpc).__name__)
    path = _json_path(path)
    return write_atomically(path, (json.dumps(_dump(tpc), indent=4) + "\n").encode())


def load_target_platform_capabilities(source: Any) -> TargetPlatformCapabilities:
    """Capabilities from a `.json` file, or as they are.

    Raises:
        MissingFile: also a FileNotFoundError.
        NotCapabilities: also a TypeError; neither capabilities nor a path.
        ModelingError: also a ValueError; the suffix is not .json, the text is no JSON, or the content is no modelled chip.
    """
    if isinstance(source, TargetPlatformCapabilities):
        return source
    if isinstance(source, TargetPlatformModel):
        return TargetPlatformCapabilities(source)
    if not isinstance(source, (str, Path)):
        raise NotCapabilities(
            "Capabilities are given as an object or as the path of a .json file", got=type(source).__name__
        )
    path = _json_path(source)
    if not path.is_file():
        raise MissingFile("The capabilities file does not exist", where=str(path))
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as e:
        raise ModelingError(f"The file is not JSON: {e}", where=str(path)) from None
    version = data.get("SCHEMA_VERSION") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ModelingError(
            "The file is of an unknown schema version", where=str(path), got=repr(version), allowed=SCHEMA_VERSION
        )
    try:
        return _load(data)
    except (KeyError, TypeError, AttributeError) as e:
        raise ModelingError(
            f"The file does not hold a modelled chip: {type(e).__name__} {e}", where=str(path)
        ) from None


def _json_path(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix != ".json":
        raise ModelingError(
            "Capabilities are kept in .json files", where=str(path), got=path.suffix or "no suffix", allowed=".json"
        )
    return path


# ---------------------------------------------------------------- objects to data


def _record(r: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for f in fields(r):
        v = getattr(r, f.name)
        if isinstance(v, Enum):
            v = v.name
        elif isinstance(v, Mapping):
            v = {k: _record(x) for k, x in v.items()}
        elif isinstance(v, AttributeQuantizationConfig):
            v = _record(v)
        out[f.name] = list(v) if isinstance(v, tuple) else v
    return out


def _dump_options(o: QuantizationConfigOptions | None) -> dict[str, Any] | None:
    if o is None:
        return None
    return {
        "options": [_record(c) for c in o.quantization_config_list],
        "base": o.quantization_config_list.index(o.base),
    }


def _dump(tpc: TargetPlatformCapabilities) -> dict[str, Any]:
    model = tpc.tp_model
    return {
        "SCHEMA_VERSION": SCHEMA_VERSION,
        "name": tpc.name,
        "version": tpc.version,
        "model": {
            "name": model.name,
            "add_metadata": model.add_metadata,
            "default": _dump_options(model.default_qco),
            "math": model.math.model_dump(mode="json", exclude_defaults=True),
            "operator_sets": [
                {"name": o.name, "members": [m.name for m in o.members]}
                if isinstance(o, OperatorSetConcat)
                else {"name": o.name, "options": _dump_options(o.qc_options)}
                for o in model.operator_set
            ],
            "fusings": [
                {"name": f.name, "groups": [g.name for g in f.operator_groups_list]} for f in model.fusing_patterns
            ],
        },
        "layers": [
            {
                "set": o.name,
                "members": [m.model_dump(mode="json", by_alias=True, exclude_defaults=True) for m in o.members],
                "attributes": {
                    k: {"known": {_name(x): v for x, v in d.known_dict.items()}, "default": d.default_value}
                    for k, d in o.attr_mapping.items()
                },
            }
            for o in tpc.op_sets_to_layers.op_sets_to_layers
        ],
    }


def _name(layer: Any) -> str:
    return layer if isinstance(layer, str) else getattr(layer, "__name__", str(layer))


# ---------------------------------------------------------------- data to objects


def _load_config(data: dict[str, Any]) -> OpQuantizationConfig:
    def attribute(d: dict[str, Any]) -> AttributeQuantizationConfig:
        return AttributeQuantizationConfig(
            **{**d, "weights_quantization_method": QuantizationMethod[d["weights_quantization_method"]]}
        )

    return OpQuantizationConfig(
        **{
            **data,
            "default_weight_attr_config": attribute(data["default_weight_attr_config"]),
            "attr_weights_configs_mapping": {k: attribute(v) for k, v in data["attr_weights_configs_mapping"].items()},
            "activation_quantization_method": QuantizationMethod[data["activation_quantization_method"]],
            "signedness": Signedness[data["signedness"]],
        }
    )


def _load_options(data: dict[str, Any] | None) -> QuantizationConfigOptions | None:
    if data is None:
        return None
    configs = [_load_config(c) for c in data["options"]]
    return QuantizationConfigOptions(configs, configs[data["base"]])


def _load(data: dict[str, Any]) -> TargetPlatformCapabilities:
    m = data["model"]
    default = _load_options(m["default"])
    if default is None:
        raise KeyError("default")
    sets: dict[str, Group] = {}
    for o in m["operator_sets"]:
        if "members" in o:
            sets[o["name"]] = OperatorSetConcat(*(sets[n] for n in o["members"]), name=o["name"])
        else:
            sets[o["name"]] = OperatorsSet(o["name"], _load_options(o["options"]))
    fusings = [Fusing([sets[g] for g in f["groups"]], f["name"]) for f in m["fusings"]]
    model = TargetPlatformModel(
        default, m["add_metadata"], m["name"], operator_set=sets.values(), fusing_patterns=fusings, math=m["math"]
    )
    layers = OperationsToLayers()
    for e in data["layers"]:
        mapping = {k: DefaultDict(d["known"], d["default"]) for k, d in e["attributes"].items()}
        layers.add(OperationsSetToLayers(e["set"], [Member.model_validate(x) for x in e["members"]], mapping))
    return TargetPlatformCapabilities(model, data["name"], data["version"], op_sets_to_layers=layers)
