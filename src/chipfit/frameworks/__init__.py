"""Which framework a model belongs to, found without importing any of them.

A framework is one folder here, with the same four doors: `capture.capture(model, args, kwargs, others)` reads a model
into a Graph, `lower.lower(graph, plan, training)` builds the trainable simulation,
`train.read_back(model, graph, plan)` brings back what training changed in it, of which `train.numbers(model)` gives
everything as arrays, `device.device(graph, run_flat, floats)` makes a model of a function on flat tensors. The
simulation has such a `run_flat(inputs)`: torch tensors in the order of the graph's inputs to outputs. An `opaque`
module, where a folder has one, runs operators that only this framework knows (`engine.opaque`).
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

#: folder -> top packages that the classes of its models come from; Keras first: on its torch backend a model is also a
#: module of torch
_OWNED: dict[str, tuple[str, ...]] = {"keras": ("keras",), "torch": ("torch",)}


def framework_of(model: Any) -> str:
    """The framework of a model, by the packages that its class derives from.

    Raises:
        CaptureError: it is a model of Keras 2.
    """
    packages = {c.__module__.partition(".")[0] for c in type(model).__mro__}
    if "tf_keras" in packages:
        got = type(model).__name__
        hint = "save it with model.save('model.h5') and load that file with Keras 3"
        raise CaptureError("This is a model of Keras 2 (tf_keras)", got=got, allowed="Keras 3 or PyTorch", hint=hint)
    return next((name for name, owned in _OWNED.items() if packages.intersection(owned)), "torch")


def capture(model: Any, args: Sequence[Any] = (), kwargs: Any = None, others: Sequence[Any] = ()) -> Graph:
    """Read a model of any framework into a Graph; see the `capture` of its folder.

    Args:
        args, kwargs: one batch of inputs, torch tensors, as the model is called with.
        others: (args, kwargs) of further batches; sizes in which they differ stay open.

    Raises:
        CaptureError: the model cannot be read; names the layer or line and what to change.
    """
    from chipfit.engine.process import TRACING

    with TRACING:
        return _door(framework_of(model), "capture").capture(model, args, kwargs, others)


def lower(graph: Graph, plan: Plan, training: Training | None = None) -> Any:
    """The trainable simulation, as a model of the framework that the graph came from.

    Args:
        training: what trains the quantizers; None leaves their scales where they are.

    Raises:
        UnsupportedError: an algorithm cannot train a tensor.
    """
    from chipfit.engine.process import TRACING

    with TRACING:
        return _door(graph.framework, "lower").lower(graph, plan, training)


def device(graph: Graph, run_flat: Callable[[Sequence[Any]], list[Any]], floats: Sequence[str]) -> Any:
    """A model of the framework that the graph came from, which computes `run_flat`.

    Args:
        run_flat: torch tensors in the order of the graph's inputs to those of its outputs.
        floats: operators whose last bit is uncertain, to be told.
    """
    return _door(graph.framework, "device").device(graph, run_flat, floats)


def read_back(model: Any, graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """Graph and plan with the numbers that a trained simulation holds now.

    Raises:
        PlanError: `model` is not what `lower(graph, plan)` made, or has a scale that is not positive.
    """
    return _door(graph.framework, "train").read_back(model, graph, plan)


def checksum(model: Any, framework: str) -> int:
    """Of all weights and scales that a simulation holds now."""
    total = 0
    for array in _door(framework, "train").numbers(model):
        total = zlib.crc32(array.reshape(-1).view("uint8"), total)
    return total


def load_torch(path: str) -> Any:
    """The program of a `.pt2` file; see `frameworks.torch.archive.load`.

    Raises:
        CaptureError: the file cannot be loaded.
    """
    return _door("torch", "archive").load(path)


def load_keras(path: str) -> Any:
    """The model of a `.keras` file, on torch unless a backend is asked for: it is installed, and needs no conversion.

    Raises:
        CaptureError: Keras or its backend is not installed, or the file cannot be loaded.
    """
    if not (Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser() / "keras.json").is_file():
        os.environ.setdefault("KERAS_BACKEND", "torch")
    return _door("keras", "files").load(path)


def fit(framework: str) -> Any:
    """How a simulation takes a step of training: `stepper(model, rate, steps, probabilities)`."""
    return _door(framework, "fit")


def keras_part(name: str) -> Any:
    """A module of the Keras folder, for users who ask for its classes.

    Raises:
        CaptureError: Keras or its backend is not installed.
    """
    return _door("keras", name)


def _door(framework: str, name: str) -> Any:
    if framework not in _OWNED:
        raise CaptureError(f"There is no framework '{framework}'", allowed=", ".join(_OWNED))
    try:
        return importlib.import_module(f"chipfit.frameworks.{framework}.{name}")
    except (ImportError, ValueError) as e:  # Keras raises the latter for backends that it does not know
        if framework == "torch":
            raise
        backend = "set KERAS_BACKEND to a backend that is installed: torch, jax or tensorflow"
        what, hint = f"{framework.capitalize()} cannot be imported: {e}", f"pip install 'chipfit[keras]', and {backend}"
        raise CaptureError(what, hint=hint) from e
