"""prepare_by_platform and convert_deploy: MQBench's second generation, with backends as data in backends.yaml."""

from __future__ import annotations

import copy
import enum
import fnmatch
import inspect
import logging
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import fx, nn

from chipfit.calibration.data import as_call
from chipfit.errors import ConfigError, PlanError, UnknownNameError, UnsupportedError, check_known
from chipfit.files import package_data
from chipfit.graph.placement import device_of
from chipfit.mqbench.deployment import deployed
from chipfit.mqbench.folded_batch_norm import FoldedBatchNorm
from chipfit.mqbench.observers import observer_of
from chipfit.mqbench.prepare import PreparedModule, insert_quantizers, trace
from chipfit.mqbench.quantizers import QuantizeBase, disable_all, enable_quantization
from chipfit.mqbench.reconstruction import call_on, values_of
from chipfit.mqbench.settings import quantizer_factory
from chipfit.platform.load import load
from chipfit.quantizers.grids import all_codes
from chipfit.registry import registered
from chipfit.result import Result

__all__ = ["BackendType", "convert_deploy", "convert_merge_bn", "prepare_by_platform", "prepare_qat_fx_by_platform"]
__all__ += ["profiling"]


@lru_cache(maxsize=1)
def tables() -> dict[str, Any]:
    """Return backends.yaml."""
    return package_data("chipfit.mqbench", "backends.yaml")  # type: ignore[no-any-return]  # a table


class BackendType(enum.Enum):
    """The backends of MQBench; each is a setting over a platform, see docs/from-mqbench.md."""

    Academic = "Academic"
    Tensorrt = "Tensorrt"
    SNPE = "SNPE"
    PPLW8A16 = "PPLW8A16"
    NNIE = "NNIE"
    Vitis = "Vitis"
    ONNX_QNN = "ONNX_QNN"
    PPLCUDA = "PPLCUDA"
    OPENVINO = "OPENVINO"
    Tengine_u8 = "Tengine_u8"
    Tensorrt_NLP = "Tensorrt_NLP"
    Academic_NLP = "Academic_NLP"
    STPU = "STPU"
    QDQ = "QDQ"

    @property
    def setting(self) -> dict[str, Any]:
        """The backend's row of backends.yaml."""
        return dict(tables()["backends"][self.value])

    @property
    def proven(self) -> bool:
        """True if a runtime of the backend's platform is known here, so that `verify` compares integers with it."""
        return bool(load(self.setting["platform"]).runtimes)


