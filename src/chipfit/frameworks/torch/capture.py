"""From a PyTorch module to a Graph, through `torch.export`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import json
import linecache
import logging
import operator
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from chipfit.engine.opaque import target_name
from chipfit.engine.run import dump_tree
from chipfit.errors import CaptureError
from chipfit.frameworks.torch.read import READERS, Reader, Unreadable
from chipfit.graph.check import check
from chipfit.graph.config import module_settings, plain
from chipfit.graph.ir import OPAQUE, Graph, Node, Ref, Value

aten = torch.ops.aten
_TORCH = str(Path(torch.__file__).parent)
_VIEWS = frozenset(
    {
        "view",
        "reshape",
        "select",
        "slice",
        "transpose",
        "permute",
        "squeeze",
        "unsqueeze",
        "expand",
        "t",
        "flatten",
        "unflatten",
        "chunk",
        "split",
        "split_with_sizes",
        "unbind",
        "narrow",
        "as_strided",
        "alias",
        "detach",
        "diagonal",
        "_unsafe_view",
        "unfold",
    }
)
#: operators that check or annotate and compute nothing
_NOTHING = (
    "_assert",
    "sym_constrain",
    "_set_grad_enabled",
    "_enter_autocast",
    "_exit_autocast",
    "lift_fresh",
    "_guards_fn",
)


def capture(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, dynamic_batch: bool = True
) -> Graph:
    """Read a model into a Graph.

    The model is not changed; it is captured in eval mode: what depends on training (dropout, stochastic depth) takes its
    inference form. Axis 0 of every input that has the first one's batch size becomes dynamic where the model allows.

    Args:
        model: any module that `torch.export` can trace.
        args: example positional inputs; any structure of tensors.
        kwargs: example keyword inputs.
        dynamic_batch: let the batch size vary.

    Raises:
        CaptureError: naming the user's line and what to change.

    Parameters are not copied: `Graph.weights` holds the model's own tensors until a pass replaces them
    (`passes.own_weights` replaces those that are left).
    """
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(
            "A PyTorch model is an instance of torch.nn.Module",
            got=type(model).__name__,
            hint="pass the model object, not its class or its weights",
        )
    args, kwargs = tuple(args), dict(kwargs or {})
    twin = _twin(model)
    if dynamic_batch:
        args, kwargs = _at_least_two(args, kwargs)
    example_out = _try_once(twin, args, kwargs)
    exported = _export(twin, args, kwargs, dynamic_batch)
    if _needs_functional(exported.graph):
        exported = exported.run_decompositions({})
    graph = _Capture(exported, model, (args, kwargs), example_out).read()
    check(graph, blame="capture")
    return graph


def _twin(model: torch.nn.Module) -> torch.nn.Module:
    """A copy in eval mode that shares the parameters, which nothing writes to, and owns its buffers."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    return copy.deepcopy(model, memo).eval()


def _at_least_two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch of one would be taken for a constant: repeat it."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [t for t in leaves if isinstance(t, torch.Tensor) and t.dim() > 0]
    if not tensors or tensors[0].shape[0] != 1:
        return args, kwargs
    return pytree.tree_unflatten(
        [_twice(t) if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == 1 else t for t in leaves], tree
    )


def _twice(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t, t])


