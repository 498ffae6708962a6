"""The protocol of a framework: facts that are known without importing it, and methods that read and make its models.

A framework of the package is a folder here: `framework.yaml` holds its facts, `adapter.py` registers its adapter.
Another one registers its adapter when the user imports it, as every addition does:

    @register("framework", "toy")
    class Toy(Framework):
        facts = Facts(title="Toy", packages=("toy",))
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from chipfit.errors import CaptureError, ConfigError, GraphError
from chipfit.files import package_data
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import Plan
from chipfit.plan.training import Training
from chipfit.registry import ENTRIES, lookup

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a framework that are known without importing it."""

    title: str  #: its name in messages
    packages: Sequence[str]  #: packages that the classes of its models come from
    channels_last: bool = False  #: whether its images are [N, H, W, C] instead of [N, C, H, W]
    suffix: str = ""  #: suffix of files with a model, "" if it has none
    older_suffixes: Sequence[str] = ()  #: of files that it reads too
    in_bytes: bool = False  #: whether the bytes of such a file are a model, too
    saving: str = ""  #: call that writes such a file
    install: str = ""  #: how to install it
    placing: str = ""  #: how to choose the device of its models, if the framework itself places them
    #: variables that are set while it is imported for a file, unless they are set, or a file of `configured` names a
    #: backend that is installed
    environment: Mapping[str, str] = field(default_factory=dict)
    configured: Sequence[str] = ()


@cache
def included() -> dict[str, Facts]:
    """Return the facts about the frameworks of the package, by name."""
    folders = sorted(p.parent.name for p in Path(__file__).parent.glob("*/framework.yaml"))
    return {name: Facts(**package_data("chipfit.frameworks", f"{name}/framework.yaml")) for name in folders}


def all_facts() -> dict[str, Facts]:
    """Return the facts about every framework by name; torch is last, as models of others may be torch modules too."""
    registered = {name: e.thing.facts for name, e in ENTRIES["framework"].items()}
    return dict(sorted((included() | registered).items(), key=lambda named: named[0] == "torch"))


