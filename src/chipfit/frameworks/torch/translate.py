"""Translate a traced program to a Graph, call by call."""

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

import chipfit.frameworks.torch.recurrent  # noqa: F401 -- registers readers
from chipfit.engine.opaque import Template, target_name
from chipfit.engine.trees import dump_call, dump_result
from chipfit.errors import CaptureError, GraphError
from chipfit.frameworks.reading import Unreadable, require
from chipfit.frameworks.torch.call import TorchCall, TorchGraphBuilder
from chipfit.frameworks.torch.program import (
    CHECKS,
    OpenSize,
    Program,
    SymbolicTensor,
    Unrecordable,
    arguments,
    aten_name,
    source,
)
from chipfit.frameworks.torch.read import READERS, SYNONYMS
from chipfit.graph.edit import drop_dead
from chipfit.graph.ir import CPU, OPAQUE, Graph
from chipfit.graph.placement import device_of, inputs_on, moved
from chipfit.graph.removed import remember_layers_without_nodes


def translate(program: Program, model: torch.nn.Module, call: Any, example_out: Any) -> Graph:
    """Translate a program to a Graph on the CPU, which remembers the model's device.

    Args:
        program: the trace of a copy of the model.
        model: the user's model, whose names and tensors the graph uses.
        call: (args, kwargs) of the example call.
        example_out: the model's result for the example.
    """
    translator = _Translator(program, model)
    translator.add_calls(program.graph, program.owner, translator.placeholder)
    graph = translator.builder.graph
    args, kwargs = call
    names = list(inspect.signature(model.forward).parameters)[: len(args)]
    graph.in_spec = dump_call(args, kwargs, names, translator.tensors, **translator.batch())
    graph.out_spec = dump_result(example_out, translator.results(), program.out_tree)
    leaves = pytree.tree_leaves(call)
    graph.device = device_of(model)
    graph.example = tuple(inputs_on(CPU, (leaves[i] for i in translator.tensors)))
    drop_dead(graph)
    graph.drop_empty_layers()
    remember_layers_without_nodes(graph, {path: type(m).__name__ for path, m in model.named_modules()})
    return moved(graph, CPU)