def _checked(given: Any, allowed: Collection[str], where: str) -> dict[str, Any]:
    """Return a dictionary of the user without unknown keys; `where` names its place."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"'{where}' must be a dictionary", got=repr(given)[:120], allowed=", ".join(sorted(allowed)))
    for key in given:
        if key not in allowed:
            raise UnknownNameError(f"key of {where}", str(key), allowed)
    return dict(given)


_CONFIG = "extra_qconfig_dict extra_quantizer_dict extra_fuse_dict preserve_attr leaf_module concrete_args".split()
_QUANTIZER = "additional_function_type additional_module_type additional_node_name".split()
_QUANTIZER += "exclude_function_type exclude_module_name exclude_node_name".split()
_OF_ROLE = ("observer", "fakequantize", "fakeq_params", "observer_extra_args", "qscheme")
_QCONFIG = tuple(f"{role}_{what}" for role in "wa" for what in _OF_ROLE)
_SCHEME = ("bit", "symmetry", "per_channel", "pot_scale", "symmetric_range", "quant_min", "quant_max")
_FLAGS = dict.fromkeys(("symmetry", "per_channel", "pot_scale", "symmetric_range"), bool)


@dataclass(frozen=True)
class _Role:
    """The quantizers of weights or of activations."""

    role: str
    make: Callable[..., QuantizeBase]
    scheme: Mapping[str, Any]
    unsigned_where_possible: bool = False

    @classmethod
    def of(cls, backend: Mapping[str, Any], given: Mapping[str, Any], role: str, where: str) -> _Role:
        """Return a role from a backend's defaults and the user's `extra_qconfig_dict`."""
        k, index = role[0], 0 if role == "weight" else 1
        scheme = given.get(f"{k}_qscheme", backend.get(k))
        if scheme is None:
            hint = "for example {'bit': 4, 'symmetry': True, 'per_channel': False, 'pot_scale': False}"
            raise ConfigError(f"An academic backend needs '{k}_qscheme' in {where}", hint=hint)
        if not isinstance(scheme, Mapping):
            raise ConfigError(f"'{k}_qscheme' of {where} must be a dictionary", got=repr(scheme)[:120])
        more = {**scheme, **given.get(f"{k}_observer_extra_args", {})}
        own = {name: more.pop(name) for name in _SCHEME if name in more}
        for name, value in own.items():
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if not (isinstance(value, bool) if name in _FLAGS else is_int):
                allowed = "True or False" if name in _FLAGS else "an integer"
                raise ConfigError(f"'{name}' in '{k}_qscheme' of {where} is invalid", got=repr(value), allowed=allowed)
        defaults = [backend.get(name, [None, None])[index] for name in ("quantizer", "observer")]
        quantizer, observer = given.get(f"{k}_fakequantize", defaults[0]), given.get(f"{k}_observer", defaults[1])
        if observer is None or quantizer is None:
            missing = f"{k}_fakequantize" if quantizer is None else f"{k}_observer"
            raise ConfigError(
                f"An academic backend needs '{missing}' in {where}", allowed=", ".join(tables()["observers"])
            )
        options = given.get(f"{k}_fakeq_params", {})
        make = quantizer_factory(role, _method(quantizer, options, where), _observer(observer, where))
        unsigned = bool(backend.get("unsigned_where_possible")) and role == "activation"
        return cls(role, partial(make, **more), own, unsigned)

    def quantizer(self, bits: int | None, axis: int) -> QuantizeBase:
        """Return a quantizer of so many bits, or of the scheme's."""
        s = {"bit": 8, **dict.fromkeys(_FLAGS, False), "symmetry": True, **self.scheme}
        bits = bits or s["bit"]
        low, high = all_codes(bits, s["symmetry"])
        low, high = s.get("quant_min", low + bool(s["symmetry"] and s["symmetric_range"])), s.get("quant_max", high)
        per_channel = s["per_channel"]
        if per_channel and self.role == "activation":
            hint = "'per_channel': False; MQBench's scales would be those of single samples"
            raise ConfigError("Activations have one scale: per_channel concerns weights", where="a_qscheme", hint=hint)
        kind = f"per_{'channel' if per_channel else 'tensor'}_{'symmetric' if s['symmetry'] else 'affine'}"
        return self.make(
            quant_min=low,
            quant_max=high,
            qscheme=getattr(torch, kind),
            ch_axis=axis if per_channel else -1,
            ada_sign=self.unsigned_where_possible and s["symmetry"],
            pot_scale=s["pot_scale"],
            bitwidth=bits,
        )


def _method(name: Any, options: Mapping[str, Any], where: str) -> Any:
    """Return a quantizer of chipfit for a class name of MQBench."""
    known = tables()["quantizers"]
    if name not in known:
        if isinstance(name, str) and name not in (own := {**registered("training"), **registered("quantizer")}):
            raise UnknownNameError(f"quantizer in {where}", name, [*known, *own])
        return name
    entry = known[name]
    for key in options:
        check_known(f"option of {name} in {where}", key, entry.get("options", {}))
    chosen = {**entry.get("with", {}), **{entry["options"][key]: value for key, value in options.items()}}
    text = ", ".join(f"{key}={value!r}" for key, value in chosen.items())
    return f"{entry['method']}({text})" if text else entry["method"]


def _observer(name: Any, where: str) -> Any:
    """Return an observer of chipfit for a class name of MQBench."""
    known = tables()["observers"]
    if isinstance(name, str) and name not in known and name not in registered("observer"):
        raise UnknownNameError(f"observer in {where}", name, [*known, *registered("observer")])
    return observer_of(known.get(name, name) if isinstance(name, str) else name)


