"""The Graph while a PyTorch program is read, and the ATen call that a reader is given."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from chipfit.frameworks.reading import Unreadable, inferred, present, require, steps_from_zero
from chipfit.frameworks.torch.program import OpenSize, SymbolicTensor, origin
from chipfit.graph.builder import GraphBuilder, Outputs
from chipfit.graph.config import module_settings
from chipfit.graph.edit import unique_name
from chipfit.graph.ir import OPAQUE, Graph, Ref
from chipfit.operators.formulas import compute

#: arguments that do not change the result in inference
NEUTRAL_ARGUMENTS = (
    "momentum cudnn_enable cudnn_enabled padding_idx scale_grad_by_freq sparse running_mean running_var sorted stable"
)


class TorchGraphBuilder(GraphBuilder):
    """The growing Graph, with the value that each fx node became.

    Args:
        model: the user's model, whose layers and names the nodes refer to.
        weights: every tensor that the captured program may read, by its name in the state dict.
    """

    def __init__(self, model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(Graph([], [], [], {}, {}))
        self.env: dict[torch.fx.Node, Any] = {}  #: value name, tuple of names, or a Python constant
        self.overwritten: dict[str, str] = {}  #: value -> the value that an in-place operator wrote over it
        self.sizes: dict[str, tuple[str, int]] = {}  #: open size -> a value with it, first of inputs, and the axis
        self.measured: dict[OpenSize, tuple[str, int]] = {}  #: size that the model reads -> a value with it, axis
        self.batch: dict[str, int] = {}  #: input -> its axis of samples
        self.returned: set[torch.fx.Node] = set()  #: calls whose results the model returns
        self.tied: dict[str, str] = {}  #: weight -> the first name of its tensor, which the nodes read
        self._modules = dict(model.named_modules())
        self.graph.outer_layers = _outer_layers(self._modules)
        self._add_weights(model, weights)
        self.names |= set(self.graph.weights)

    def _add_weights(self, model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
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

    def arg(self, x: Any) -> Any:
        """Return what an fx argument stands for now: the value of a node, after writes in place."""
        if isinstance(x, torch.fx.Node):
            v = self.env[x]
            while isinstance(v, str) and v in self.overwritten:
                v = self.overwritten[v]
            return v
        return [self.arg(i) for i in x] if isinstance(x, (list, tuple)) else x

    def same_size(self, a: Any, b: Any) -> bool:
        """Return whether two sizes are equal: symbols compare as text, and all inputs have as many samples."""
        return str(a) == str(b) or (self.is_batch(a) and self.is_batch(b))

    def is_batch(self, size: Any) -> bool:
        """Return whether a size is the number of samples."""
        name, axis = self.sizes.get(str(size), ("", -1))
        return self.batch.get(name) == axis

    def enter(self, name: str, like: Any) -> str:
        """Enter a value with the shape and type of `like`, a symbolic tensor or a Python integer."""
        return self.value(name, *_shape_and_type(like)).name

    def constant(self, name: str, t: torch.Tensor) -> str:
        """Enter a tensor of the program itself as a weight."""
        self.names.add(name)
        self.graph.weights.setdefault(name, t.detach().clone())
        return name

    def scalar(self, near: str, value: float, like: SymbolicTensor) -> str:
        """Enter a Python number as a 0-d weight beside the node `near`, in the type of `like`.

        A float beside an integer tensor is a float32.
        """
        fits = isinstance(value, int) or like.dtype.is_floating_point
        name = unique_name(f"{near}.scalar", self.graph.weights)
        return self.constant(name, torch.tensor(value, dtype=like.dtype if fits else torch.float32))

    def append(
        self, n: torch.fx.Node, op: str, inputs: Sequence[str | None], attrs: dict[str, Any], likes: Any, name: str = ""
    ) -> list[str]:
        """Append a node that comes from `n`; return its values, one for each of `likes`."""
        return self.append_to(n, op, inputs, attrs, [_shape_and_type(like) for like in likes], name or n.name)

    def append_to(
        self, n: torch.fx.Node, op: str, inputs: Sequence[str | None], attrs: dict[str, Any], outs: Outputs, name: str
    ) -> list[str]:
        """Append a node that comes from `n`, whose results have these shapes and types; return its values."""
        return [v.name for v in self.emit(origin(n, self._modules), name, op, inputs, attrs, outs)]


def _shape_and_type(like: Any) -> tuple[tuple[int | None, ...], str]:
    """Return shape (None where a size is open) and dtype of a symbolic tensor, or those of a Python integer."""
    if not isinstance(like, SymbolicTensor):
        return (), "int"
    return tuple(int(s) if isinstance(s, int) else None for s in like.shape), str(like.dtype).removeprefix("torch.")


class TorchCall:
    """One ATen call while it is read: its arguments as operands and attributes, its result as new nodes.

    Args:
        builder: the growing graph.
        node: the call in torch's program.
        name: the operator without overload, and without the "_" of its in-place variant.
        args: the arguments by the names of the operator's schema.
    """

    def __init__(self, builder: TorchGraphBuilder, node: torch.fx.Node, name: str, args: dict[str, Any]) -> None:
        self.builder, self.node, self.name, self.args = builder, node, name, args

    # ---- arguments

    def static(self, key: str) -> Any:
        """Return an argument as a Python value, None included.

        Raises:
            Unreadable: The argument is a tensor, or a size that is open.
        """
        return self._static(self.args.get(key))

    def _static(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return tuple(self._static(i) for i in x)
        if isinstance(x, torch.fx.Node):
            x = self.builder.env.get(x)
            require(isinstance(x, (int, float)))
        elif isinstance(x, (torch.SymInt, torch.SymFloat, OpenSize)):
            raise Unreadable
        return x

    def optional(self, key: str) -> str | None:
        """Return the value name of an argument that is a tensor or None."""
        v = self.builder.arg(self.args.get(key))
        require(v is None or isinstance(v, str))
        return v

    def value(self, key: str) -> str:
        """Return the value name of an argument that is a tensor."""
        return present(self.optional(key))

    def number_or_value(self, key: str) -> str:
        """Return an operand of arithmetic: a tensor, cast to the type that torch computes in, or a constant."""
        v = self.builder.arg(self.args.get(key))
        if isinstance(v, (int, float)) and not isinstance(v, bool):
            like = self.result
            if like.dtype is torch.bool:  # of a comparison, which computes in the type of its operands
                like = self.tensor("self" if key == "other" else "other")
            return self.builder.scalar(self.node.name, v, like)
        v = self.value(key)
        require(v not in self.builder.graph.values or self.builder.graph.values[v].dtype != "int")
        return self._cast(key, v, self._computed_type())

    def _computed_type(self) -> torch.dtype:
        """Return the type in which torch computes: that of the result, of a comparison that of its operands."""
        dtype: torch.dtype = self.result.dtype
        if dtype is torch.bool:
            operands = {k: self.args.get(k) for k in ("self", "other")}
            types = [self.tensor(k).dtype for k, x in operands.items() if isinstance(x, torch.fx.Node)]
            dtype = types[0] if len(types) == 1 else torch.promote_types(*types)
            if any(isinstance(x, float) for x in operands.values()) and not dtype.is_floating_point:
                return torch.float32
        return dtype

    def cast_to_result(self, key: str) -> str:
        """Return a tensor in the type of the result."""
        return self._cast(key, self.value(key), self.result.dtype)

    def constant(self, v: float) -> str:
        """Return a number as a constant in the type of the result."""
        return self.builder.scalar(self.node.name, torch.tensor(v, dtype=self.result.dtype).item(), self.result)

    def _cast(self, key: str, v: str, dtype: torch.dtype) -> str:
        if self.tensor(key).dtype is dtype:
            return v
        return self.step("Cast", [v], dtype=str(dtype).removeprefix("torch."))

    def size(self, size: Any, computed: bool = False) -> str:
        """Return an open size as a value.

        Args:
            computed: whether it may be computed from one that the model reads, by a function of Python.

        Raises:
            Unreadable: No value has this size.
        """
        measured = self.builder.measured
        if isinstance(size, OpenSize) and size not in measured:
            for other in measured:
                if formula := size.computed_from(other):
                    place = self._place_in_operands(other) or measured[other]
                    return self._computed_size(size, place, *formula) if computed else self._static(size)
        require(str(size) in self.builder.sizes)
        name, axis = self.builder.sizes[str(size)]
        return self.step("Size", [name], axis=axis)

    def _place_in_operands(self, size: OpenSize) -> tuple[str, int] | None:
        """Return an operand of the call that has a size, and the axis: what is written as one call reads no other."""
        for x in self.node.all_input_nodes:
            shape, name = getattr(x.meta.get("val"), "shape", ()), self.builder.arg(x)
            if size in shape and isinstance(name, str):
                return name, shape.index(size)
        return None

    def _computed_size(self, size: OpenSize, place: tuple[str, int], target: str, number: int) -> str:
        base = self.step("Size", [place[0]], axis=place[1])
        attrs = {"target": target, "args": [Ref(0), number], "kwargs": {}}
        return self.builder.append(self.node, OPAQUE, [base], attrs, [size], f"{self.node.name}_computed")[0]

    def is_open(self, key: str) -> bool:
        """Return whether an argument is an open size of an input, but not the batch size."""
        size = self.args[key]
        return str(size) in self.builder.sizes and not self.builder.is_batch(size)

    def index_range(self, key: str) -> str:
        """Return 0, 1, 2 ... below an open size, as the running sum of ones minus one."""
        one = self.builder.constant(f"{self.node.name}.one", torch.ones(1, dtype=torch.int64))
        ones = self.step("Expand", [one, self.size(self.args[key])], shape=(None,))
        return steps_from_zero(self.step, ones, one)

    def tensor(self, key: str) -> SymbolicTensor:
        """Return shape and type of an argument."""
        v = self.args[key]
        require(isinstance(v, torch.fx.Node) and isinstance(v.meta.get("val"), SymbolicTensor))
        tensor: SymbolicTensor = v.meta["val"]
        return tensor

    def is_neutral(self, key: str) -> bool:
        """Return whether an argument has its default, or does not change the result."""
        default = {a.name: a.default_value for a in self.node.target._schema.arguments if a.has_default_value()}
        return key in NEUTRAL_ARGUMENTS.split() or (key in default and self.args[key] == default[key])

    @property
    def rank(self) -> int:
        return self.tensor("self" if "self" in self.args else "input").dim()

    # ---- result

    @property
    def result(self) -> Any:
        """The symbolic tensor that the call returns, or a list of them, or a number."""
        return self.node.meta["val"]

    @property
    def only_first_result_is_read(self) -> bool:
        """True if no call reads another result than the first, and the model returns none."""
        others = [u for u in self.node.users if u.target is operator.getitem and u.args[1] != 0]
        return not any(u.users or u in self.builder.returned for u in others)

    def require_only_first_result(self) -> None:
        """Check that other results than the first are not used.

        Raises:
            Unreadable: A call reads one, or the model returns it.
        """
        require(self.only_first_result_is_read)

    def emit(self, op: str, inputs: Sequence[str | None], **attrs: Any) -> Any:
        """Append the final node. Of several results it makes the first; no call may read the others."""
        many = isinstance(self.result, (tuple, list))
        if many:
            self.require_only_first_result()
        like = self.result[0] if many else self.result
        (name,) = self.builder.append(self.node, op, inputs, attrs, [like])
        return (name, *[None] * (len(self.result) - 1)) if many else name

    def emit_all(self, op: str, **attrs: Any) -> tuple[str, ...]:
        """Append the final node of one operand, with every result."""
        return tuple(self.builder.append(self.node, op, [self.value("self")], attrs, list(self.result)))

    def formula(self, formula: str, **values: Any) -> Any:
        """Append the operators of a formula, see `operators.formulas`; the last is the final node."""
        return compute(formula, self.step, self.emit, self.constant, **values)

    def step(self, op: str, inputs: Sequence[str | None], **attrs: Any) -> str:
        """Append a node before the final one; return its first result."""
        outs = inferred(self.builder.graph, op, inputs, attrs)
        return self.builder.append_to(self.node, op, inputs, attrs, outs, f"{self.node.name}_{op.lower()}")[0]


def _outer_layers(modules: Mapping[str, torch.nn.Module]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return `Graph.outer_layers` of a model, given its modules by path."""
    lists = torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict

    def is_outer(m: torch.nn.Module) -> bool:
        return not type(m).__module__.startswith("torch.") or any(True for _ in m.children())

    named = ((path, m) for path, m in modules.items() if path and type(m) not in lists and is_outer(m))
    return {path: (type(m).__name__, module_settings(m)) for path, m in named}
