"""Record a PyTorch module's program by watching it run, and once more for each open size with another size.

The recorded calls are those that `torch.export` finds, without its tracer, which takes a second to load and another
second for a medium-sized network. In inference mode, no call is decomposed before a dispatch mode sees it. Where two
runs differ, the cause is the size in which their inputs differ: the batch, or a size that differs among examples. A
tensor from elsewhere (an attribute of a module, Python numbers) is a constant if all runs have the same. Where a run
could hide something (the model reads values of its inputs, computes with sizes, writes state) recording raises
`Unrecordable`, and the model is left to `torch.export`, where only the batch is open.
"""

import inspect
import itertools
import operator
import re
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from chipfit.engine.process import set_torch_states, torch_states
from chipfit.frameworks.torch.decompositions import decomposition_of
from chipfit.frameworks.torch.packed import padded_sequences
from chipfit.frameworks.torch.program import (
    SHORT,
    TORCH,
    OpenSize,
    Program,
    SymbolicTensor,
    Unrecordable,
    exporting,
    needs_functionalization,
    register_dataclasses,
    symbolic,
    without_short_types,
    writes_shared_memory,
)
from chipfit.frameworks.torch.tied_axes import TiedAxes, batch_places, ways
from chipfit.frameworks.torch.torchscript import ScriptedModule

#: functions that read metadata of tensors and not their values, besides properties; and functions without effect here
_METADATA = """
    size stride dim ndimension numel nelement element_size storage_offset is_floating_point is_complex is_signed
    is_contiguous is_same_size get_device type __len__ result_type can_cast promote_types _assert _set_grad_enabled
"""
_CONVOLUTIONS = torch.ops.aten.conv1d, torch.ops.aten.conv2d, torch.ops.aten.conv3d
#: operators that return a number of a tensor, and functions that call them
_READS = {torch.ops.aten.item.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default}
_READERS = "__bool__ __int__ __float__ __index__ item equal is_nonzero".split()
#: operators that take shape and type of a tensor only
_FILLED = "new_zeros new_ones new_full zeros_like ones_like full_like".split()
#: tags of operators whose result depends on values
_VALUE_DEPENDENT = torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output


def record(
    model: torch.nn.Module, args: Any, kwargs: Any, sizes: Sequence[TiedAxes] | None = None, folds: bool = False
) -> tuple[Program, Any]:
    """Return the program of a model, and the model's result for the example.

    Args:
        model: a copy, which gets hooks and whose state the runs may change.
        args, kwargs: tensors and constants, in any structure.
        sizes: the sizes that stay open; by default the batch, of at least two rows.
        folds: what depends neither on values of inputs nor on weights is computed, and not recorded.

    Raises:
        Unrecordable: Watching the runs does not show what the model computes, or the model raises an exception.
    """
    sizes = next(ways([(args, kwargs)])) if sizes is None else sizes
    leaves, tree = pytree.tree_flatten((args, kwargs))
    names, modules = _names(model, args, kwargs), [*model.named_modules(remove_duplicate=False)]
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if (
        not all(type(x) is torch.Tensor and x.layout is torch.strided for x in tensors)
        or not all(isinstance(x, (torch.Tensor, bool, int, float, str, type(None))) for x in leaves)
        or not any(x.dim() for x in tensors)
        or len({*names}) < len(leaves)
        or any(_has_own_trace(m) for _, m in modules)
    ):
        raise Unrecordable
    path, paths = _Path(_attributes(modules)), dict[int, list[str]]()
    for name, m in modules:
        paths.setdefault(id(m), []).append(name)
    for m in model.modules():
        path.track(m, paths[id(m)])
        if isinstance(m, ScriptedModule):
            path.programs |= {name: m.paths_of_tensors() for name in paths[id(m)]}
    every = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    stored = model.state_dict(keep_vars=True)
    weights = dict(sorted(chain(*every), key=lambda item: item[0] not in stored))
    random_states = torch_states()
    folds = folds or bool(path.programs)  # TorchScript computes with sizes by operators
    first = _Run(names, weights, path, folds)
    out = first.watch(model, leaves, tree)
    if not all(map(torch.equal, random_states, torch_states())):
        set_torch_states(random_states)
        raise Unrecordable
    for k, size in enumerate(sizes, 1):
        run = _Run(names, weights, path, folds, size.old, size.new, first)
        run.watch(model, size.resized(leaves), tree)
        first.merge(run, k)
    first.drop_unused()
    constants = first.constants_by_name(path.attributes, _attributes(modules))
    weights = {**{name: w for name, w in weights.items() if name in stored}, **constants, **weights}
    more: dict[str, Any] = {"short": frozenset(first.short), "batch": batch_places(sizes)}
    return Program(
        first.graph, None, weights, first.weight_of, first.inputs, first.results, first.out_tree, **more
    ), out