@dataclass(frozen=True, kw_only=True)
class BackendSetting:
    """The quantizers of a backend and their placement, with the user's changes."""

    graph: int
    outputs: bool
    ends: int | None  #: bits of the first and the last layer with weights
    roles: Mapping[str, _Role]
    layers: Mapping[str, Mapping[str, _Role]] = field(default_factory=dict)  #: pattern -> roles of layers
    choices: Mapping[str, Any] = field(default_factory=dict)  #: `extra_quantizer_dict`

    def quantizer(self, role: str, end: bool, axis: int = 0, layers: Collection[str] = ()) -> QuantizeBase:
        """Return a quantizer of a tensor that is the weight, or an input, of `layers`; the first named one decides."""
        for pattern, roles in self.layers.items():
            if any(fnmatch.fnmatchcase(layer, pattern) or layer.startswith(f"{pattern}.") for layer in layers):
                return roles[role].quantizer(None, axis)
        return self.roles[role].quantizer(self.ends if end else None, axis)

    def quantizes(self, n: fx.Node, module: nn.Module | None) -> bool | None:
        """Return whether a node is quantized: as the user names it, None if not at all."""
        given, name = self.choices, str(n.target)
        words = (n.target, name, getattr(n.target, "__name__", ""))
        if n.name in given.get("additional_node_name", ()):
            return True
        paths = [name] if n.op == "call_module" else []
        excluded = any(p == e or p.startswith(f"{e}.") for p in paths for e in given.get("exclude_module_name", ()))
        of_function = n.op != "call_module" and any(w in given.get("exclude_function_type", ()) for w in words)
        if excluded or of_function or n.name in given.get("exclude_node_name", ()):
            return False
        added = isinstance(module, given.get("additional_module_type", ()))
        added |= n.op != "call_module" and any(w in given.get("additional_function_type", ()) for w in words)
        return True if added else None


def _setting(backend: BackendType, config: Mapping[str, Any]) -> BackendSetting:
    row, place = backend.setting, "extra_qconfig_dict"
    given = _checked(config.get(place, {}), (*_QCONFIG, "layers"), place)
    layers = {}
    for pattern, own in _checked_layers(given.pop("layers", {})).items():
        at = f"{place}['layers']['{pattern}']"
        mine = {**given, **_checked(own, _QCONFIG, at)}
        layers[pattern] = {role: _Role.of(row, mine, role, at) for role in ("weight", "activation")}
    return BackendSetting(
        graph=row["graph"],
        outputs=row.get("outputs", False),
        ends=row.get("ends"),
        roles={role: _Role.of(row, given, role, place) for role in ("weight", "activation")},
        layers=layers,
        choices=_checked_choices(config.get("extra_quantizer_dict", {})),
    )


def _checked_layers(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        allowed = "{'layer1.*': {'w_qscheme': {'bit': 4, ...}}}"
        raise ConfigError("'layers' of extra_qconfig_dict must be a dictionary", got=repr(given)[:120], allowed=allowed)
    return dict(given)


def _checked_choices(given: Any) -> dict[str, tuple[Any, ...]]:
    """Return `extra_quantizer_dict` with a tuple for each key; one name or type may stand alone."""
    place, out = "extra_quantizer_dict", dict[str, tuple[Any, ...]]()
    for key, value in _checked(given, _QUANTIZER, place).items():
        out[key] = tuple(value) if isinstance(value, (list, tuple, set)) else (value,)
        kind = type if key == "additional_module_type" else str if key.endswith("_name") else object
        if not all(isinstance(v, kind) for v in out[key]):
            allowed = "types of modules" if kind is type else "names"
            raise ConfigError(f"'{key}' of {place} is invalid", got=repr(value)[:120], allowed=allowed)
    return out


class _Tracer(fx.Tracer):
    """A tracer that keeps layers of the user's types whole."""

    def __init__(self, leaves: tuple[type, ...]) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, self.leaves) or super().is_leaf_module(m, module_qualified_name)


