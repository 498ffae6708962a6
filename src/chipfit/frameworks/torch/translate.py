"""From the program that a tracer returns to a Graph, call by call."""

import inspect
import json
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from chipfit.engine.opaque import target_name
from chipfit.engine.trees import dump_tree
from chipfit.errors import CaptureError, GraphError
from chipfit.frameworks.torch.call import TorchCall, TorchDraft, Unreadable
from chipfit.frameworks.torch.origin import CHECKS, arguments, source
from chipfit.frameworks.torch.program import OpenSize, Program, Unrecordable
from chipfit.frameworks.torch.read import READERS, SYNONYMS
from chipfit.graph.edit import drop_dead
from chipfit.graph.ir import OPAQUE, Graph, Ref


def read(program: Program, model: torch.nn.Module, call: Any, example_out: Any) -> Graph:
    """The Graph of a program.

    Args:
        program: what a tracer made of a twin of the model.
        model: the user's model, whose names and tensors the graph takes.
        call: (args, kwargs) of the example call.
        example_out: what the model returned for it.
    """
    walk = Translator(program, model)
    walk.through(program.graph, program.owner, walk.placeholder)
    graph = walk.draft.graph
    leaves, tree = pytree.tree_flatten(call)
    args, kwargs = call
    names = list(inspect.signature(model.forward).parameters)[: len(args)]
    counts = {"args": len(args), "kwargs": list(kwargs), "leaves": len(leaves), "tensors": walk.tensors}
    graph.in_spec = json.dumps({**dump_tree(tree, call), **counts, "names": names})
    graph.out_spec = json.dumps({**dump_tree(program.out_tree, example_out), "leaves": walk.results()})
    graph.example = tuple(leaves[i] for i in walk.tensors)
    drop_dead(graph)
    return graph


class Translator:
    """One pass over the program's calls."""

    def __init__(self, program: Program, model: torch.nn.Module) -> None:
        self.program, self.draft = program, TorchDraft(model, program.weights)
        self.tensors: list[int] = []  #: which leaves of the call are tensors
        self.leaves = 0  #: of the call, so far

    def through(self, graph: torch.fx.Graph, owner: Any, placeholder: Callable[[torch.fx.Node], Any]) -> None:
        """Read one graph.

        Args:
            owner: what holds its constants as attributes.
            placeholder: what each of its inputs is known by.
        """
        for n in graph.nodes:
            if n.op == "placeholder":
                self.draft.env[n] = placeholder(n)
            elif n.op == "call_function":
                self.call(n)
            elif n.op == "get_attr":
                thing = operator.attrgetter(n.target)(owner)
                self.draft.env[n] = self.draft.constant(n.target, thing) if isinstance(thing, torch.Tensor) else thing

    def placeholder(self, n: torch.fx.Node) -> Any:
        """An input of the program: a weight, or the next leaf of the user's call."""
        if n.name in self.program.weight_of:
            return self.draft.tied[self.program.weight_of[n.name]]
        self.leaves += 1
        name, like = self.program.inputs.get(n.name), n.meta.get("val")
        if name is None:
            return like
        self.draft.graph.inputs.append(name)
        self.tensors.append(self.leaves - 1)
        for axis, size in enumerate(like.shape):
            if not isinstance(size, int):
                self.draft.sizes.setdefault(str(size), (name, axis))  # symbols compare as text
        return self.draft.enter(name, like)

    def results(self) -> list[dict[str, Any]]:
        """The leaves of what the model returns: graph outputs, which are entered, and constants."""
        outputs, leaves = self.draft.graph.outputs, []
        for arg in self.program.results:
            v = self.draft.arg(arg)
            if isinstance(arg, torch.fx.Node) and isinstance(v, str):
                leaves.append({"output": len(outputs)})
                outputs.append(v)
            else:
                leaves.append({"constant": v})
        return leaves

    def call(self, n: torch.fx.Node) -> None:
        """Enter one call: by its reader, else as it is."""
        env, target = self.draft.env, n.target
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
        """Enter a call of an ATen operator; one that writes in place is read as the operator that does not."""
        env, name = self.draft.env, target._schema.name.partition("::")[2]
        in_place = target._schema.is_mutable and name.endswith("_")
        try:
            name = name[:-1] if in_place else name
            known = SYNONYMS.get(name, name)
            if known not in READERS:
                raise Unreadable
            env[n] = READERS[known](TorchCall(self.draft, n, known, arguments(n)))
        except Unreadable:
            if target._schema.is_mutable:
                target = getattr(getattr(torch.ops.aten, name), target._overloadname)
            env[n] = self.opaque(n, target)
        if in_place and isinstance(n.args[0], torch.fx.Node) and isinstance(env[n], str):
            old = self.draft.arg(n.args[0])
            if old != env[n]:
                self.draft.replaced[old] = env[n]

    def opaque(self, n: torch.fx.Node, target: Any) -> Any:
        """Keep a call as it is: the name of its target, and a template of its arguments with a Ref for each value."""
        inputs: list[str] = []

        def known(v: Any) -> Any:
            if isinstance(v, str):
                if v not in inputs:
                    inputs.append(v)
                return Ref(inputs.index(v))
            return [known(i) for i in v] if isinstance(v, (list, tuple)) else v

        def template(x: Any) -> Any:
            if isinstance(x, torch.fx.Node):
                return known(self.draft.arg(x))
            if isinstance(x, (list, tuple)):
                return [template(i) for i in x]
            if isinstance(x, OpenSize):
                return known(self.size(n, x))
            if isinstance(x, dict):
                return {k: template(v) for k, v in x.items()}
            if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
                return {"torch": str(x).removeprefix("torch.")}
            return {"torch": f"device:{x}"} if isinstance(x, torch.device) else x

        try:
            called = target_name(target)
        except GraphError as e:
            raise CaptureError(e.what, where=source(n), allowed=e.allowed, hint=e.hint) from e
        attrs = {"target": called, "args": template(n.args), "kwargs": template(n.kwargs)}
        result = n.meta.get("val")
        many = isinstance(result, (tuple, list))
        values = self.draft.append(n, OPAQUE, inputs, attrs, list(result) if many else [result])
        return tuple(values) if many else values[0]

    def size(self, n: torch.fx.Node, size: OpenSize) -> str:
        """The value of a size of an input that a call was given as a number.

        Raises:
            Unrecordable: no input has it.
        """
        try:
            return TorchCall(self.draft, n, "size", {}).size(size)
        except Unreadable as e:
            raise Unrecordable from e

    def inline(self, n: torch.fx.Node) -> None:
        """Read the inner graph of `wrap_with_set_grad_enabled` and the like in place."""
        inner = next((a for a in n.args if isinstance(a, torch.fx.Node) and a.op == "get_attr"), None)
        module = self.draft.env[inner] if inner is not None else None
        if not isinstance(module, torch.fx.GraphModule) or "wrap" not in str(n.target):
            hint = "replace torch.cond / while_loop by plain tensor operations"
            raise CaptureError(f"The model uses the control-flow operator '{n.target}'", where=source(n), hint=hint)
        operands = iter(n.args[n.args.index(inner) + 1 :])
        self.through(module.graph, module, lambda _: self.draft.arg(next(operands)))
        (out,) = module.graph.output_node().args
        self.draft.env[n] = tuple(self.draft.arg(out) if isinstance(out, (list, tuple)) else [self.draft.arg(out)])
