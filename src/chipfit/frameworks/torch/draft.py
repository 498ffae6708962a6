"""The Graph of a model while it is read: what each fx node has become, and new nodes under free names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from chipfit.frameworks.torch.origin import origin
from chipfit.frameworks.torch.program import Form
from chipfit.graph import draft as drafts
from chipfit.graph.builder import unique
from chipfit.graph.ir import Graph


class Draft(drafts.Draft):
    """The growing Graph, and what the reading knows beside it.

    Args:
        model: the user's model, whose layers and names the nodes tell.
        weights: every tensor that the captured program may read, under its name in the state dict.
    """

    def __init__(self, model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(Graph([], [], [], {}, {}))
        self.env: dict[torch.fx.Node, Any] = {}  #: value name, tuple of them, or a Python constant
        self.replaced: dict[str, str] = {}  #: value -> the value that an in-place operator wrote over it
        self.sizes: dict[str, tuple[str, int]] = {}  #: open size -> an input that has it, and the axis
        self.tied: dict[str, str] = {}  #: weight -> the first name of its tensor, which the nodes read
        self._modules = dict(model.named_modules())
        self._own(model, weights)
        self.names |= set(self.graph.weights)

    def _own(self, model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        """Enter the weights, and the entries of the state dict that the forward pass does not read."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        for name, t in weights.items():
            self.tied[name] = first.setdefault(id(t), name)
            shared = t.detach() if isinstance(t, torch.nn.Parameter) else t
            self.graph.weights[name] = self.graph.weights.get(self.tied[name], shared)
        for name, t in {**parameters, **dict(model.named_buffers(remove_duplicate=False))}.items():
            if name not in weights:
                self.graph.weights[name] = t.detach().clone()
        self.graph.trainable = set(weights).intersection(parameters)

    # ---- what is there

    def arg(self, x: Any) -> Any:
        """What an fx argument is now: value names for nodes, after what was written over them in place."""
        if isinstance(x, torch.fx.Node):
            v = self.env[x]
            while isinstance(v, str) and v in self.replaced:
                v = self.replaced[v]
            return v
        if isinstance(x, (list, tuple)):
            return [self.arg(i) for i in x]
        return x

    def same(self, a: Any, b: Any) -> bool:
        """Whether two sizes are one: symbols compare as text, and as many samples are in all inputs."""
        axes = [self.sizes.get(str(s), ("", -1))[1] for s in (a, b)]
        return str(a) == str(b) or axes == [0, 0]

    # ---- what is added

    def enter(self, name: str, like: Any) -> str:
        """Enter a value of the shape and type of a tensor, or a Python integer."""
        return self.value(name, *_form(like)).name

    def constant(self, name: str, t: torch.Tensor) -> str:
        """Enter a tensor of the program itself as a weight."""
        self.names.add(name)
        self.graph.weights.setdefault(name, t.detach().clone())
        return name

    def scalar(self, near: str, value: float, like: Form) -> str:
        """A Python number as a 0-d weight beside the node `near`; integers stay integers beside integers."""
        whole = isinstance(value, int) or like.dtype.is_floating_point
        name = unique(f"{near}.scalar", self.graph.weights)
        return self.constant(name, torch.tensor(value, dtype=like.dtype if whole else torch.float32))

    def append(
        self, n: torch.fx.Node, op: str, inputs: Sequence[str | None], attrs: dict[str, Any], likes: Any, name: str = ""
    ) -> list[str]:
        """Append a node that comes from `n`; returns its values, one like each of `likes`."""
        made = self.emit(origin(n, self._modules), name or n.name, op, inputs, attrs, [_form(x) for x in likes])
        return [v.name for v in made]


def _form(like: Any) -> tuple[tuple[int | None, ...], str]:
    """Shape and type of a tensor, None where a size is open, or of a Python integer."""
    if not isinstance(like, Form):
        return (), "int"
    return tuple(int(s) if isinstance(s, int) else None for s in like.shape), str(like.dtype).removeprefix("torch.")