def prepare_by_platform(
    model: nn.Module,
    deploy_backend: BackendType,
    prepare_custom_config_dict: Mapping[str, Any] | None = None,
    custom_tracer: fx.Tracer | None = None,
    is_qat: bool = True,
    freeze_bn: bool = True,
) -> PreparedModule:
    """Return a copy of a model with the quantizers of a backend, ready for calibration and training.

    Args:
        model: a module in training or evaluation mode; the copy has the same mode.
        deploy_backend: a `BackendType`.
        prepare_custom_config_dict: `extra_qconfig_dict` (w_, a_: observer, fakequantize, fakeq_params, qscheme; and
            `layers`: layer or glob -> the same keys), `extra_quantizer_dict` (exclude_..., additional_...),
            `leaf_module` (types that are not traced), `preserve_attr` (submodule, "" for the model -> attributes) and
            `concrete_args` (arguments that are constant).
        custom_tracer: in place of the tracer that knows `leaf_module`.
        is_qat: True; False is accepted, as the copy is the same. It may also stand before the dictionary, its place in
            MQBench's first releases.
        freeze_bn: statistics of folded batch norms stay (strategy 1); False: they train (strategy 4).

    Raises:
        ConfigError, UnknownNameError: a key or value of the dictionary is wrong; the message says where.
        CaptureError: the model cannot be traced.
    """
    given, tracer = cast(Any, prepare_custom_config_dict), custom_tracer
    if isinstance(given, bool):
        given, tracer = tracer, None if isinstance(is_qat, bool) else is_qat
    config = _checked({} if given is None else given, _CONFIG, "prepare_custom_config_dict")
    if not isinstance(deploy_backend, BackendType):
        got, allowed = repr(deploy_backend)[:120], ", ".join(b.name for b in BackendType)
        raise ConfigError("Backend must be a BackendType", got=got, allowed=allowed, hint="BackendType.Tensorrt")
    if config.get("extra_fuse_dict"):
        hint = "layers are folded with their batch norms as they are; a chip's fusions are rules of its platform file"
        raise UnsupportedError("'extra_fuse_dict' is not used", got=", ".join(config["extra_fuse_dict"]), hint=hint)
    setting = _setting(deploy_backend, config)
    leaves = config.get("leaf_module", ())
    if not isinstance(leaves, (list, tuple)) or not all(isinstance(t, type) for t in leaves):
        raise ConfigError("'leaf_module' must list types of modules", got=repr(leaves)[:120])
    kept = _attributes(model, config.get("preserve_attr", {}))
    traced = trace(model, tracer or _Tracer(tuple(leaves)), config.get("concrete_args"))
    strategy = -1 if not deploy_backend.setting["fold"] else 1 if freeze_bn else 4
    prepared = insert_quantizers(traced, setting, strategy).train(model.training)
    for path, name, value in kept:
        owner = prepared.get_submodule(path)
        if inspect.ismethod(value):
            value = types.MethodType(value.__func__, owner)
        setattr(owner, name, value)
    return prepared


prepare_qat_fx_by_platform = prepare_by_platform  # its name in MQBench's first release


def _attributes(model: nn.Module, given: Any) -> list[tuple[str, str, Any]]:
    """Return (submodule, name, value) of the attributes to preserve."""
    out = []
    for path, names in given.items() if isinstance(given, Mapping) else [(None, given)]:
        if path is None or not isinstance(names, (list, tuple)):
            allowed = "{'': ['config'], 'backbone': ['out_channels']}"
            raise ConfigError(
                "'preserve_attr' must name attributes by submodule", got=repr(given)[:120], allowed=allowed
            )
        if path not in (modules := dict(model.named_modules())):
            raise UnknownNameError("submodule in preserve_attr", path, modules)
        for name in names:
            if not hasattr(modules[path], name):
                raise UnknownNameError(f"attribute in preserve_attr of '{path}'", name, vars(modules[path]))
            out.append((path, name, getattr(modules[path], name)))
    return out


