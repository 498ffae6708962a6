"""Choose the framework of a model, without importing a framework that the model does not need.

A framework is one folder here, or one file outside that registers an adapter; see `frameworks.adapter`.
"""

import importlib.util
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chipfit.errors import CaptureError
from chipfit.frameworks.adapter import Facts, Framework, all_facts, included
from chipfit.frameworks.model_files import check_downloaded, refused_file
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.plan.training import Training
from chipfit.registry import lookup


def framework_of(model: Any) -> str:
    """Return the framework of a model, by the packages that its class derives from; "torch" if none fits.

    Raises:
        CaptureError: The model is of Keras 2.
    """
    modules = [f"{c.__module__}." for c in type(model).__mro__]
    if any(m.startswith("tf_keras.") for m in modules):
        got = type(model).__name__
        hint = "save it with model.save('model.h5') and load that file with Keras 3"
        raise CaptureError("This is a model of Keras 2 (tf_keras)", got=got, allowed="Keras 3 or PyTorch", hint=hint)
    found = all_facts().items()
    return next((name for name, f in found if any(m.startswith(f"{p}.") for p in f.packages for m in modules)), "torch")


def facts_of(framework: str) -> Facts:
    """Return the facts of a framework, such as its suffixes, without importing it.

    Raises:
        CaptureError: There is no such framework.
    """
    known = all_facts()
    if framework not in known:
        raise CaptureError(f"There is no framework '{framework}'", allowed=", ".join(known))
    return known[framework]


def adapter_of(framework: str) -> Framework:
    """Return the adapter of a framework, which imports it.

    Raises:
        CaptureError: There is no such framework, or it is not installed.
    """
    facts_of(framework)
    part(framework, "adapter")
    found: Framework = lookup("framework", framework)()
    return found


def part(framework: str, name: str) -> Any:
    """Import a module from the folder of a framework; None if the framework has no folder here.

    Raises:
        CaptureError: The framework or its backend is not installed.
    """
    if framework not in included():
        return None
    try:
        return importlib.import_module(f"chipfit.frameworks.{framework}.{name}")
    except (ImportError, ValueError) as e:  # Keras raises a ValueError for a backend that it does not know
        facts = included()[framework]
        if not facts.install:  # chipfit requires it
            raise
        raise CaptureError(f"{facts.title} cannot be imported: {e}", hint=facts.install) from e


def is_model(thing: Any) -> bool:
    """Return whether an object is a model of any framework."""
    return not isinstance(thing, type) and adapter_of(framework_of(thing)).is_model(thing)


def check(model: Any) -> None:
    """Check that a model can be captured, before any data are read; see `Framework.check`."""
    adapter_of(framework_of(model)).check(model)


def capture(model: Any, args: Any = (), kwargs: Any = None, others: Sequence[Any] = ()) -> Graph:
    """Read a model of any framework into a Graph; see `Framework.capture`.

    Args:
        args: arguments of a call, as a tuple or list; a single one may stand by itself.

    Examples:
        >>> import chipfit, torch
        >>> graph = chipfit.capture(torch.nn.Linear(4, 2).eval(), (torch.rand(1, 4),))
        >>> [node.op for node in graph.nodes]
        ['Linear']
    """
    from chipfit.engine.process import TRACING

    framework = adapter_of(framework_of(model))
    args = args if isinstance(args, (tuple, list)) else (args,)
    with TRACING:
        return framework.capture(framework.opened(model), args, kwargs, others)


def lower(graph: Graph, plan: Plan, training: Training | None = None) -> Any:
    """Build the trainable simulation, as a model of the framework that the graph came from; see `Framework.lower`."""
    from chipfit.engine.process import TRACING

    with TRACING:
        return adapter_of(graph.framework).lower(graph, plan, training)


def rebuilt(model: Any, graph: Graph, args: Sequence[Any], kwargs: Any) -> Any:
    """Return a float model with the weights of a graph, whose sizes may differ; see `Framework.rebuilt`."""
    from chipfit.engine.process import TRACING

    with TRACING:
        return adapter_of(graph.framework).rebuilt(model, graph, args, kwargs)


