"""Create Keras objects from files and configurations; nothing that a file holds is executed.

Keras finds a class by the module and name in a file. Each version of Keras refuses most names that would run code; the
list here does not depend on the version: Keras's own building blocks, and what the running program has registered.
"""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import keras
import torch

from chipfit.errors import CaptureError, GraphError, first_line, import_optional, raise_bug, short_message
from chipfit.files import ARCHIVE_ERRORS, existing_file, open_zip
from chipfit.frameworks.keras.backend import to_backend, to_torch
from chipfit.frameworks.reading import Unreadable

#: modules of Keras whose classes may be created from configurations, with their submodules
_CLASSES = (
    "keras.constraints keras.dtype_policies keras.initializers keras.layers keras.losses keras.metrics keras.models "
    "keras.ops keras.optimizers keras.quantizers keras.random keras.regularizers keras.src"
).split()
#: modules whose functions a configuration may name
_FUNCTIONS = "keras.activations", "keras.ops", "keras.src.activations", "keras.src.ops"
#: where the classes of configurations without a module are
_KERAS_2_HOMES = "keras keras.layers keras.initializers keras.regularizers keras.constraints keras.src.models".split()
_KINDS = (
    *(keras.Layer, keras.Operation, keras.Initializer, keras.Regularizer, keras.constraints.Constraint),
    keras.losses.Loss,
    *(keras.metrics.Metric, keras.optimizers.Optimizer, keras.dtype_policies.DTypePolicy, keras.random.SeedGenerator),
)
#: classes that hold code
_CODE = frozenset("Lambda TorchModuleWrapper TFSMLayer JaxLayer FlaxLayer".split())
#: settings of layers of Keras 2 that Keras 3 lacks, and the value with which they do nothing
_ANY = object()
_OF_KERAS_2 = {
    "groups": 1,
    "time_major": False,
    "softmax_robust_masking": False,
    **dict.fromkeys(("kernel_initializer", "kernel_regularizer", "kernel_constraint"), _ANY),
    **dict.fromkeys(("query_shape", "key_shape", "value_shape"), _ANY),
}
_WEIGHTS_ALONE = (
    "build the model in Python, model.load_weights(file), model.save('model.keras'); or give module:factory, where the "
    "factory does so"
)
#: tags of Keras for values in a configuration
_VALUES = frozenset("__keras_tensor__ __tensor__ __numpy__ __bytes__ __ellipsis__ __slice__".split())


def check_registered(config: Any) -> None:
    """Check that a configuration and all configurations in it name only classes of Keras or registered ones.

    Raises:
        GraphError: It names code, a file, or a class that is neither of Keras nor registered in this process.
        RecursionError: It is nested too deeply.
    """
    if isinstance(config, list):
        for c in config:
            check_registered(c)
    if isinstance(config, dict):
        if "class_name" in config:
            _check_entry(config)
        for c in config.values():
            check_registered(c)


def _check_entry(config: dict[str, Any]) -> None:
    kind, module, inner = config["class_name"], config.get("module"), config.get("config")
    if isinstance(kind, str) and kind in _VALUES:
        return
    name = inner if kind == "function" else kind
    registered = name if kind == "function" else config.get("registered_name") or name
    if isinstance(registered, str) and keras.saving.get_registered_object(registered) is not None:
        return  # registered by the user's program or by chipfit
    if not isinstance(name, str) or name in _CODE or name.startswith("__"):
        raise GraphError(f"'{name}' contains code", got=f"module {module}", allowed="layers of Keras without code")
    if isinstance(inner, dict) and isinstance(inner.get("vocabulary"), str):
        raise GraphError(f"'{name}' reads a file", got=inner["vocabulary"], allowed="a vocabulary inside the file")
    if kind == "function":
        allowed = module == "builtins" or _is_below(module, _FUNCTIONS)
        places = ["keras.activations", "keras.ops"] if module == "builtins" else [module]
        allowed = allowed and any(callable(_loaded_attribute(place, name)) for place in places)
    else:
        given = [module] if module == "keras" or _is_below(module, _CLASSES) else []
        places = _KERAS_2_HOMES if module is None else given
        cls = next((c for p in places if (c := _loaded_attribute(p, name)) is not None), None)
        allowed = isinstance(cls, type) and issubclass(cls, _KINDS)
    if not allowed:
        what = f"'{name}' is neither a building block of Keras nor registered here"
        hint = "register its class with keras.saving.register_keras_serializable, and import it before loading"
        raise GraphError(what, got=f"module {module}", allowed=", ".join(_CLASSES), hint=hint)


