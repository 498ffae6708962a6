"""Files of Keras 2 with layers of the package mct_quantizers, read as Keras 3 models with layers of ours."""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from chipfit.errors import CaptureError
from chipfit.frameworks.keras.inferable import CLASSES
from chipfit.frameworks.keras.layers import KerasActivationQuantizationHolder, KerasQuantizationWrapper
from chipfit.frameworks.keras.loading import check_registered, without_settings_of_keras_2
from chipfit.frameworks.keras.mctq import PLACE, VARIABLES, snake_case

_OURS = {c.__name__: c for c in (KerasActivationQuantizationHolder, KerasQuantizationWrapper)} | CLASSES
#: settings of the package's objects that ours do not have
_IDLE = frozenset(("mctq_version", "eps"))


def is_mctq(config: Any) -> bool:
    """Return whether a model's configuration has objects of the package."""
    if isinstance(config, Mapping):
        return str(config.get("module", "")).startswith(PLACE) or any(map(is_mctq, config.values()))
    return isinstance(config, list) and any(map(is_mctq, config))


def load(path: str | Path, config: Mapping[str, Any], custom_objects: Mapping[str, Any]) -> Any:
    """Return the model of a `.keras` file.

    Args:
        config: the model's configuration, from the file.
        custom_objects: classes of the user by name.

    Raises:
        CaptureError: An object or a weight of the file is not known.
    """
    settings = _ours(without_settings_of_keras_2(dict(config)))
    for ends in ("input_layers", "output_layers"):  # Keras 2 takes a list of one as its only entry
        if len(settings["config"][ends]) == 1:
            settings["config"][ends] = settings["config"][ends][0]
    with keras.saving.custom_object_scope(dict(custom_objects)):
        check_registered(settings)
        model = keras.Model.from_config(settings["config"])
    with zipfile.ZipFile(path) as archive, h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as store:
        counts = Counter[str]()
        for layer in config["config"]["layers"]:
            name = snake_case(layer["class_name"])
            place = f"layers/{name}" + (f"_{counts[name]}" if counts[name] else "")
            counts[name] += 1
            _assign(model.get_layer(layer["config"]["name"]), store, place)
    return model


def _ours(config: Any) -> Any:
    """Return a configuration with our classes in place of those of the package.

    Raises:
        CaptureError: There is no such class here.
    """
    if isinstance(config, list):
        return [_ours(c) for c in config]
    if not isinstance(config, dict):
        return config
    out = {k: _ours(c) for k, c in config.items() if k not in _IDLE}
    if not str(out.get("module", "")).startswith(PLACE):
        return out
    name = out["class_name"]
    if name not in _OURS:
        raise CaptureError(f"'{name}' of mct_quantizers is not known", allowed=", ".join(_OURS))
    settings = out["config"]
    if "weights_quantizer" in settings:
        names = {theirs: own for (kind, own), theirs in VARIABLES.items() if kind == settings["layer"]["class_name"]}
        found = settings.pop("weights_quantizer")
        settings["weights_quantizers"] = {names.get(n, n): quantizer for n, quantizer in found.items()}
    return out | {"module": _OURS[name].__module__, "registered_name": f"chipfit>{name}"}


def _assign(layer: Any, store: Any, place: str) -> None:
    """Assign the variables of a layer from its group in the file.

    Raises:
        CaptureError: They are others.
    """
    if isinstance(layer, KerasActivationQuantizationHolder):
        return
    if isinstance(layer, KerasQuantizationWrapper):
        inner = [v for v in layer.layer.weights if v.name not in layer.weights_quantizers]
        rounded = [layer.weight_of(n) for n in layer.weights_quantizers]
        pairs = [(inner, f"{place}/layer/vars"), (rounded, f"{place}/vars")]
    else:
        pairs = [(layer.weights, f"{place}/vars")]
    for variables, group in pairs:
        for variable, value in zip(variables, _numbers(store, group, len(variables)), strict=True):
            if tuple(variable.shape) != value.shape:
                what = f"A weight of '{layer.name}' has another shape in the file"
                raise CaptureError(what, got=list(value.shape), allowed=str(list(variable.shape)))
            variable.assign(value)


def _numbers(store: Any, group: str, count: int) -> Iterator[np.ndarray]:
    for k in range(count):
        if f"{group}/{k}" not in store:
            raise CaptureError(f"The file has no weight '{group}/{k}'")
        yield np.asarray(store[f"{group}/{k}"])