def checksum(model: Any, framework: str) -> int:
    """Return the CRC-32 of all weights and scales that a simulation holds now."""
    total = 0
    for array in adapter_of(framework).state_arrays(model):
        total = zlib.crc32(array.reshape(-1).view("uint8").data, total)
    return total


def framework_of_file(path: str) -> str:
    """Return the framework whose files have the suffix of this path; "" if there is none."""
    known = {name: tuple(filter(None, (f.suffix, *f.older_suffixes))) for name, f in all_facts().items()}
    return next((name for name, suffixes in known.items() if path.endswith(suffixes)), "")


def load_model(model: Any, *, requantize: bool = False) -> Any:
    """Load a model from a path, from `timm:NAME`, from a folder of transformers or from the bytes of a `.onnx` file.

    A model that is an object of its framework already is returned.

    Args:
        requantize: of a file that is quantized already, read the integers as the floats that they represent.

    Raises:
        CaptureError: There is no such file, or it holds no model that can be loaded.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Linear(4, 2)
        >>> chipfit.load_model(net) is net  # a path is read: chipfit.load_model("net.onnx")
        True
    """
    if isinstance(model, str | os.PathLike):
        found = _opened(os.fspath(model))
    elif isinstance(model, bytes):
        found = adapter_of(next(name for name, f in all_facts().items() if f.in_bytes)).opened(model)
    else:
        found = model if isinstance(model, type) else adapter_of(framework_of(model)).opened(model)
    if requantize and not hasattr(found, "requantize"):
        allowed = "a .tflite or .onnx file"
        raise CaptureError("Only files whose integers are read can be quantized again", got=str(model), allowed=allowed)
    if requantize:
        found.requantize = True
    return found


def _opened(text: str) -> Any:
    """Load the model that a path or a name stands for."""
    if framework_of_file(text):
        return load(text)
    if os.path.isfile(os.path.join(text, "saved_model.pb")):
        return part("tflite", "saved_model").load_saved_model(text)
    named = importlib.import_module("chipfit.frameworks.torch.named")
    if named.is_named(text):
        return named.load_named(text)
    files = [f for f in all_facts().values() if f.suffix]
    allowed = f"{', '.join(f'a {f.suffix} file' for f in files)}, timm:NAME, a transformers folder, or module:factory"
    raise refused_file(text, allowed, "; ".join(f"{f.saving} writes a {f.suffix} file" for f in files))


def load(path: str, framework: str = "") -> Any:
    """Load a model from a file, by default of the framework that its suffix names.

    Raises:
        CaptureError: The file cannot be loaded, no framework has such files, or the framework is not installed.
    """
    framework = framework or framework_of_file(path)
    if not framework:
        allowed = ", ".join(f.suffix for f in all_facts().values() if f.suffix)
        raise CaptureError(f"No framework reads files like '{path}'", allowed=allowed)
    check_downloaded(Path(path))
    choose_backend(framework)
    return adapter_of(framework).load(path)


def load_torch(path: str) -> Any:
    """Load the program of a `.pt2` file; see `load`."""
    return load(path, "torch")


def load_keras(path: str) -> Any:
    """Load the model of a `.keras` file, on torch unless another backend is chosen; see `load`."""
    return load(path, "keras")


def choose_backend(framework: str) -> None:
    """Set the environment variables that choose a framework's backend, unless the user chose; see `Facts`."""
    facts = facts_of(framework)
    if not any(_names_backend(Path(os.path.expandvars(file)).expanduser()) for file in facts.configured):
        for name, value in facts.environment.items():
            os.environ.setdefault(name, value)


def _names_backend(file: Path) -> bool:
    """Return whether a configuration in JSON names an installed backend: the one that Keras writes names TensorFlow."""
    try:
        return importlib.util.find_spec(json.loads(file.read_text(encoding="utf-8"))["backend"]) is not None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        return False
