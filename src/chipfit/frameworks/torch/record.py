"""From a PyTorch module to its program by watching it run, once more for each open size with another.

The calls are those that `torch.export` finds, without its tracer, which takes a second to load and another for a
middling network. In inference mode, nothing takes a call apart before a dispatch mode sees it. Where two runs differ,
the size decides in which their inputs do: the batch, or one that differs among examples. Whatever a run could hide
(values that the model looks at, sizes that it computes with, state that it writes) is `Unrecordable`, and left to
`torch.export`, where only the batch is open.
"""

import contextlib
import inspect
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from chipfit.frameworks.torch.origin import TORCH
from chipfit.frameworks.torch.program import (
    OpenSize,
    Program,
    SymbolicTensor,
    Unrecordable,
    needs_functional,
    open_axes,
    parts_of,
    register_dataclasses,
    writes_elsewhere,
)

#: what a tensor tells of itself and not of its values, properties aside; and what changes no number here
_ASKED = """
    size stride dim ndimension numel nelement element_size storage_offset is_floating_point is_complex is_signed
    is_contiguous is_same_size get_device type __len__ result_type can_cast promote_types _assert _set_grad_enabled
"""
_CONVOLUTIONS = torch.ops.aten.conv1d, torch.ops.aten.conv2d, torch.ops.aten.conv3d
_HIDES = torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output


def record(model: torch.nn.Module, args: Any, kwargs: Any, others: Sequence[Any] = ()) -> tuple[Program, Any]:
    """The program of a model, and what it returns for the example.

    Args:
        model: gets hooks; a copy, whose own state both runs may change.
        args, kwargs: tensors, with the batch on axis 0, of at least two rows.
        others: further ones, which may differ in other sizes.

    Raises:
        Unrecordable: also where the model raises something.
    """
    try:
        positional = [*inspect.signature(model.forward).bind(*args, **kwargs).arguments][: len(args)]
    except (TypeError, ValueError) as e:  # other arguments, or a function that tells none
        raise Unrecordable from e
    names = [re.sub("[^a-zA-Z0-9]", "_", k).lower() for k in (*positional, *kwargs)]
    example = [*args, *kwargs.values()]
    modules = [*model.named_modules(remove_duplicate=False)]
    if (
        not all(type(x) is torch.Tensor and x.layout is torch.strided for x in example)
        or not any(x.dim() for x in example)
        or len({*names}) < len(example)
        or len({id(m) for _, m in modules}) < len(modules)
        or any(_brings_a_program(m) for _, m in modules)
    ):
        raise Unrecordable
    path: list[str] = []
    for name, m in modules:
        _follow(name, m, path)
    every = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    stored = model.state_dict(keep_vars=True)
    weights = dict(sorted(chain(*every), key=lambda item: item[0] not in stored))
    draws = torch.get_rng_state()
    first = _Run(names, weights, path)
    out = first.through(model, args, kwargs)
    if not torch.equal(draws, torch.get_rng_state()):
        torch.set_rng_state(draws)
        raise Unrecordable
    for k, (old, new, places) in enumerate(_open(example, [[*a, *kw.values()] for a, kw in others]), 1):
        given = list(example)
        for i, axis in places:
            given[i] = given[i].index_select(axis, torch.arange(new) % old)
        run = _Run(names, weights, path, old, new, first)
        run.through(model, tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True)))
        first.join(run, k)
    first.drop_unused()
    return Program(first.graph, None, weights, first.weight_of, first.inputs, first.results, first.out_tree), out