def _is_below(module: Any, parents: Any) -> bool:
    return isinstance(module, str) and any(module == p or module.startswith(f"{p}.") for p in parents)


def _loaded_attribute(module: Any, name: str) -> Any:
    """Return an attribute of a module that is loaded already; nothing is imported for a name."""
    return getattr(sys.modules.get(module), name, None)


def without_settings_of_keras_2(config: Any) -> Any:
    """Return a configuration without the settings of Keras 2 that do nothing and that Keras 3 refuses."""
    if isinstance(config, list):
        return [without_settings_of_keras_2(c) for c in config]
    if not isinstance(config, dict):
        return config
    out = {k: without_settings_of_keras_2(c) for k, c in config.items()}
    cls = getattr(keras.layers, str(out.get("class_name")), None)
    if isinstance(cls, type) and isinstance(out.get("config"), dict):
        known = inspect.signature(cls).parameters
        idle = {
            k for k, v in out["config"].items() if k not in known and k in _OF_KERAS_2 and _OF_KERAS_2[k] in (v, _ANY)
        }
        out["config"] = {k: v for k, v in out["config"].items() if k not in idle}
        inner = out["config"].get("layer")  # of a wrapper, whose class Keras 3 finds by its module only
        if isinstance(inner, dict) and hasattr(keras.layers, str(inner.get("class_name"))):
            out["config"]["layer"] = {"module": "keras.layers", "registered_name": None, **inner}
    return out


def load(path: str | Path) -> Any:
    """Load the model of a `.keras` file, or of an `.h5` file, which Keras 2 wrote too.

    Raises:
        CaptureError: The file does not exist, is damaged, or holds Python code or classes that are not registered here.
    """
    file = existing_file(path, CaptureError, "The model file")
    archived = file.suffix == ".keras"
    config = _checked(path, _read_archive if archived else _read_hdf5)
    try:
        if archived:
            return keras.saving.load_model(path, compile=False, safe_mode=True)
        kind = keras.Sequential if config["class_name"] == "Sequential" else keras.Model
        model = kind.from_config(without_settings_of_keras_2(config["config"]))
        model.load_weights(path)
        return model
    except Unreadable as e:
        keras_2 = importlib.import_module("chipfit.frameworks.keras.keras_2")
        what, got = "A function of TensorFlow in the file has no reader", keras_2.failed_layer(e)
        raise CaptureError(what, where=str(path), got=got, hint=keras_2.HINT) from e
    except Exception as e:  # Keras raises many types, and so do the classes that are registered
        raise_bug(e)
        raise CaptureError(
            "The file is not a Keras model that can be loaded here",
            where=str(path),
            got=first_line(e),
            hint="save it again with model.save('model.keras'); for custom classes give module:factory instead; "
            "lambdas are never executed",
        ) from e


def load_quantized(filepath: str | Path, custom_objects: Mapping[str, Any] | None = None, compile: bool = True) -> Any:
    """Load a saved model with quantizers, as MCT's `keras_load_quantized_model` does.

    Args:
        filepath: of the saved model: `.keras` or `.h5` of chipfit's models, or `.keras` exported with format="fake" or
            "mctq"; `.keras` files may have any suffix.
        custom_objects: classes of the user by name.
        compile: compile the model as it was.

    Raises:
        OSError, ValueError: Keras cannot read the file.
        CaptureError: a file of mct_quantizers has objects that are not known.
    """
    importlib.import_module("chipfit.frameworks.keras.layers")  # registers our layers
    if zipfile.is_zipfile(filepath):
        config, mctq = _read_archive(filepath), importlib.import_module("chipfit.frameworks.keras.mctq_reading")
        if mctq.is_mctq(config):
            return mctq.load(filepath, config, custom_objects or {})
        if Path(filepath).suffix != ".keras":  # by which Keras tells its formats apart
            with tempfile.TemporaryDirectory() as folder:
                return load_quantized(shutil.copy(filepath, Path(folder) / "model.keras"), custom_objects, compile)
    registered = keras.saving.get_custom_objects().items()
    ours = {name.partition(">")[2]: c for name, c in registered if name.startswith("chipfit>")}
    known = {**ours, **(custom_objects or {})}  # .h5 files name classes without their packages
    return keras.models.load_model(filepath, custom_objects=known, compile=compile)


def _read_archive(path: str | Path) -> Any:
    with open_zip(path) as archive:
        return json.loads(archive.read("config.json"))


