"""Target platform capabilities as JSON: enumerations by name, layers by name or as filters, a schema version."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from chipfit.errors import ModelingError, UnknownNameError
from chipfit.files import existing_file, path_of, read_json, write_atomically
from chipfit.mct.target_platform import capabilities, model
from chipfit.mct.target_platform.configs import QuantizationConfigOptions
from chipfit.mct.target_platform.layers import name_of
from chipfit.mct.target_platform.targets import from_platform
from chipfit.operators.table import OPS
from chipfit.platform.filters import Member
from chipfit.platform.load import load
from chipfit.registry import register
from chipfit.validation import check_value, json_default

__all__ = ["export_target_platform_capabilities", "load_target_platform_capabilities"]

# mypy cannot check types that are built from data
_make: Any = TypedDict
_list: Any = list
_dict: Any = dict


def _table(**wanted: Any) -> Any:
    """Return the type of a table with these keys; others are permitted."""
    return _make("Table", wanted)


_options = _table(options=list[Any], base=int)
_set = _table(name=str, options=NotRequired[_options | None], members=NotRequired[list[str]])
_fusing = _table(name=str | None, groups=list[str])
_attribute = _table(known=dict[str, Any], default=Any)
_entry = _table(set=str, members=list[Any], attributes=_dict[str, _attribute])
_math = dict[str, Any] | None
_model = _table(
    name=str, add_metadata=bool, default=_options, math=_math, operator_sets=_list[_set], fusings=_list[_fusing]
)
#: the content of a file
_file = _table(SCHEMA_VERSION=Literal[1], name=str, version=str | None, model=_model, layers=_list[_entry])

_Modelled = capabilities.TargetPlatformCapabilities | model.TargetPlatformModel


class MissingFile(ModelingError, FileNotFoundError):
    """A file does not exist."""


class NotCapabilities(ModelingError, TypeError):
    """An argument is neither capabilities nor a path."""


def export_target_platform_capabilities(tpc: _Modelled, path: str | Path) -> Path:
    """Write capabilities or a model to a `.json` file; creates missing folders.

    Layers are written as operators and conditions, so that reading the file requires no framework.

    Raises:
        ModelingError: the suffix is not .json.
        NotCapabilities: `tpc` is neither.
    """
    if not isinstance(tpc, _Modelled):
        raise NotCapabilities("tpc must be capabilities or a model", got=type(tpc).__name__)
    data = _dump(load_target_platform_capabilities(tpc))
    return write_atomically(_json_path(path), (json.dumps(data, indent=4, default=json_default) + "\n").encode())


def load_target_platform_capabilities(source: Any) -> capabilities.TargetPlatformCapabilities:
    """Return capabilities from a `.json` file; return capabilities unchanged.

    Raises:
        MissingFile: the file does not exist; also a FileNotFoundError.
        NotCapabilities: `source` is neither capabilities nor a path; also a TypeError.
        ModelingError: the suffix is not .json, or the content is invalid; also a ValueError.
    """
    if isinstance(source, capabilities.TargetPlatformCapabilities):
        return source
    if isinstance(source, model.TargetPlatformModel):
        return capabilities.TargetPlatformCapabilities(source)
    path = existing_file(_json_path(source), MissingFile, "The capabilities file")
    data = read_json(path, ModelingError)
    try:
        return read(data)
    except ModelingError as e:
        raise ModelingError(e.what, where=str(path), got=e.got, allowed=e.allowed, hint=e.hint) from None


@register("modelled", "files")
class ModelledFiles:
    """Reading and writing of capabilities for `chipfit.platform`, which does not import these classes."""

    read = staticmethod(load_target_platform_capabilities)

    @staticmethod
    def write(what: Any, path: Path) -> Path:
        """Write any platform as capabilities."""
        tpc = what if isinstance(what, _Modelled) else from_platform(load(what))
        return export_target_platform_capabilities(tpc, path)


def _json_path(path: str | Path) -> Path:
    path = path_of(path, NotCapabilities)
    if path.suffix != ".json":
        got = path.suffix or "no suffix"
        raise ModelingError("Capabilities files must have the suffix .json", where=str(path), got=got, allowed=".json")
    return path


# ---------------------------------------------------------------- objects to data


def _dump(tpc: capabilities.TargetPlatformCapabilities) -> dict[str, Any]:
    m = tpc.tp_model
    described = {
        **{name: getattr(m, name) for name in ("name", "add_metadata", "is_simd_padding")},
        "default": m.default_qco.to_data(),
        "math": m.math.model_dump(mode="json", exclude_defaults=True),
        "operator_sets": [{"name": o.name, **_dump_group(o)} for o in m.operator_set],
        "fusings": [{"name": f.name, "groups": [g.name for g in f.operator_groups_list]} for f in m.fusing_patterns],
    }
    layers = [_dump_layers(o) for o in tpc.op_sets_to_layers.op_sets_to_layers]
    about = {"SCHEMA_VERSION": 1, "name": tpc.name, "version": tpc.version}
    return {**about, "model": described, "layers": layers}


def _dump_group(o: model.OperatorGroup) -> dict[str, Any]:
    if isinstance(o, model.OperatorsSet):
        return {"options": o.qc_options.to_data() if o.qc_options else None}
    return {"members": [m.name for m in o.members]}


def _dump_layers(o: capabilities.OperationsSetToLayers) -> dict[str, Any]:
    members = [m.model_dump(mode="json", by_alias=True, exclude_defaults=True) for m in o.members]
    known = {k: {name_of(x): v for x, v in d.known_dict.items()} for k, d in o.attr_mapping.items()}
    attributes = {k: {"known": known[k], "default": d.default_value} for k, d in o.attr_mapping.items()}
    return {"set": o.name, "members": members, "attributes": attributes}


# ---------------------------------------------------------------- data to objects


def read(data: Mapping[str, Any]) -> capabilities.TargetPlatformCapabilities:
    """Return the capabilities that a file's data describe.

    Raises:
        ModelingError: the data are invalid or contradictory.
    """
    check_value(_file, data, ModelingError, "the file", "", json=True)
    m, options_of = data["model"], QuantizationConfigOptions.from_data
    # files of earlier versions lack is_simd_padding and pad wherever there is a width
    rest: Any = {"math": m["math"], "is_simd_padding": m.get("is_simd_padding", True)}
    with model.TargetPlatformModel(options_of(m["default"]), m["add_metadata"], m["name"], **rest) as made:
        for o in m["operator_sets"]:
            if "members" in o:
                model.OperatorSetConcat(*o["members"], name=o["name"])
            else:
                model.OperatorsSet(o["name"], options_of(o["options"]) if o.get("options") else None)
        for f in m["fusings"]:
            model.Fusing(f["groups"], f["name"])
    with capabilities.TargetPlatformCapabilities(made, data["name"], data["version"]) as tpc:
        for e in data["layers"]:
            mapping = {k: capabilities.DefaultDict(d["known"], d["default"]) for k, d in e["attributes"].items()}
            members = check_value(list[Member], e["members"], ModelingError, f"set '{e['set']}'", "members", json=True)
            for op in (op for m in members for op in m.op if op not in OPS):
                near = UnknownNameError("operator", op, OPS)
                raise ModelingError(f"{near.what} in set '{e['set']}'", **near.choices)
            capabilities.OperationsSetToLayers(e["set"], members, mapping)
    return tpc