class Framework:
    """A framework: it reads models into Graphs, and makes models from Graphs and Plans.

    `is_model`, `capture` and `run` are required. A framework that has no trainable models of its own leaves the rest
    out: its simulation and its device are PyTorch modules. One that makes them defines all of `lower`, `device`,
    `stepper`, `read_back` and `state_arrays`.
    """

    facts: ClassVar[Facts]

    # ---- reading

    def is_model(self, thing: Any) -> bool:
        """Return whether an object is a model of this framework."""
        raise NotImplementedError

    def opened(self, model: Any) -> Any:
        """Return a model in the form in which it is read: by default itself.

        Raises:
            CaptureError: It is malformed.
        """
        return model

    def check(self, model: Any) -> None:
        """Check that a model can be read at all, before data are.

        Raises:
            CaptureError: It cannot, whatever the data.
        """

    def capture(self, model: Any, args: Sequence[Any], kwargs: Any, others: Sequence[Any]) -> Graph:
        """Read a model into a Graph with channels first, whose inputs and outputs keep the layout of the model's.

        Args:
            args, kwargs: one batch of inputs, torch tensors, as the model is called with.
            others: (args, kwargs) of further batches; sizes in which they differ stay open.

        Raises:
            CaptureError: The model cannot be read; the message names the layer or line and what to change.
        """
        raise NotImplementedError

    def load(self, path: str) -> Any:
        """Load the model of a file with the suffix of the facts.

        Raises:
            CaptureError: The file cannot be loaded.
        """
        raise CaptureError(f"Models of {self.facts.title} are not loaded from files", got=path)

    def example(self, model: Any) -> Any:
        """Return an example input of a loaded model, or None if the model does not fix its shape."""
        return None

    def input_names(self, model: Any) -> list[str]:
        """Return the names of a model's inputs in order, as a batch that is a dict has them; [] if they are unknown."""
        return []

    def input_sizes(self, model: Any) -> dict[str, tuple[int | None, ...]]:
        """Return the declared sizes of a model's inputs by name, None for open ones; {} if they are unknown."""
        return {}

    def steps(self, model: Any) -> Callable[[Iterable[Any]], Iterator[Any]] | None:
        """Return a function that adds its states to batches of a model of one step; None for other models."""
        return None

    def random_input(self, model: Any, index: int, sizes: Sequence[int]) -> torch.Tensor:
        """Return random numbers of the type of an input."""
        return torch.randn(tuple(sizes))

    def run(self, model: Any, inputs: Any) -> Any:
        """Return what a model computes for inputs in its own structure, as torch tensors."""
        raise NotImplementedError

    def device_named(self, name: str) -> torch.device:
        """Return the device of a name, to which a model is moved: "cpu", "cuda:1", or "auto" for the accelerator here.

        Raises:
            ConfigError: There is no such device, or the framework itself places its models.
        """
        what = f"Models of {self.facts.title} are placed by {self.facts.title} itself"
        raise ConfigError(what, got=f"device {name}", hint=self.facts.placing)

    def opaque(self, target: str) -> Callable[..., Any]:
        """Return the function on torch tensors that runs an opaque node, whose target begins with "name:".

        Raises:
            GraphError: The target is unknown, or cannot be created again.
        """
        raise GraphError(f"{self.facts.title} has no operators of its own", got=target[:200])

    def kernel_layout(self, node: Node, weight: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return functions that convert a weight of a node to the layout of this framework, and back."""
        return (lambda w: w), (lambda w: w)

    # ---- making

    def lower(self, graph: Graph, plan: Plan, training: Training | None) -> Any:
        """Build the trainable simulation, which has `run_flat(inputs)`, from inputs to outputs of the graph in order.

        Args:
            training: what trains the quantizers; None leaves their scales where they are.

        Raises:
            UnsupportedError: An algorithm cannot train a tensor.
        """
        return _torch().lower(graph, plan, training)

    def rebuilt(self, model: Any, graph: Graph, args: Sequence[Any], kwargs: Any) -> Any:
        """Return a float model, trainable and in evaluation mode, with the weights of a graph, whose sizes may differ.

        Args:
            model: the model that the graph was read from, before its weights changed; it stays as it is.
            args, kwargs: arguments of a call.
        """
        return self.lower(graph, Plan(), None)

    def device(self, graph: Graph, run_flat: Callable[[Tensors], list[Any]], floats: Sequence[str]) -> Any:
        """Build a model that computes `run_flat`.

        Args:
            run_flat: function from torch tensors in the order of the graph's inputs to those of its outputs.
            floats: operators that the runtime computes in float, so that their last bit is uncertain.
        """
        return _torch().device(graph, run_flat, floats)

    def save(self, graph: Graph, plan: Plan, path: Path, form: str = "fake") -> Path:
        """Write the quantized network as a file of this framework, which loads without chipfit.

        Args:
            form: "fake", with arithmetic that rounds, or "mctq", with quantizers of the package mct_quantizers.

        Raises:
            UnsupportedError: The framework has no file with this suffix, or no form for a part of the network.
        """
        return _torch().save(graph, plan, path, form)

    def stepper(self, model: Any, rate: float, steps: int, probabilities: bool) -> Callable[[Tensors, Any], float]:
        """Return a function that trains one step on flat inputs and labels [N], and returns the loss.

        The loss is cross-entropy; the optimizer is gradient descent with momentum 0.9 and a learning rate that falls to
        0 along a cosine.

        Args:
            steps: number of steps of the whole training.
            probabilities: whether the model ends with a softmax.
        """
        return _torch().stepper(model, rate, steps, probabilities)

    def read_back(self, model: Any, graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
        """Return Graph and Plan with the numbers that `model` holds now, ready to be exported, verified or saved.

        Tied tensors stay tied; bias scales follow from their input and weight scales.

        Args:
            model: result of `lower(graph, plan)`, trained or loaded since.
            graph, plan: the graph and plan that the model was made from; they are not changed.

        Raises:
            PlanError: `model` was not made by `lower(graph, plan)`.
            TrainingError: Training left a scale that is not positive and finite.
            UnsupportedError: An algorithm trained something that cannot be deployed.
        """
        return _torch().read_back(model, graph, plan)

    def state_arrays(self, model: Any) -> Iterator[np.ndarray]:
        """Yield everything of a simulation that training may change."""
        return _torch().state_arrays(model)


def _torch() -> Framework:
    found: Framework = lookup("framework", "torch")()
    return found
