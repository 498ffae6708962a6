"""One ATen call while it is read: its arguments as canonical operands and attributes, its result as new nodes."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from chipfit.frameworks.torch.origin import origin
from chipfit.frameworks.torch.program import OpenSize, SymbolicTensor
from chipfit.graph.builder import GraphBuilder
from chipfit.graph.edit import unique_name
from chipfit.graph.ir import Graph


class TorchDraft(GraphBuilder):
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

    def scalar(self, near: str, value: float, like: SymbolicTensor) -> str:
        """A Python number as a 0-d weight beside the node `near`; integers stay integers beside integers."""
        whole = isinstance(value, int) or like.dtype.is_floating_point
        name = unique_name(f"{near}.scalar", self.graph.weights)
        return self.constant(name, torch.tensor(value, dtype=like.dtype if whole else torch.float32))

    def append(
        self, n: torch.fx.Node, op: str, inputs: Sequence[str | None], attrs: dict[str, Any], likes: Any, name: str = ""
    ) -> list[str]:
        """Append a node that comes from `n`; returns its values, one like each of `likes`."""
        made = self.emit(origin(n, self._modules), name or n.name, op, inputs, attrs, [_form(x) for x in likes])
        return [v.name for v in made]


def _form(like: Any) -> tuple[tuple[int | None, ...], str]:
    """Shape and type of a tensor, None where a size is open, or of a Python integer."""
    if not isinstance(like, SymbolicTensor):
        return (), "int"
    return tuple(int(s) if isinstance(s, int) else None for s in like.shape), str(like.dtype).removeprefix("torch.")


class Unreadable(Exception):
    """This form of the operator has no canonical equivalent."""


#: arguments that change no number in inference
_NEUTRAL = "momentum cudnn_enable cudnn_enabled padding_idx scale_grad_by_freq sparse running_mean running_var"


class TorchCall:
    """What a reader is given.

    Args:
        draft: the graph that grows.
        node: the call in torch's program.
        name: the operator without overload, and without the "_" of its in-place form.
        args: the arguments by the names of its schema.
    """

    def __init__(self, draft: TorchDraft, node: torch.fx.Node, name: str, args: dict[str, Any]) -> None:
        self.draft, self.node, self.name, self.args = draft, node, name, args

    # ---- arguments

    def raw(self, key: str) -> Any:
        """An argument that must be a static Python value (None allowed)."""
        return self._static(self.args.get(key))

    def _static(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return tuple(self._static(i) for i in x)
        if isinstance(x, torch.fx.Node):
            x = self.draft.env.get(x)
            if not isinstance(x, (int, float)):
                raise Unreadable
        elif isinstance(x, (torch.SymInt, torch.SymFloat, OpenSize)):
            raise Unreadable
        return x

    def optional(self, key: str) -> str | None:
        """An argument that is a tensor or None: its value name."""
        v = self.draft.arg(self.args.get(key))
        if v is not None and not isinstance(v, str):
            raise Unreadable
        return v

    def value(self, key: str) -> str:
        """An argument that is a tensor: its value name."""
        v = self.optional(key)
        if v is None:
            raise Unreadable
        return v

    def number_or_value(self, key: str) -> str:
        """An operand of arithmetic: a tensor in the type that torch computes in, or a number as a constant."""
        v = self.draft.arg(self.args.get(key))
        if isinstance(v, (int, float)) and not isinstance(v, bool):
            like = self.result
            if like.dtype is torch.bool:  # of a comparison, which computes in the type of its operands
                like = self.tensor("self" if key == "other" else "other")
            return self.draft.scalar(self.node.name, v, like)
        v = self.value(key)
        if v in self.draft.graph.values and self.draft.graph.values[v].dtype == "int":
            raise Unreadable
        return self._promoted(key, v)

    def _promoted(self, key: str, v: str) -> str:
        """An operand in the type that torch computes in: mixed types get an explicit Cast."""
        result = self.result.dtype
        if result is torch.bool:
            operands = {k: self.args.get(k) for k in ("self", "other")}
            types = [self.tensor(k).dtype for k, x in operands.items() if isinstance(x, torch.fx.Node)]
            result = types[0] if len(types) == 1 else torch.promote_types(*types)
            if any(isinstance(x, float) for x in operands.values()) and not result.is_floating_point:
                result = torch.float32
        return self._cast(key, v, result)

    def typed(self, key: str) -> str:
        """A tensor in the type of the result."""
        return self._cast(key, self.value(key), self.result.dtype)

    def number(self, v: float) -> str:
        """A number as a constant in the type of the result."""
        return self.draft.scalar(self.node.name, torch.tensor(v, dtype=self.result.dtype).item(), self.result)

    def _cast(self, key: str, v: str, kind: torch.dtype) -> str:
        if self.tensor(key).dtype is kind:
            return v
        return self.step("Cast", [v], self.tensor(key).to(kind), dtype=str(kind).removeprefix("torch."))

    def size(self, size: Any) -> str:
        """An open size as a value."""
        if str(size) not in self.draft.sizes:
            raise Unreadable
        name, axis = self.draft.sizes[str(size)]
        return self.step("Size", [name], size, axis=axis)

    def is_open(self, key: str) -> bool:
        """Whether an argument is an open size of an input, but for the batch."""
        return self.draft.sizes.get(str(self.args[key]), ("", 0))[1] > 0

    def counted(self, key: str) -> str:
        """0, 1, 2 ... below an open size: a sum of ones."""
        like = SymbolicTensor((self.args[key],), torch.int64)
        one = self.draft.constant(f"{self.node.name}.one", torch.ones(1, dtype=torch.int64))
        ones = self.step("Expand", [one, self.size(self.args[key])], like, shape=(None,))
        return self.step("Sub", [self.step("CumSum", [ones], like, axis=0), one], like)

    def tensor(self, key: str) -> SymbolicTensor:
        """Shape and type of an argument."""
        v = self.args[key]
        if not isinstance(v, torch.fx.Node) or not isinstance(v.meta.get("val"), SymbolicTensor):
            raise Unreadable
        form: SymbolicTensor = v.meta["val"]
        return form

    def says_nothing(self, key: str) -> bool:
        """Whether an argument is left at its default, or changes no number."""
        default = {a.name: a.default_value for a in self.node.target._schema.arguments if a.has_default_value()}
        return key in _NEUTRAL.split() or (key in default and self.args[key] == default[key])

    @property
    def rank(self) -> int:
        return self.tensor("self" if "self" in self.args else "input").dim()

    # ---- result

    @property
    def result(self) -> Any:
        """The form of what the call returns, or a list of them, or a number."""
        return self.node.meta["val"]

    def check_first_alone(self) -> None:
        """Go on where nothing reads a result but the first.

        Raises:
            Unreadable: something does.
        """
        if any(u.target is operator.getitem and u.args[1] != 0 and u.users for u in self.node.users):
            raise Unreadable

    def emit(self, op: str, inputs: Sequence[str | None], **attrs: Any) -> Any:
        """The final node. Of several results it makes the first; the others must have no reader."""
        many = isinstance(self.result, (tuple, list))
        if many:
            self.check_first_alone()
        like = self.result[0] if many else self.result
        (name,) = self.draft.append(self.node, op, inputs, attrs, [like])
        return (name, *[None] * (len(self.result) - 1)) if many else name

    def emit_all(self, op: str, **attrs: Any) -> tuple[str, ...]:
        """The final node of one operand, with every result."""
        return tuple(self.draft.append(self.node, op, [self.value("self")], attrs, list(self.result)))

    def step(self, op: str, inputs: Sequence[str | None], like: Any, **attrs: Any) -> str:
        """An extra node before the final one."""
        return self.draft.append(self.node, op, inputs, attrs, [like], f"{self.node.name}_{op.lower()}")[0]