def _read_hdf5(path: str | Path) -> Any:
    """Read the configuration of an `.h5` file.

    Raises:
        CaptureError: It has weights alone.
    """
    h5py = import_optional("h5py", "An .h5 file", CaptureError, extra="keras")
    with h5py.File(path, "r") as file:
        config = file.attrs.get("model_config")
    if config is None:
        raise CaptureError("The file holds weights without a model", where=str(path), hint=_WEIGHTS_ALONE)
    read = importlib.import_module("chipfit.frameworks.keras.keras_2")
    try:
        return read.in_keras_3(json.loads(config), str(path))
    except (LookupError, TypeError, AttributeError) as e:
        raise ValueError(f"its layers are malformed ({short_message(e)})") from e


def _checked(path: str | Path, read: Callable[[str | Path], Any]) -> dict[str, Any]:
    """Return the configuration of a file; it must name only classes of Keras or registered ones."""
    try:
        config = read(path)
        if not isinstance(config, dict):
            raise ValueError("its configuration is not a table")
        check_registered({k: v for k, v in config.items() if k != "compile_config"})  # compile_config is not loaded
    except (*ARCHIVE_ERRORS, ValueError, KeyError, RecursionError) as e:
        what, got = "The file is not a Keras model that can be loaded here", f"{type(e).__name__}: {str(e)[:300]}"
        raise CaptureError(what, where=str(path), got=got, hint="save it with model.save('model.keras')") from e
    except GraphError as e:
        hint = "save it again without such layers; for custom classes give module:factory; lambdas are never executed"
        what = f"The file is not data: {e.what}"
        raise CaptureError(what, where=str(path), got=e.got, allowed=e.allowed, hint=hint) from e
    return config


PREFIX = "keras:"


class OpaqueTarget(str):
    """The target of an opaque node: the text is the operation's Keras serialization; an attribute is the operation."""

    operation: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> OpaqueTarget:
        return self


def target_of(operation: Any) -> OpaqueTarget:
    """Return the target for a layer, an operation or a function."""
    try:
        text = json.dumps(keras.saving.serialize_keras_object(operation), sort_keys=True)
    except Exception:  # Keras raises many types for classes without a configuration
        text = f"a {type(operation).__name__} that has no get_config"
    target = OpaqueTarget(PREFIX + text)
    target.operation = operation
    return target


def function_of(target: str) -> Callable[..., Any]:
    """Return the function `f(variables, args, kwargs)` on torch tensors that runs an opaque node.

    Gradients flow through it on Keras's torch backend only.

    Raises:
        GraphError: The result was saved, and Keras cannot create its operation again.
    """
    operation = target.operation if isinstance(target, OpaqueTarget) else load_operation(target)

    def call(variables: Sequence[torch.Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        variables, args, kwargs = keras.tree.map_structure(to_backend, (list(variables), list(args), kwargs))
        if isinstance(operation, keras.Layer):
            own = [*operation.trainable_variables, *operation.non_trainable_variables]
            with keras.StatelessScope(state_mapping=list(zip(own, variables, strict=True))):
                out = operation(*args, **{**kwargs, "training": False})  # for the layers inside it, too
        else:
            out = operation(*args, **kwargs)
        flat = tuple(to_torch(x).cpu() for x in keras.tree.flatten(out))  # where the graph is, wherever Keras is
        return flat[0] if len(flat) == 1 else flat

    return call


@lru_cache(maxsize=256)
def load_operation(target: str) -> Any:
    """Create the operation of a saved target; it may name only classes of Keras or registered ones, and no code.

    Raises:
        GraphError: The target names something else, or Keras cannot create the operation.
    """
    text = target.removeprefix(PREFIX)
    try:
        config = json.loads(text)
        check_registered(config)
        return keras.saving.deserialize_keras_object(config, safe_mode=True)
    except GraphError as e:
        message = f"A Keras layer of this saved result is refused: {e.what}"
        raise GraphError(message, got=e.got, allowed=e.allowed, hint=e.hint) from e
    except Exception as e:  # Keras raises many types, and so do the classes that are registered
        raise_bug(e)
        hint = "register its class with keras.saving.register_keras_serializable, and import it before loading"
        raise GraphError("A Keras layer of this saved result cannot be made again", got=text[:200], hint=hint) from e


def new_operation(target: str, name: str) -> Any:
    """Create an operation like that of an opaque node under a new name; without configuration, return the user's own.

    Raises:
        GraphError: The target names something else, or Keras cannot create the operation.
    """
    operation = target.operation if isinstance(target, OpaqueTarget) else load_operation(target)
    if not isinstance(operation, keras.Operation):
        return keras.layers.Activation(operation, name=name)
    try:
        return type(operation).from_config({**operation.get_config(), "name": name})
    except Exception:  # custom layers without a configuration raise what they like
        return operation