def _names(model: torch.nn.Module, args: Any, kwargs: Any) -> list[str]:
    """Return the names of all leaves of a call, as `torch.export` makes them of parameters and places in containers.

    Raises:
        Unrecordable: The model takes other arguments, or has no signature.
    """
    try:
        signature = inspect.signature(model.forward)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError) as e:
        raise Unrecordable from e
    positional: list[str] = []
    for name, value in bound.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            positional += [f"{name}_{k}" for k in range(len(value))]
        else:
            positional.append(name)
    names = []
    for name, value in zip((*positional[: len(args)], *kwargs), (*args, *kwargs.values()), strict=True):
        for keys, _ in pytree.tree_flatten_with_path(value)[0]:
            path = "_".join((name, *re.findall(r"\w+", pytree.keystr(keys))))
            names.append(re.sub("[^a-zA-Z0-9]", "_", path).lower())
    return names


def _attributes(modules: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that modules hold as plain attributes, by path."""
    held = ((f"{path}.{k}".lstrip("."), v) for path, m in modules for k, v in vars(m).items())
    return {name: v for name, v in held if isinstance(v, torch.Tensor)}


def _has_own_trace(m: torch.nn.Module) -> bool:
    """Return whether the module is a traced program, whose calls carry their own origins."""
    compiled = type(m).__module__.startswith("torch._dynamo") or isinstance(m, torch.jit.ScriptModule)
    return compiled or isinstance(getattr(m, "graph", None), torch.fx.Graph)


class _Path(list[str]):
    """The paths of the modules that run now; the innermost is last.

    Args:
        attributes: tensors that modules hold as plain attributes, by path.
    """

    def __init__(self, attributes: dict[str, torch.Tensor]) -> None:
        self.attributes = attributes
        self.seen = set[str]()  #: those that were entered in this run
        self.programs: dict[str, dict[int, str]] = {}  #: path of a TorchScript program -> paths of tensors inside

    def track(self, m: torch.nn.Module, names: Sequence[str]) -> None:
        """Keep the path of a module here while it runs: the first one inside of the module around it that is new."""

        def enter(*_: Any) -> None:
            around = self[-1] if self else ""
            inside = [n for n in names if n.rpartition(".")[0] == around] or [
                n for n in names if not around or n.startswith(f"{around}.")
            ]
            self.append(next((n for n in inside if n not in self.seen), (inside or names)[0]))
            self.seen.add(self[-1])

        def leave(*_: Any) -> None:
            self.pop()

        m.register_forward_pre_hook(enter, prepend=True)
        m.register_forward_hook(leave)


class _Size(int):
    """A size that depends linearly on the open size of a run: value = slope * open size + intercept.

    Sums of sizes, products with constants, and divisions that leave no rest are sizes too. Sizes with one slope compare
    as numbers. Any other operation could give another answer for another batch.
    """

    run: "_Run"
    slope: Fraction
    __hash__ = None  # type: ignore[assignment]  # as a symbol: a cache by sizes computes anew

    @property
    def intercept(self) -> Fraction:
        """The size for an open size of 0."""
        return int.__int__(self) - self.slope * self.run.new


_COMPARISONS = "lt le gt ge eq ne".split()


def _size_method(name: str) -> Callable[..., Any]:
    """Return the method of `_Size` that replaces the one of int."""
    plain = getattr(int, f"__{name}__")

    def method(size: _Size, *operands: Any) -> Any:
        other = operands[0] if len(operands) == 1 else None
        slope: Any = None
        if isinstance(other, int):
            other_slope = other.slope if type(other) is _Size else 0
            at_least_two = size.slope >= 1 and size.intercept >= 0  # tracers take an open size as 2 or more
            if name in _COMPARISONS and (other_slope == size.slope or (other < 2 and not other_slope and at_least_two)):
                return plain(size, other)
            if name in ("add", "radd", "sub", "rsub"):
                differences = {"sub": size.slope - other_slope, "rsub": other_slope - size.slope}
                slope = differences.get(name, size.slope + other_slope)
            elif name in ("mul", "rmul") and not other_slope and other:
                slope = size.slope * other
            elif name == "floordiv" and not other_slope and other and not size.intercept and not size.slope % other:
                slope = size.slope // other
            elif name == "mod" and not other_slope and other and not size.slope % other:
                slope = 0
        return size.run.give_up() if slope is None else size.run.size(plain(size, *operands), slope)

    return method


for _name in """add radd sub rsub mul rmul floordiv rfloordiv truediv rtruediv mod rmod divmod rdivmod pow rpow lshift
        rlshift rshift rrshift and rand or ror xor rxor lt le gt ge eq ne bool float int index trunc round floor
        ceil abs neg invert""".split():
    setattr(_Size, f"__{_name}__", _size_method(_name))


class _DispatchHandler:
    """The handler of dispatched calls, apart from the mode: for a method of the mode, torch would load its compiler."""

    call: Callable[..., Any]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})


class _Run(_DispatchHandler, TorchDispatchMode):
    """One run of the model, and the calls that it makes.

    Args:
        names: the names of the inputs.
        weights: parameters and buffers by name.
        path: the paths of the modules that run now; their hooks update it.
        folds: see `record`.
        old, new: an open size in the first run and in this run.
        before: the first run; None in the first run.
    """

    def __init__(
        self, names: Any, weights: Any, path: _Path, folds: bool, old: int = 0, new: int = 0, before: Any = None
    ) -> None:
        super().__init__()
        self.path, self.folds, self.old, self.new, self.before = path, folds, old, new, before
        self.graph = torch.fx.Graph()
        self.calls = WeakIdKeyDictionary()  #: tensor -> the node that made it
        self.metadata: list[tuple[str, Any]] = []  #: (function, result) of each read of tensors' metadata
        self._last_read: tuple[Any, ...] = ()  #: the function and operands of the last read, if no call came since
        self.function: tuple[str, str] | None = None  #: the last torch function, as torch.export writes it
        self.failed = False  #: also if the model catches the exception
        self.writes = False  #: it failed at a write in place
        self.short = set[str]()  #: float types that the model casts to, read as float32
        self.used_len = False  #: the model called len() of a batch, which is a plain int and hides the open size
        self._counts: dict[str, int] = {}
        self.weight_of = {self._placeholder(t): name for name, t in weights.items()}
        self.constants: dict[str, torch.Tensor] = {}  #: placeholder -> tensor from elsewhere
        if folds:  # what modules hold may change between calls
            self.constants |= {self._placeholder(t): t for t in path.attributes.values()}
        self.names, self.inputs = names, dict[str, str]()
        self.results: list[Any] = []

    def _placeholder(self, x: Any) -> str:
        n = self.graph.placeholder(f"in{len(self.graph.nodes)}")
        n.meta |= {"val": x, "varies": False}
        if isinstance(x, torch.Tensor):
            n.meta["val"], self.calls[x] = symbolic(x), n
        return n.name

    def give_up(self) -> Any:
        self.failed = True
        raise Unrecordable

    def size(self, value: int, slope: Any) -> int:
        size = _Size(value)
        size.run, size.slope = self, slope
        return size if slope else value

    def watch(self, model: torch.nn.Module, leaves: list[Any], tree: pytree.TreeSpec) -> Any:
        """Run the model and return its result; the leaves of the call are in the order of their names."""
        placeholders = [self._placeholder(x) for x in leaves]
        named = zip(placeholders, self.names, leaves, strict=True)
        self.inputs = {placeholder: name for placeholder, name, x in named if isinstance(x, torch.Tensor)}
        for x in leaves:
            if isinstance(x, torch.Tensor):
                self.calls[x].meta["varies"] = True
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        self.path.seen.clear()
        try:
            with torch.inference_mode(), exporting(True), padded_sequences(model), _Functions(self), self:
                out = model(*args, **kwargs)
        except Exception as e:  # the user's code may raise anything
            raise Unrecordable(self.writes) from e
        if self.path:  # left by an exception that the model caught
            raise Unrecordable
        register_dataclasses(out)
        leaves, self.out_tree = pytree.tree_flatten(out)
        self.results = [self._node_of(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        if self.failed or not all(
            isinstance(x, (torch.fx.Node, bool, int, float, str, type(None))) for x in self.results
        ):
            raise Unrecordable
        return out

    def read_metadata(self, function: Callable[..., Any], result: Any, args: Any) -> Any:
        """Return a tensor's metadata to the model, with sizes that differ from the first run as `_Size`."""
        name = function.__name__
        if args and isinstance(args[0], torch.Tensor) and args[0] in self.calls:
            self.calls[args[0]].meta["is_measured"] = True
        if name == "__setitem__" and self.folds:  # its calls have been looked at
            return result
        if name not in ("__get__", *_READERS, *_METADATA.split()):
            self.writes = name == "__setitem__"
            self.give_up()
        # a cache reads sizes again that it cannot look up
        if len(read := (function, *args)) != len(self._last_read) or not all(map(_is_same, read, self._last_read)):
            self.metadata.append((name, result))
            self._last_read = read
        k = len(self.metadata) - 1
        if self.before is None:
            return result
        old_name, old = self.before.metadata[k] if k < len(self.before.metadata) else ("", None)
        self.used_len |= name == "__len__" and old != result
        if name in _READERS and old != result:
            self.give_up()
        return self._with_open_sizes(old, result) if old_name == name else self.give_up()

    def _with_open_sizes(self, old: Any, new: Any) -> Any:
        if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
            return type(new)(self._with_open_sizes(a, b) for a, b in zip(old, new, strict=True))
        if type(old) is int and type(new) is int:
            return new if old == new else self.size(new, Fraction(new - old, self.new - self.old))
        return new if old == new else self.give_up()

    def follows_inputs(self, t: torch.Tensor) -> bool:
        """Return whether a tensor holds floats that depend on inputs."""
        return t.is_floating_point() and t in self.calls and bool(self.calls[t].meta["varies"])

    def enter_function(self, function: Callable[..., Any]) -> None:
        name = function.__name__
        self._counts[name] = self._counts.get(name, 0) + 1
        self.function = f"{name}_{self._counts[name]}", f"{type(function).__name__}.{name}"

    def call(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call, and make it."""
        self._last_read = ()
        if self.folds and self._is_constant(op, args, kwargs):
            with torch._C.DisableTorchFunction():
                return op(*args, **kwargs)
        if op in _READS:
            return self._read(op, args)
        if op.namespace == "profiler":  # names that a model gives to its parts
            return op(*args, **kwargs)
        by_integers = op is torch.ops.aten.index.Tensor and _are_integers(args[1])
        hides = any(tag in op.tags for tag in _VALUE_DEPENDENT) and not by_integers
        if self.failed or op.namespace not in ("aten", "chipfit") or hides:
            self.give_up()
        if short := {t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.dtype) and t in SHORT}:
            self.short |= {str(t).removeprefix("torch.") for t in short}
            args, kwargs = without_short_types((args, kwargs))
        if decomposed := decomposition_of(op):
            with torch._C.DisableTorchFunction(), self:
                parts = decomposed(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        given = pytree.tree_map_only(torch.Tensor, self._node_of, (args, kwargs))
        n = self.graph.create_node("call_function", op, given[0], given[1], op.overloadpacket.__name__.lower())
        path, function = self._origin(n, args)
        n.meta |= {"nn_module_stack": {"": (path, "")}, "torch_fn": function, "stack_trace": _line()}
        n.meta["varies"] = any(m.meta["varies"] for m in n.all_input_nodes)
        writes = op._schema.is_mutable
        if writes and writes_shared_memory(n):
            self.writes = True
            self.give_up()
        with torch._C.DisableTorchFunction():
            out = recorded_result(op, args, kwargs)
        if isinstance(out, torch.Tensor):
            if not writes and any(out is x for x in pytree.tree_leaves((args, kwargs))):
                out = out.detach()  # so that each result is an object of its own
            n.meta["val"], self.calls[out] = symbolic(out), n
        elif isinstance(out, (tuple, list)) and all(isinstance(t, torch.Tensor) for t in out):
            n.meta["val"] = [symbolic(t) for t in out]
            for k, t in enumerate(out):
                self.calls[t] = self.graph.call_function(operator.getitem, (n, k))
                self.calls[t].meta |= n.meta | {"val": symbolic(t)}
        elif n.target.overloadpacket.__name__ in _METADATA.split():  # which TorchScript dispatches
            given[0][0].meta["is_measured"] = True
            self.graph.erase_node(n)
        else:
            self.give_up()
        return out

    def _is_constant(self, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> bool:
        """Return whether the result of a call depends neither on values of inputs nor on weights."""
        if op.namespace != "aten":
            return False
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        return op.overloadpacket.__name__ in _FILLED or not any(t in self.calls for t in tensors)

    def _origin(self, n: torch.fx.Node, args: tuple[Any, ...]) -> tuple[str, tuple[str, str] | None]:
        """Return the path of the module that makes a call, and torch's function.

        A TorchScript program tells neither: they are the module that holds the first parameter, and the operator.
        """
        path = self.path[-1]
        if path not in self.path.programs:
            return path, self.function
        places = (self.path.programs[path].get(id(x)) for x in args if isinstance(x, torch.Tensor))
        inside = next((p for p in places if p), "")
        return ".".join(filter(None, (path, inside))), (n.name, f"aten.{n.target.overloadpacket.__name__}")

    def _read(self, op: torch._ops.OpOverload, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return a number of tensors that do not depend on inputs, such as a parameter, or a mask made here."""
        for n in map(self._node_of, tensors):
            if n.meta["varies"]:
                self.give_up()
            n.meta["is_read"] = True
        with torch._C.DisableTorchFunction():
            return op(*tensors)

    def _node_of(self, t: torch.Tensor) -> torch.fx.Node:
        """Return the node that made a tensor; one for a constant if none did, as for an attribute or a number."""
        if t not in self.calls:
            if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout is not torch.strided:
                self.give_up()
            self.constants[self._placeholder(t)] = t
        return self.calls[t]  # type: ignore[no-any-return]  # the dictionary is not typed

    def merge(self, other: "_Run", k: int) -> None:
        """Mark sizes as open that differ in the k-th further run, which must have made the same calls.

        Raises:
            Unrecordable: The other run made other calls, or returned something else.
        """
        constants = zip(self.constants.values(), other.constants.values(), strict=False)
        if (
            len(self.graph.nodes) != len(other.graph.nodes)
            or needs_functionalization(self.graph)
            or self.constants.keys() != other.constants.keys()
            or not all(a is b or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in constants)
        ):
            raise Unrecordable
        for n, m in zip(self.graph.nodes, other.graph.nodes, strict=True):
            _merged(n, m, k)
            n.args, n.kwargs = _merged(n.args, m.args, k), _merged(n.kwargs, m.kwargs, k)
            n.meta["val"] = _merged(n.meta["val"], m.meta["val"], k)
            n.meta["has_open_size"] = _is_open(n.meta["val"]) or any(i.meta["has_open_size"] for i in n.all_input_nodes)
            if n.meta["has_open_size"] and n.meta.get("is_read"):
                raise Unrecordable
        if other.used_len and any(map(_computes_with_sizes, self.graph.nodes)):
            raise Unrecordable
        results = _merged(self.results, other.results, k)
        operators = {
            n.target.overloadpacket.__name__ for n in self.graph.nodes if isinstance(n.target, torch._ops.OpOverload)
        }
        if results != self.results or self.out_tree != other.out_tree or operators.intersection(self.inputs.values()):
            raise Unrecordable

    def constants_by_name(
        self, held: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the constants by the names that `torch.export` gives them, which become those of weights.

        Args:
            held, after: tensors that modules held as attributes before and after all runs.

        Raises:
            Unrecordable: The model replaced one of them, so that it is not constant.
        """
        names, lifted = {id(t): name for name, t in held.items()}, itertools.count()
        for placeholder, t in self.constants.items():
            name = self.weight_of[placeholder] = names.get(id(t)) or f"lifted_tensor_{next(lifted)}"
            if name in held and after.get(name) is not t:
                raise Unrecordable
        return {self.weight_of[p]: t.detach().clone() for p, t in self.constants.items()}  # outside of inference mode

    def drop_unused(self) -> None:
        """Remove calls whose results nothing reads, as `torch.export` does."""
        for n in reversed(list(self.graph.nodes)):
            writes = isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
            if n.op == "call_function" and not (n.users or writes or n in self.results):
                self.graph.erase_node(n)


def _computes_with_sizes(n: torch.fx.Node) -> bool:
    """Return whether a call other than a reshape has an open size among its arguments."""
    reshapes = isinstance(n.target, torch._ops.OpOverload) and n.target.overloadpacket.__name__ in ("view", "reshape")
    return not reshapes and any(isinstance(x, OpenSize) for x in pytree.tree_leaves((n.args, n.kwargs)))


def _is_open(value: Any) -> bool:
    """Return whether a size of a result, or of one of several, is open."""
    tensors = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, SymbolicTensor)]
    return any(isinstance(size, OpenSize) for v in tensors for size in v.shape)


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two operands of reads are one object, or equal functions, numbers or names."""
    return a is b or (type(a) is type(b) and (isinstance(a, (int, str)) or callable(a)) and bool(a == b))


def _are_integers(indices: Any) -> bool:
    """Return whether indices are integers; how many elements a mask selects depends on its values."""
    return all(t is None or t.dtype not in (torch.bool, torch.uint8) for t in indices)


def _merged(a: Any, b: Any, k: int) -> Any:
    """Return the common value of two runs; an integer that differs in the k-th further run, `b`, is an `OpenSize`."""
    if isinstance(a, torch.fx.Node) and isinstance(b, torch.fx.Node) and (a.name, a.target) == (b.name, b.target):
        return a
    if isinstance(a, SymbolicTensor) and isinstance(b, SymbolicTensor):
        return SymbolicTensor(_merged(a.shape, b.shape, k), _merged(a.dtype, b.dtype, k))
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return {name: _merged(v, b[name], k) for name, v in a.items()}
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
        return type(a)([_merged(x, y, k) for x, y in zip(a, b, strict=True)])
    sizes = a.sizes if isinstance(a, OpenSize) else (a,)
    if type(sizes[0]) is type(b) and (sizes[0] is b or sizes[0] == b):
        return a
    if type(sizes[0]) is type(b) is int:
        return OpenSize((*sizes, *sizes[:1] * (k - len(sizes)), b))
    raise Unrecordable


def recorded_result(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a call, for a convolution zeros of its shape: it takes long, and values do not matter."""
    if op.overloadpacket in _CONVOLUTIONS and not kwargs:
        x, w, *bias = args[:3]
        groups, axis = args[6] if len(args) > 6 else 1, x.dim() - w.dim() + 1
        fits = (
            axis in (0, 1) and x.shape[axis] == w.shape[1] * groups and all(b is None or len(b) == len(w) for b in bias)
        )
        if fits and x.is_contiguous() and w.is_contiguous():
            out = op(x.narrow(axis, 0, 1), w[:1, :1], None, *args[3:6])
            return out.new_zeros((*out.shape[:axis], len(w), *out.shape[axis + 1 :]))
    return op(*args, **kwargs)


def _line() -> str:
    """Return the line of the innermost user's `forward` that runs now, as a traceback writes it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name != "forward" or frame.f_code.co_filename.startswith(TORCH)):
        frame = frame.f_back
    return f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in forward' if frame else ""


class _Functions(TorchFunctionMode):
    """A mode that sees torch's functions, including those that dispatch no operator."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.run.enter_function(func)
        if func is torch.Tensor.item and self.run.follows_inputs(args[0]):
            return args[0].reshape(())  # arithmetic with this tensor has the results of that with the number
        out = func(*args, **(kwargs or {}))
        if str(func).startswith("profiler."):  # overloads and packets of them have no other name in common
            return out
        many = isinstance(out, (tuple, list)) and any(isinstance(x, torch.Tensor) for x in out)
        operands = (*args, *chain.from_iterable((kwargs or {}).items()))
        return out if many or isinstance(out, torch.Tensor) else self.run.read_metadata(func, out, operands)