def convert_deploy(
    model: fx.GraphModule,
    backend_type: BackendType,
    input_shape_dict: Mapping[str, Any] | None = None,
    dummy_input: Any = None,
    output_path: str | Path = "./",
    model_name: str = "mqbench_qmodel",
    deploy_to_qlinear: bool = False,
    *,
    data: Any = None,
    **others: Any,
) -> Result:
    """Write what a backend's tools load, and return the result, for verification and other formats.

    Files are NAME.onnx, with quantizers as nodes, if all numbers are integers, and NAME_clip_ranges.json, with a float
    ONNX file, if the chip's compiler reads ranges.

    Args:
        model: the calibrated or trained model that `prepare_by_platform` returned.
        input_shape_dict: argument of the model -> shape; or `dummy_input`, its inputs.
        data: calibration batches for tensors that the chip quantizes and training did not; when omitted, the batch
            that the model has seen in calibration.
        deploy_to_qlinear: accepted: the file has integers in any case.
        others: options of `Result.export`.

    Raises:
        PlanError: the model was not prepared, or has seen no batch.
        UnsupportedError: the platform cannot store what was trained; the message says why.
    """
    if not isinstance(model, PreparedModule):
        raise PlanError("Model must come from prepare_by_platform", got=type(model).__name__)
    if not isinstance(backend_type, BackendType):
        allowed = ", ".join(b.name for b in BackendType)
        raise ConfigError("Backend must be a BackendType", got=repr(backend_type)[:120], allowed=allowed)
    seen = model.meta.get("seen") if data is None else data
    stand_in = None if seen is not None else [_inputs(input_shape_dict, dummy_input)]
    result = deployed(model, stand_in if seen is None else seen, load(backend_type.setting["platform"]), strict=False)
    if stand_in and (guessed := [n for n in result.plan.rewrites if n.endswith("it is calibrated")]):
        more = f"warning: the model has seen no data, and tensors are calibrated on dummy inputs: {'; '.join(guessed)}"
        result = replace(result, plan=replace(result.plan, rewrites=(*result.plan.rewrites, more)))
    for note in (n for n in result.plan.rewrites if n.startswith("warning: ")):
        logging.getLogger("chipfit").warning(note)
    if unused := sorted({"input_names", "output_names", "dynamic_axes"} & others.keys()):
        logging.getLogger("chipfit").warning(f"convert_deploy does not use {', '.join(unused)}: names are the model's")
    options = {key: value for key, value in others.items() if key not in unused}
    stem = Path(output_path) / model_name
    stem.parent.mkdir(parents=True, exist_ok=True)
    if all(t.grid is None or t.grid.kind == "int" for t in result.plan.tensors.values()):
        result.export(stem.with_name(f"{stem.name}.onnx"), **options)
    if result.platform.encodings != "generic":
        result.export(stem.with_name(f"{stem.name}_clip_ranges.json"))
    return result


def _inputs(shapes: Mapping[str, Any] | None, dummy: Any) -> Any:
    """Return a batch: the user's, or numbers from 0 to 1 of the given shapes."""
    if dummy is not None:
        return dummy
    if not isinstance(shapes, Mapping) or not shapes:
        allowed = "input_shape_dict={'x': [1, 3, 224, 224]}, dummy_input=..., or data=[...]"
        raise ConfigError("convert_deploy needs inputs of the model", got=repr(shapes)[:120], allowed=allowed)
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.rand(tuple(shape), generator=generator) for shape in shapes.values())


def convert_merge_bn(model: PreparedModule) -> None:
    """Fold the batch norms that strategy 1 to 4 trains, in place; the model computes the same in evaluation."""
    for m in model.modules():
        if isinstance(m, FoldedBatchNorm) and m.bn is not None:
            m.layer, m.bn = m.fold(), None


def profiling(
    model: PreparedModule, data: Iterable[Any], profiling_type: Literal["standalone", "interaction"] = "interaction"
) -> dict[str, float]:
    """Return the cosine similarity of each quantized tensor's layer to the float network, averaged over batches.

    Args:
        profiling_type: "interaction": of values of the network with all quantizers, by node; "standalone": of the
            network's outputs with one quantizer at a time, by quantizer.
    """
    if profiling_type not in ("standalone", "interaction"):
        raise ConfigError("Type of profiling is unknown", got=repr(profiling_type), allowed="standalone, interaction")
    exact, rounded = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    calls = [call_on(device_of(model), as_call(x, model)) for x in data]
    disable_all(exact)
    enable_quantization(rounded)
    if profiling_type == "interaction":
        names = [n.name for n in model.graph.nodes if n.op == "call_module"]
        return _similarities((values_of(exact, names, c), values_of(rounded, names, c)) for c in calls)
    quantizers = {n: m for n, m in rounded.named_modules() if isinstance(m, QuantizeBase)}
    out: dict[str, float] = {}
    for name, q in quantizers.items():
        disable_all(rounded)
        q.fake_quant_enabled = True
        pairs = ({name: exact(*a, **k)} for a, k in calls), ({name: rounded(*a, **k)} for a, k in calls)
        out |= _similarities(zip(*pairs, strict=True))
    return out


@torch.no_grad()
def _similarities(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, float]:
    """Return the mean cosine similarity by name of pairs of tensors."""
    found: dict[str, list[float]] = {}
    for a, b in pairs:
        for name, x in a.items():
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x, y = (v.cpu().flatten().double() for v in (x, b[name]))  # not every device has float64
                cosine = nn.functional.cosine_similarity(x, y, dim=0)
                found.setdefault(name, []).append(float(cosine))
    return {name: sum(values) / len(values) for name, values in found.items()}