def _try_once(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the model as the user would; teaches pytree the user's dataclasses."""
    try:
        with torch.no_grad():
            out = model(*args, **kwargs)
    except Exception as e:  # the user's code may raise anything
        raise CaptureError(
            f"The model fails on the example input: {type(e).__name__}: {_first_line(e)}",
            where=_users_line(e),
            got=_describe(args, kwargs),
            hint="call the model on this input yourself, in eval mode, and correct the input or the model",
        ) from e
    for x in _dataclasses(out):
        if type(x) not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(
                type(x), serialized_type_name=f"{type(x).__module__}.{type(x).__qualname__}"
            )
    return out


def _dataclasses(x: Any) -> list[Any]:
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return [x, *(d for f in dataclasses.fields(x) for d in _dataclasses(getattr(x, f.name)))]
    if isinstance(x, Mapping):
        return [d for v in x.values() for d in _dataclasses(v)]
    if isinstance(x, (tuple, list)):
        return [d for v in x for d in _dataclasses(v)]
    return []


def _name_keywords(model: torch.nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Let `forward(**kwargs)` say which keywords it gets: torch.export takes dynamic shapes by the names of parameters only."""
    forward = model.forward
    old = inspect.signature(forward)
    rest = [p for p in old.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(rest) == len(old.parameters):
        return
    extra = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY) for k in kwargs if k not in old.parameters]

    @functools.wraps(forward)
    def named(*args: Any, **keywords: Any) -> Any:
        return forward(*args, **keywords)

    named.__signature__ = old.replace(parameters=[*rest, *extra])  # type: ignore[attr-defined]  # inspect reads it
    model.forward = named  # type: ignore[method-assign]  # of the copy that is captured


def _export(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool
) -> torch.export.ExportedProgram:
    shapes: Any = None
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim() > 0]
    if dynamic and tensors:
        batch = tensors[0].shape[0]

        def free(x: Any) -> Any:
            return (
                {0: torch.export.Dim.AUTO} if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == batch else None
            )

        _name_keywords(model, kwargs)
        shapes = pytree.tree_map(free, dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments))
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.no_grad():
                return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as e:  # torch.export raises many types
        text = f"{type(e).__name__}: {_first_line(e)}"
        if "DataDependent" in type(e).__name__ or "data-dependent" in str(e).lower():
            raise CaptureError(
                "The model branches on the values of a tensor, which a fixed graph cannot hold",
                where=_users_line(e),
                hint="replace the Python `if` by torch.where, or move it out of the model",
            ) from e
        raise CaptureError(
            f"The model cannot be captured: {text}",
            where=_users_line(e),
            hint="rewrite this line with tensor operations, or quantize the part of the model around it",
        ) from e
    finally:
        logging.disable(disabled)


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [""])[0][:300]


def _users_line(e: BaseException) -> str:
    """file:line of the last frame in the user's own code."""
    frames = traceback.extract_tb(e.__traceback__)
    own = [
        f
        for f in frames
        if not f.filename.startswith((_TORCH, "<"))
        and "chipfit" not in Path(f.filename).parts[-4:-1]
        and "chipfit/" not in f.filename
    ]
    if not own:
        return ""
    f = own[-1]
    line = (f.line or linecache.getline(f.filename, f.lineno or 0)).strip()
    return f"{f.filename}:{f.lineno}, in {f.name}: {line}"


def _describe(args: Any, kwargs: Any) -> str:
    def one(x: Any) -> str:
        return (
            f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        )

    return ", ".join([one(a) for a in args] + [f"{k}={one(v)}" for k, v in kwargs.items()]) or "no input"


def _needs_functional(graph: torch.fx.Graph) -> bool:
    """Whether an in-place operator writes through a view, so that renaming it to its functional form would lose the write."""
    for n in graph.nodes:
        if (
            n.op != "call_function"
            or not isinstance(n.target, torch._ops.OpOverload)
            or not n.target._schema.is_mutable
        ):
            continue
        name = n.target._schema.name.partition("::")[2]
        target = n.args[0] if n.args and isinstance(n.args[0], torch.fx.Node) else None
        functional = name.endswith("_") and hasattr(aten, name[:-1])
        views = target is not None and (_is_view(target) or any(_is_view(u) for u in target.users))
        if not functional or target is None or views or target.op == "placeholder":
            return True
    return False


def _is_view(n: torch.fx.Node) -> bool:
    if n.target is operator.getitem:
        return isinstance(n.args[0], torch.fx.Node) and _is_view(n.args[0])
    return isinstance(n.target, torch._ops.OpOverload) and n.target._schema.name.partition("::")[2] in _VIEWS


class _Capture:
    """State of one reading: the growing Graph and what each fx node became."""

    def __init__(
        self, exported: torch.export.ExportedProgram, model: torch.nn.Module, call: Any, example_out: Any
    ) -> None:
        self.ep, self.model, self.call, self.example_out = exported, model, call, example_out
        self.graph = Graph([], [], [], {}, {})
        self.env: dict[torch.fx.Node, Any] = {}  #: value name, tuple of them, or a Python constant
        self.modules = dict(model.named_modules())
        self.names: set[str] = set()
        self.latest: dict[str, str] = {}  #: value -> the value that an in-place operator replaced it by

    # ---- reading

    def read(self) -> Graph:
        self._weights()
        specs = {s.arg.name: s for s in self.ep.graph_signature.input_specs}
        leaf = 0
        positions: list[int] = []
        for n in self.ep.graph.nodes:
            if n.op == "placeholder":
                s = specs[n.name]
                if s.kind is InputKind.USER_INPUT:
                    value = n.meta.get("val")
                    if isinstance(value, torch.Tensor):
                        self._value(n.name, value)
                        self.graph.inputs.append(n.name)
                        positions.append(leaf)
                        self.env[n] = n.name
                    else:
                        self.env[n] = getattr(s.arg, "value", value)
                    leaf += 1
                else:
                    self.env[n] = self._tied[s.target]
            elif n.op == "call_function":
                self._call(n)
            elif n.op == "get_attr":
                thing = operator.attrgetter(n.target)(self.ep.graph_module)
                self.env[n] = self._constant(n.target, thing) if isinstance(thing, torch.Tensor) else thing
            elif n.op == "output":
                self._output(n)
        args, kwargs = self.call
        leaves, tree = pytree.tree_flatten((args, kwargs))
        self.graph.in_spec = json.dumps(
            {
                **dump_tree(tree, (args, kwargs)),
                "args": len(args),
                "kwargs": list(kwargs),
                "leaves": len(leaves),
                "tensors": positions,
                "names": list(inspect.signature(self.model.forward).parameters)[: len(args)],
            }
        )
        self.graph.example = tuple(leaves[i] for i in positions)
        self._drop_dead()
        return self.graph

    def _weights(self) -> None:
        """Every entry of the state dict, plus constants; a tensor that is tied keeps its first name in the nodes."""
        trainable = {n for n, _ in self.model.named_parameters(remove_duplicate=False)}
        first: dict[int, str] = {}
        self._tied: dict[str, str] = {}
        table = {**self.ep.state_dict, **{k: v for k, v in self.ep.constants.items() if isinstance(v, torch.Tensor)}}
        own = {k for k, _ in self.model.named_parameters(remove_duplicate=False)} | {
            k for k, _ in self.model.named_buffers(remove_duplicate=False)
        }
        for name, t in table.items():
            shared = t.detach() if isinstance(t, torch.nn.Parameter) else t
            key = id(t)
            self._tied[name] = first.setdefault(key, name)
            same = self.graph.weights.get(first[key])
            self.graph.weights[name] = same if same is not None else shared
            if name in trainable:
                self.graph.trainable.add(name)
        for name in own - set(table):  # entries that the forward pass does not read
            t = operator.attrgetter(name)(self.model)
            self.graph.weights[name] = t.detach().clone()

    def _value(self, name: str, like: Any) -> str:
        if isinstance(like, torch.Tensor):
            shape = tuple(int(s) if isinstance(s, int) else None for s in like.shape)
            self.graph.values[name] = Value(name, shape, str(like.dtype).removeprefix("torch."))
        else:
            self.graph.values[name] = Value(name, (), "int")
        return name

    def _constant(self, name: str, t: torch.Tensor) -> str:
        self.graph.weights.setdefault(name, t.detach().clone())
        return name

    def scalar(self, near: str, value: float, like: torch.Tensor) -> str:
        """A Python number as a 0-d weight beside the node `near`."""
        name = f"{near}.scalar"
        while name in self.graph.weights:
            name += "_"
        self.graph.weights[name] = torch.tensor(
            value, dtype=like.dtype if like.dtype.is_floating_point or isinstance(value, int) else torch.float32
        )
        return name

    def _origin(self, n: torch.fx.Node) -> tuple[str, str, str]:
        """(layer path, layer type, file:line) of an fx node."""
        stack = n.meta.get("nn_module_stack") or {}
        path = next(reversed(stack.values()))[0] if stack else ""
        path = path.replace("L['self'].", "").replace("L['self']", "").partition("@")[0]
        module = self.modules.get(path)
        kind = type(module).__name__ if module is not None else ""
        if module is None or any(True for _ in module.children()) or path == "":
            fn = n.meta.get("torch_fn")
            kind = fn[1].rpartition(".")[2] if fn else kind
        source = ""
        for line in (n.meta.get("stack_trace") or "").splitlines():
            line = line.strip()
            if line.startswith('File "') and _TORCH not in line:
                file, _, rest = line[6:].partition('", line ')
                source = f"{file}:{rest.partition(',')[0]}"
        return path, kind, source

    def _settings(self, n: torch.fx.Node, layer: str, kind: str) -> dict[str, Any]:
        """What a filter may ask: constructor arguments of PyTorch's own module, else the arguments of the call."""
        module = self.modules.get(layer)
        if module is not None and type(module).__name__ == kind:
            return module_settings(module)
        if not isinstance(n.target, torch._ops.OpOverload):
            return {}
        known = {k: v for k, v in _bind(n).items() if not isinstance(v, torch.fx.Node)}
        return {
            k: plain(v)
            for k, v in known.items()
            if not isinstance(v, (list, tuple)) or not any(isinstance(i, torch.fx.Node) for i in v)
        }

    def emit(
        self,
        n: torch.fx.Node,
        op: str,
        inputs: Sequence[str | None],
        attrs: dict[str, Any] | None = None,
        like: Any = None,
        name: str = "",
    ) -> str:
        """Append a node with one output; returns its value."""
        return self.emit_many(n, op, inputs, attrs or {}, [n.meta["val"] if like is None else like], name)[0]

    def emit_many(
        self,
        n: torch.fx.Node,
        op: str,
        inputs: Sequence[str | None],
        attrs: dict[str, Any],
        likes: Sequence[Any],
        name: str = "",
    ) -> list[str]:
        name = self._unique(name or n.name)
        layer, kind, source = self._origin(n)
        config = self._settings(n, layer, kind)
        outputs = [name] if len(likes) == 1 else [self._unique(f"{name}.{i}") for i in range(len(likes))]
        for o, like in zip(outputs, likes, strict=True):
            self._value(o, like)
        ins = list(inputs)
        while ins and ins[-1] is None:
            ins.pop()
        self.graph.nodes.append(Node(name, op, tuple(ins), tuple(outputs), attrs, layer, kind, source, config))
        return outputs

    def _unique(self, name: str) -> str:
        base, k = name, 1
        while name in self.names or name in self.graph.values or name in self.graph.weights:
            name, k = f"{base}_{k}", k + 1
        self.names.add(name)
        return name

    def arg(self, x: Any) -> Any:
        """What an fx argument is now: value names for nodes, in-place successors resolved."""
        if isinstance(x, torch.fx.Node):
            v = self.env[x]
            while isinstance(v, str) and v in self.latest:
                v = self.latest[v]
            return v
        if isinstance(x, (list, tuple)):
            return [self.arg(i) for i in x]
        return x

    def _call(self, n: torch.fx.Node) -> None:
        if n.target is operator.getitem and isinstance(self.env.get(n.args[0]), (tuple, list)):
            self.env[n] = self.env[n.args[0]][n.args[1]]
            return
        target = str(n.target)
        if any(w in target or w in getattr(n.target, "__name__", "") for w in _NOTHING) and not n.users:
            return
        if isinstance(n.target, torch._ops.HigherOrderOperator):
            self._inline(n)
            return
        if isinstance(n.target, torch._ops.OpOverload):
            name = n.target._schema.name.partition("::")[2]
            inplace = n.target._schema.is_mutable and name.endswith("_")
            a = _bind(n)
            reader = READERS.get(name[:-1] if inplace else name)
            if reader is not None:
                try:
                    self.env[n] = reader(Reader(self, n, a))
                except Unreadable:
                    self._opaque(n)
            else:
                self._opaque(n)
            if inplace and isinstance(n.args[0], torch.fx.Node) and isinstance(self.env[n], str):
                old = self.arg(n.args[0])
                if old != self.env[n]:
                    self.latest[old] = self.env[n]
            return
        self._opaque(n)

    def _opaque(self, n: torch.fx.Node) -> None:
        """Keep an operator as it is, by name, with a template of its arguments."""
        target = n.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            name = target._schema.name.partition("::")[2]
            target = getattr(getattr(aten, name[:-1]), target._overloadname)
        inputs: list[str] = []

        def template(x: Any) -> Any:
            if isinstance(x, torch.fx.Node):
                v = self.arg(x)
                if isinstance(v, str):
                    if v not in inputs:
                        inputs.append(v)
                    return Ref(inputs.index(v))
                return [template_value(i) for i in v] if isinstance(v, (list, tuple)) else v
            if isinstance(x, (list, tuple)):
                return [template(i) for i in x]
            if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
                return {"torch": str(x).removeprefix("torch.")}
            if isinstance(x, torch.device):
                return {"torch": f"device:{x}"}
            if isinstance(x, dict):
                return {k: template(v) for k, v in x.items()}
            return x

        def template_value(v: Any) -> Any:
            if isinstance(v, str):
                if v not in inputs:
                    inputs.append(v)
                return Ref(inputs.index(v))
            return v

        attrs = {
            "target": target_name(target),
            "args": [template(x) for x in n.args],
            "kwargs": {k: template(v) for k, v in n.kwargs.items()},
        }
        val = n.meta.get("val")
        many = isinstance(val, (tuple, list))
        out = self.emit_many(n, OPAQUE, inputs, attrs, list(val) if many else [val])
        self.env[n] = tuple(out) if many else out[0]

    def _inline(self, n: torch.fx.Node) -> None:
        """wrap_with_set_grad_enabled and the like: read the inner graph in place."""
        sub = next((a for a in n.args if isinstance(a, torch.fx.Node) and a.op == "get_attr"), None)
        inner = operator.attrgetter(sub.target)(self.ep.graph_module) if sub is not None else None
        if not isinstance(inner, torch.fx.GraphModule) or "wrap" not in str(n.target):
            raise CaptureError(
                f"The model uses the control-flow operator '{n.target}'",
                where=self._origin(n)[2],
                hint="replace torch.cond / while_loop by plain tensor operations",
            )
        operands = iter(n.args[n.args.index(sub) + 1 :])
        for m in inner.graph.nodes:
            if m.op == "placeholder":
                self.env[m] = self.arg(next(operands))
            elif m.op == "call_function":
                self._call(m)
            elif m.op == "get_attr":
                self.env[m] = self._constant(m.target, operator.attrgetter(m.target)(inner))
            elif m.op == "output":
                out = [self.arg(o) for o in (m.args[0] if isinstance(m.args[0], (list, tuple)) else [m.args[0]])]
                self.env[n] = tuple(out)

    def _output(self, n: torch.fx.Node) -> None:
        leaves: list[dict[str, Any]] = []
        for spec, arg in zip(self.ep.graph_signature.output_specs, n.args[0], strict=True):
            if spec.kind is not OutputKind.USER_OUTPUT:
                continue
            v = self.arg(arg) if isinstance(arg, torch.fx.Node) else arg
            if isinstance(v, str):
                leaves.append({"output": len(self.graph.outputs)})
                self.graph.outputs.append(v)
            else:
                leaves.append({"constant": v})
        tree = self.ep.call_spec.out_spec
        self.graph.out_spec = json.dumps({**dump_tree(tree, self.example_out), "leaves": leaves})

    def _drop_dead(self) -> None:
        g = self.graph
        live = set(g.outputs)
        kept = []
        for node in reversed(g.nodes):
            if live.intersection(node.outputs):
                kept.append(node)
                live.update(i for i in node.inputs if i is not None)
            else:
                for o in node.outputs:
                    g.values.pop(o, None)
        g.nodes = kept[::-1]


def _bind(n: torch.fx.Node) -> dict[str, Any]:
    """Arguments by schema name, dropped defaults filled in."""
    out: dict[str, Any] = {}
    for i, a in enumerate(n.target._schema.arguments):
        if i < len(n.args):
            out[a.name] = n.args[i]
        elif a.name in n.kwargs:
            out[a.name] = n.kwargs[a.name]
        elif a.has_default_value():
            out[a.name] = a.default_value
    return out
