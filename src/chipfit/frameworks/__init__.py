"""Choose the framework of a model, without importing a framework that the model does not need.

A framework is one folder here, with three modules that this one opens: `capture.capture(model, args, kwargs, others)`
reads a model into a Graph. `lower.lower(graph, plan, training)` builds the trainable simulation, and
`lower.DeviceModel(graph, run_flat, floats)` a model that computes `run_flat`. In `train`, `stepper` trains a
classifier, `read_back(model, graph, plan)` returns Graph and Plan with the trained numbers, and `state_arrays(model)`
yields everything that training may change. A simulation has `run_flat(inputs)`, from torch tensors in the order of the
graph's inputs to torch tensors in the order of its outputs. An `opaque` module, where a folder has one, runs operators
that only this framework knows (`engine.opaque`).
"""

import importlib
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chipfit.errors import CaptureError
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.plan.training import Training

#: framework -> top-level packages that its model classes come from. Keras is first: on its torch backend a Keras model
#: is also a torch module.
_PACKAGES: dict[str, tuple[str, ...]] = {"keras": ("keras",), "torch": ("torch",)}


def framework_of(model: Any) -> str:
    """Return the framework of a model, by the packages that its class derives from.

    Raises:
        CaptureError: The model is of Keras 2.
    """
    packages = {c.__module__.partition(".")[0] for c in type(model).__mro__}
    if "tf_keras" in packages:
        got = type(model).__name__
        hint = "save it with model.save('model.h5') and load that file with Keras 3"
        raise CaptureError("This is a model of Keras 2 (tf_keras)", got=got, allowed="Keras 3 or PyTorch", hint=hint)
    return next((name for name, owned in _PACKAGES.items() if packages.intersection(owned)), "torch")


def capture(model: Any, args: Sequence[Any] = (), kwargs: Any = None, others: Sequence[Any] = ()) -> Graph:
    """Read a model of any framework into a Graph; see `capture` in the framework's folder.

    Args:
        args, kwargs: one batch of inputs, torch tensors, as the model is called with.
        others: (args, kwargs) of further batches; sizes in which they differ stay open.

    Raises:
        CaptureError: The model cannot be read; the message names the layer or line and what to change.
    """
    from chipfit.engine.process import TRACING

    with TRACING:
        return _module(framework_of(model), "capture").capture(model, args, kwargs, others)


def lower(graph: Graph, plan: Plan, training: Training | None = None) -> Any:
    """Build the trainable simulation, as a model of the framework that the graph came from.

    Args:
        training: what trains the quantizers; None leaves their scales where they are.

    Raises:
        UnsupportedError: An algorithm cannot train a tensor.
    """
    from chipfit.engine.process import TRACING

    with TRACING:
        return _module(graph.framework, "lower").lower(graph, plan, training)


def device(graph: Graph, run_flat: Callable[[Sequence[Any]], list[Any]], floats: Sequence[str]) -> Any:
    """Build a model of the framework that the graph came from, which computes `run_flat`.

    Args:
        run_flat: function from torch tensors in the order of the graph's inputs to those of its outputs.
        floats: operators that the runtime computes in float, so that their last bit is uncertain.
    """
    return _module(graph.framework, "lower").DeviceModel(graph, run_flat, floats)


def read_back(model: Any, graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """Return graph and plan with the numbers that a trained simulation holds now.

    Raises:
        PlanError: `model` is not what `lower(graph, plan)` made, or has a scale that is not positive.
    """
    return _module(graph.framework, "train").read_back(model, graph, plan)


def checksum(model: Any, framework: str) -> int:
    """Return the CRC-32 of all weights and scales that a simulation holds now."""
    total = 0
    for array in _module(framework, "train").state_arrays(model):
        total = zlib.crc32(array.reshape(-1).view("uint8"), total)
    return total


def load_torch(path: str) -> Any:
    """Load the program of a `.pt2` file; see `frameworks.torch.archive.load`.

    Raises:
        CaptureError: The file cannot be loaded.
    """
    return _module("torch", "archive").load(path)


def load_keras(path: str) -> Any:
    """Load the model of a `.keras` file, on torch unless another backend is chosen: torch is always installed.

    Raises:
        CaptureError: Keras or its backend is not installed, or the file cannot be loaded.
    """
    if not (Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser() / "keras.json").is_file():
        os.environ.setdefault("KERAS_BACKEND", "torch")
    return _module("keras", "safe_loading").load(path)


def trainer(framework: str) -> Any:
    """Return the module whose `stepper(model, rate, steps, probabilities)` trains a simulation."""
    return _module(framework, "train")


def keras_part(name: str) -> Any:
    """Return a module of the Keras folder, for users of its classes.

    Raises:
        CaptureError: Keras or its backend is not installed.
    """
    return _module("keras", name)


def _module(framework: str, name: str) -> Any:
    if framework not in _PACKAGES:
        raise CaptureError(f"There is no framework '{framework}'", allowed=", ".join(_PACKAGES))
    try:
        return importlib.import_module(f"chipfit.frameworks.{framework}.{name}")
    except (ImportError, ValueError) as e:  # Keras raises a ValueError for a backend that it does not know
        if framework == "torch":
            raise
        backend = "set KERAS_BACKEND to a backend that is installed: torch, jax or tensorflow"
        what, hint = f"{framework.capitalize()} cannot be imported: {e}", f"pip install 'chipfit[keras]', and {backend}"
        raise CaptureError(what, hint=hint) from e