def _open(example: Sequence[Any], others: Sequence[Sequence[Any]]) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Each open size: what it is, what else it may be, and the (input, axis) that have it; first the batch.

    Axes of several inputs have one size where they have it in all examples, those of one input never.
    """
    batch = next(len(x) for x in example if x.dim())
    found = {
        ((batch, 2 if batch > 2 else batch + 1), 0): [(i, 0) for i, x in enumerate(example) if x.shape[:1] == (batch,)]
    }
    for i, x in enumerate(example):
        own = Counter[tuple[int, ...]]()
        for axis in open_axes(x, [y[i] for y in others]):
            sizes = tuple(y[i].shape[axis] for y in (example, *others))
            own[sizes] += 1
            found.setdefault((sizes, own[sizes]), []).append((i, axis))
    return [(s[0], next(n for n in s if n != s[0]), places) for (s, _), places in found.items()]


def _brings_a_program(m: torch.nn.Module) -> bool:
    """Whether the origins of its calls are told otherwise than by where they are made."""
    compiled = type(m).__module__.startswith("torch._dynamo") or isinstance(m, torch.jit.ScriptModule)
    return compiled or isinstance(getattr(m, "graph", None), torch.fx.Graph)


def _follow(name: str, m: torch.nn.Module, path: list[str]) -> None:
    """Keep the paths of the modules that run, the innermost last."""

    def enter(*_: Any) -> None:
        path.append(name)

    def leave(*_: Any) -> None:
        path.pop()

    m.register_forward_pre_hook(enter, prepend=True)
    m.register_forward_hook(leave)


class _Size(int):
    """A size that follows the open one of a run, such as the batch, by so much for each sample.

    Sums, and products with numbers, are sizes too, and parts of what is a multiple of the batch; two that follow it
    alike compare as numbers. Anything else might turn out otherwise for another batch.
    """

    run: "_Run"
    slope: Fraction

    @property
    def rest(self) -> Fraction:
        """What it would be without samples."""
        return int.__int__(self) - self.slope * self.run.new


_COMPARED = "lt le gt ge eq ne".split()


def _computed(name: str) -> Callable[..., Any]:
    """The method of `_Size` that stands for the one of int."""
    plain = getattr(int, f"__{name}__")

    def method(size: _Size, *operands: Any) -> Any:
        other = operands[0] if len(operands) == 1 else None
        slope: Any = None
        if isinstance(other, int):
            theirs = other.slope if type(other) is _Size else 0
            several = size.slope >= 1 and size.rest >= 0  # 2 or more wherever the open size is, as tracers take it
            if name in _COMPARED and (theirs == size.slope or (other < 2 and not theirs and several)):
                return plain(size, other)
            if name in ("add", "radd", "sub", "rsub"):
                slope = {"sub": size.slope - theirs, "rsub": theirs - size.slope}.get(name, size.slope + theirs)
            elif name in ("mul", "rmul") and not theirs and other:
                slope = size.slope * other
            elif name == "floordiv" and not theirs and other and not size.rest and not size.slope % other:
                slope = size.slope // other
        return size.run.give_up() if slope is None else size.run.size(plain(size, *operands), slope)

    return method


for _name in """add radd sub rsub mul rmul floordiv rfloordiv truediv rtruediv mod rmod divmod rdivmod pow rpow lshift
        rlshift rshift rrshift and rand or ror xor rxor lt le gt ge eq ne bool hash float int index trunc round floor
        ceil abs neg invert""".split():
    setattr(_Size, f"__{_name}__", _computed(_name))


class _Calls:
    """Sees what is dispatched; apart from the mode, for which torch would load its compiler, to keep that from it."""

    call: Callable[..., Any]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})


class _Run(_Calls, TorchDispatchMode):
    """One run of the model, and the calls that it makes.

    Args:
        names: of the inputs.
        weights: parameters and buffers by name.
        path: the modules that run now, which their hooks tell.
        old, new: what an open size is in the first run, and in this one.
        before: the first run.
    """

    def __init__(self, names: Any, weights: Any, path: Any, old: int = 0, new: int = 0, before: Any = None) -> None:
        super().__init__()
        self.path, self.old, self.new, self.before = path, old, new, before
        self.graph = torch.fx.Graph()
        self.calls = WeakIdKeyDictionary()  #: tensor -> the node that made it
        self.answers: list[tuple[str, Any]] = []  #: what the model asked of tensors
        self.function: tuple[str, str] | None = None  #: torch's function that was called last, as torch.export tells it
        self.unclear = False  #: also when the model catches the exception
        self.counted = False  #: the model took the length of a batch, which Python makes a number that tells nothing
        self._counts: dict[str, int] = {}
        self.weight_of = {self._placeholder(t): name for name, t in weights.items()}
        self.inputs = dict.fromkeys(names, "")
        self.results: list[Any] = []

    def _placeholder(self, t: torch.Tensor) -> str:
        n = self.graph.placeholder(f"in{len(self.graph.nodes)}")
        n.meta["val"], self.calls[t] = _form(t), n
        return n.name

    def give_up(self) -> Any:
        self.unclear = True
        raise Unrecordable

    def size(self, value: int, slope: Any) -> int:
        size = _Size(value)
        size.run, size.slope = self, slope
        return size if slope else value

    def through(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model on tensors, in the order of the inputs' names; returns its result."""
        placeholders = [self._placeholder(x) for x in (*args, *kwargs.values())]
        self.inputs = dict(zip(placeholders, self.inputs, strict=True))
        try:
            with torch.inference_mode(), _exporting(), _Functions(self), self:
                out = model(*args, **kwargs)
        except Exception as e:  # the user's code may raise anything
            raise Unrecordable from e
        if self.path:  # left by an exception that the model caught
            raise Unrecordable
        register_dataclasses(out)
        leaves, self.out_tree = pytree.tree_flatten(out)
        self.results = [self._known(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        if self.unclear or not all(
            isinstance(x, (torch.fx.Node, bool, int, float, str, type(None))) for x in self.results
        ):
            raise Unrecordable
        return out

    def asked(self, function: Callable[..., Any], answer: Any) -> Any:
        """What the model is told of a tensor: sizes that differ from those of the run before are open."""
        name = function.__name__
        if name not in ("__get__", *_ASKED.split()):
            self.give_up()
        k = len(self.answers)
        self.answers.append((name, answer))
        if self.before is None:
            return answer
        was, old = self.before.answers[k] if k < len(self.before.answers) else ("", None)
        self.counted |= name == "__len__" and old != answer
        return self._told(old, answer) if was == name else self.give_up()

    def _told(self, old: Any, new: Any) -> Any:
        if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
            return type(new)(self._told(a, b) for a, b in zip(old, new, strict=True))
        if type(old) is int and type(new) is int:
            return new if old == new else self.size(new, Fraction(new - old, self.new - self.old))
        return new if old == new else self.give_up()

    def enter_function(self, function: Callable[..., Any]) -> None:
        name = function.__name__
        self._counts[name] = self._counts.get(name, 0) + 1
        self.function = f"{name}_{self._counts[name]}", f"{type(function).__name__}.{name}"

    def call(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a call, and make it."""
        hides = any(tag in op.tags for tag in _HIDES) and not (op is torch.ops.aten.index.Tensor and _counts(args[1]))
        if self.unclear or op.namespace != "aten" or hides:
            self.give_up()
        if parts := parts_of(op):
            with torch._C.DisableTorchFunction(), self:
                return parts(*args, **kwargs)
        known = pytree.tree_map_only(torch.Tensor, self._known, (args, kwargs))
        n = self.graph.create_node("call_function", op, known[0], known[1], op.overloadpacket.__name__.lower())
        n.meta |= {"nn_module_stack": {"": (self.path[-1], "")}, "torch_fn": self.function, "stack_trace": _line()}
        writes = op._schema.is_mutable
        if writes and writes_elsewhere(n):
            self.give_up()
        with torch._C.DisableTorchFunction():
            out = _shown(op, args, kwargs)
        if isinstance(out, torch.Tensor):
            if not writes and any(out is x for x in pytree.tree_leaves((args, kwargs))):
                out = out.detach()  # has a name of its own
            n.meta["val"], self.calls[out] = _form(out), n
        elif isinstance(out, (tuple, list)) and all(isinstance(t, torch.Tensor) for t in out):
            n.meta["val"] = [_form(t) for t in out]
            for k, t in enumerate(out):
                self.calls[t] = self.graph.call_function(operator.getitem, (n, k))
                self.calls[t].meta |= n.meta | {"val": _form(t)}
        else:
            self.give_up()
        return out

    def _known(self, t: torch.Tensor) -> torch.fx.Node:
        n: torch.fx.Node | None = self.calls.get(t)
        return self.give_up() if n is None else n

    def join(self, other: "_Run", k: int) -> None:
        """OpenSize the sizes that differ in another run, the k-th, which must have made the same calls.

        Raises:
            Unrecordable: it has not, or returned something else.
        """
        if len(self.graph.nodes) != len(other.graph.nodes) or needs_functional(self.graph):
            raise Unrecordable
        for n, m in zip(self.graph.nodes, other.graph.nodes, strict=True):
            _joined(n, m, k)
            n.args, n.kwargs = _joined(n.args, m.args, k), _joined(n.kwargs, m.kwargs, k)
            n.meta["val"] = _joined(n.meta["val"], m.meta["val"], k)
        if other.counted and any(map(_computes_with_sizes, self.graph.nodes)):
            raise Unrecordable
        results = _joined(self.results, other.results, k)
        taken = {
            n.target.overloadpacket.__name__ for n in self.graph.nodes if isinstance(n.target, torch._ops.OpOverload)
        }
        if results != self.results or self.out_tree != other.out_tree or taken.intersection(self.inputs.values()):
            raise Unrecordable

    def drop_unused(self) -> None:
        """Forget calls whose results nothing reads, as `torch.export` does."""
        for n in reversed(list(self.graph.nodes)):
            writes = isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
            if n.op == "call_function" and not (n.users or writes or n in self.results):
                self.graph.erase_node(n)


def _computes_with_sizes(n: torch.fx.Node) -> bool:
    """Whether a call is given an open size, and not to lay out what it has."""
    shapes = isinstance(n.target, torch._ops.OpOverload) and n.target.overloadpacket.__name__ in ("view", "reshape")
    return not shapes and any(isinstance(x, OpenSize) for x in pytree.tree_leaves((n.args, n.kwargs)))


def _counts(indices: Any) -> bool:
    """Whether indices are integers: how many a mask takes depends on its values."""
    return all(t is None or t.dtype not in (torch.bool, torch.uint8) for t in indices)


def _joined(a: Any, b: Any, k: int) -> Any:
    """What runs have in common, and `OpenSize` where their numbers differ; `b` is of the k-th after the first."""
    if isinstance(a, torch.fx.Node) and isinstance(b, torch.fx.Node) and (a.name, a.target) == (b.name, b.target):
        return a
    if isinstance(a, SymbolicTensor) and isinstance(b, SymbolicTensor):
        return SymbolicTensor(_joined(a.shape, b.shape, k), _joined(a.dtype, b.dtype, k))
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return {name: _joined(v, b[name], k) for name, v in a.items()}
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
        return type(a)([_joined(x, y, k) for x, y in zip(a, b, strict=True)])
    known = a.sizes if isinstance(a, OpenSize) else (a,)
    if type(known[0]) is type(b) and (known[0] is b or known[0] == b):
        return a
    if type(known[0]) is type(b) is int:
        return OpenSize((*known, *known[:1] * (k - len(known)), b))
    raise Unrecordable


def _shown(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call returns; of a convolution zeros in that shape, for it takes long and nothing may look at values."""
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


def _form(t: torch.Tensor) -> SymbolicTensor:
    return SymbolicTensor(tuple(t.shape), t.dtype)


def _line() -> str:
    """Where a module's `forward` calls, as a traceback says it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name != "forward" or frame.f_code.co_filename.startswith(TORCH)):
        frame = frame.f_back
    return f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in forward' if frame else ""


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """Tell the model that it is exported, as `torch.export` does: many then leave out looks at values."""
    flags = {name: getattr(torch.compiler, name, False) for name in ("_is_compiling_flag", "_is_exporting_flag")}
    try:
        for name in flags:
            setattr(torch.compiler, name, True)
        yield
    finally:
        for name, before in flags.items():
            setattr(torch.compiler, name, before)


class _Functions(TorchFunctionMode):
    """Sees torch's functions, with those that dispatch nothing."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.run.enter_function(func)
        out = func(*args, **(kwargs or {}))
        many = isinstance(out, (tuple, list)) and any(isinstance(x, torch.Tensor) for x in out)
        return out if many or isinstance(out, torch.Tensor) else self.run.asked(func, out)