class _Translator:
    """One pass over the calls of a program."""

    def __init__(self, program: Program, model: torch.nn.Module) -> None:
        self.program, self.builder = program, TorchGraphBuilder(model, program.weights)
        self.builder.returned = {x for x in program.results if isinstance(x, torch.fx.Node)}
        self.tensors: list[int] = []  #: indices of the call's leaves that are tensors
        self.leaves = 0  #: leaves of the call that have been read

    def add_calls(self, graph: torch.fx.Graph, owner: Any, placeholder: Callable[[torch.fx.Node], Any]) -> None:
        """Add the calls of one graph.

        Args:
            owner: the object that holds the graph's constants as attributes.
            placeholder: function that returns the value of an input of the graph.
        """
        for n in graph.nodes:
            if n.op == "placeholder":
                self.builder.env[n] = placeholder(n)
            elif n.op == "call_function":
                self.call(n)
            elif n.op == "get_attr":
                x = operator.attrgetter(n.target)(owner)
                self.builder.env[n] = self.builder.constant(n.target, x) if isinstance(x, torch.Tensor) else x
            if n.meta.get("is_measured"):
                self.measure(n)

    def placeholder(self, n: torch.fx.Node) -> Any:
        """Return the value of an input of the program: a weight, or the next leaf of the user's call."""
        if n.name in self.program.weight_of:
            return self.builder.tied[self.program.weight_of[n.name]]
        self.leaves += 1
        name, like = self.program.inputs.get(n.name), n.meta.get("val")
        if name is None:
            return like
        self.builder.graph.inputs.append(name)
        self.tensors.append(self.leaves - 1)
        for axis, size in enumerate(like.shape):
            if not isinstance(size, int):
                self.builder.sizes.setdefault(str(size), (name, axis))  # symbols compare as text
                if (self.leaves - 1, axis) in self.program.batch:
                    self.builder.batch.setdefault(name, axis)
        return self.builder.enter(name, like)

    def measure(self, n: torch.fx.Node) -> None:
        """Enter the open sizes of a tensor whose shape the model reads."""
        name, like = self.builder.arg(n), n.meta.get("val")
        for axis, size in enumerate(like.shape if isinstance(like, SymbolicTensor) and isinstance(name, str) else ()):
            if isinstance(size, OpenSize):
                place = self.builder.sizes.setdefault(str(size), (name, axis))
                self.builder.measured.setdefault(size, place)

    def batch(self) -> dict[str, Any]:
        """Return the axes of samples for `in_spec`, by number of the input; nothing where they are all open axes 0."""
        graph, axes = self.builder.graph, self.builder.batch
        if axes == {i: 0 for i in graph.inputs if graph.shape(i)[:1] == (None,)}:
            return {}
        return {"batch": [[graph.inputs.index(i), axis] for i, axis in axes.items()]}

    def results(self) -> list[dict[str, Any]]:
        """Enter the graph's outputs; return the leaves of the model's result, which are outputs or constants."""
        outputs, leaves = self.builder.graph.outputs, []
        for arg in self.program.results:
            v = self.builder.arg(arg)
            if isinstance(arg, torch.fx.Node) and isinstance(v, str):
                leaves.append({"output": len(outputs)})
                outputs.append(v)
            else:
                leaves.append({"constant": v})
        return leaves

    def call(self, n: torch.fx.Node) -> None:
        """Add one call, by its reader or as an opaque node."""
        env, target = self.builder.env, n.target
        if target is operator.getitem and isinstance(env.get(n.args[0]), (tuple, list)):
            env[n] = env[n.args[0]][n.args[1]]
        elif not n.users and CHECKS.search(f"{target} {getattr(target, '__name__', '')}"):
            return
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self.inline(n)
        elif isinstance(target, torch._ops.OpOverload):
            self.aten_call(n, target)
        else:
            env[n] = self.opaque(n, target)

    def aten_call(self, n: torch.fx.Node, target: torch._ops.OpOverload) -> None:
        """Add a call of an ATen operator; an in-place operator is read as its variant without "_"."""
        env, name = self.builder.env, aten_name(target)
        in_place = target._schema.is_mutable and name.endswith("_")
        name = name[:-1] if in_place else name
        own_name = SYNONYMS.get(name, name)
        try:
            require(own_name in READERS and not any(map(_is_complex, (n, *n.all_input_nodes))))
            env[n] = READERS[own_name](TorchCall(self.builder, n, own_name, arguments(n)))
        except Unreadable:
            if target._schema.is_mutable:
                target = getattr(getattr(torch.ops.aten, name), target._overloadname)
            env[n] = self.opaque(n, target)
        if in_place and isinstance(n.args[0], torch.fx.Node) and isinstance(env[n], str):
            old = self.builder.arg(n.args[0])
            if old != env[n]:
                self.builder.overwritten[old] = env[n]

    def opaque(self, n: torch.fx.Node, target: Any) -> Any:
        """Add a call as an opaque node: the name of its target, and its arguments with a Ref for each value."""

        def operand(x: Any) -> str | None:
            v = self.builder.arg(x) if isinstance(x, torch.fx.Node) else None
            return self.size(n, x) if isinstance(x, OpenSize) else v if isinstance(v, str) else None

        def constant(x: Any) -> Any:
            if isinstance(x, torch.fx.Node):  # of several values, or of a number
                v = self.builder.arg(x)
                return [template.ref(i) for i in v] if isinstance(v, (list, tuple)) else v
            if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
                return {"torch": str(x).removeprefix("torch.")}
            return {"torch": "device:cpu"} if isinstance(x, torch.device) else x  # see `graph.placement`

        template = Template(operand, constant)
        try:
            name = target_name(target)
        except GraphError as e:
            raise CaptureError(e.what, where=source(n), allowed=e.allowed, hint=e.hint) from e
        attrs = {"target": name, "args": template(n.args), "kwargs": template(n.kwargs)}
        result = n.meta.get("val")
        many = isinstance(result, (tuple, list))
        values = self.builder.append(n, OPAQUE, template.inputs, attrs, list(result) if many else [result])
        return tuple(values) if many else values[0]

    def size(self, n: torch.fx.Node, size: OpenSize) -> str:
        """Return the value of an open size that the call has as a number.

        Raises:
            Unrecordable: The size belongs to no input.
        """
        try:
            return TorchCall(self.builder, n, "size", {}).size(size, computed=True)
        except Unreadable as e:
            raise Unrecordable from e

    def inline(self, n: torch.fx.Node) -> None:
        """Add the inner graph of an operator such as `wrap_with_set_grad_enabled` in place of the call."""
        inner = next((a for a in n.args if isinstance(a, torch.fx.Node) and a.op == "get_attr"), None)
        module = self.builder.env[inner] if inner is not None else None
        if not isinstance(module, torch.fx.GraphModule) or "wrap" not in str(n.target):
            hint = "replace torch.cond / while_loop by plain tensor operations"
            raise CaptureError(f"The model uses the control-flow operator '{n.target}'", where=source(n), hint=hint)
        operands = iter(n.args[n.args.index(inner) + 1 :])
        self.add_calls(module.graph, module, lambda _: self.builder.arg(next(operands)))
        (out,) = module.graph.output_node().args
        self.builder.env[n] = tuple(
            self.builder.arg(out) if isinstance(out, (list, tuple)) else [self.builder.arg(out)]
        )


def _is_complex(n: torch.fx.Node) -> bool:
    """Return whether a call computes complex numbers; canonical operators compute real ones."""
    like = n.meta.get("val")
    return isinstance(like, SymbolicTensor) and like.dtype.is_complex
