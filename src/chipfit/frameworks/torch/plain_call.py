"""The plain call of the user's model: in eval mode, without gradients, in the model's own number types."""

import json
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from chipfit.engine.memory import memory_errors
from chipfit.engine.opaque import draws
from chipfit.engine.run import first_deviation
from chipfit.engine.trees import batch_axes, flatten_inputs
from chipfit.engine.types import describe_value, dtype_of
from chipfit.errors import MemoryExceeded, RefusedCall, raise_bug, short_message
from chipfit.frameworks.torch.packed import padded_sequences
from chipfit.frameworks.torch.program import SHORT, register_dataclasses, users_line, without_short_types
from chipfit.graph.ir import OPAQUE, Graph

#: samples on which graph and model are compared
_SAMPLES = 2
#: tolerated difference of results in a short float type, in steps of that type at the largest result
_STEPS = 16
#: beginning of the note that a model computes in other types than float32
CAST = "warning: the model computes in "
_OTHER = "warning: in eval mode under torch.no_grad(), the model returns other numbers than the captured network"
_FAST_PATH = (
    "without gradients, PyTorch computes nn.TransformerEncoder by another path, which returns zeros where "
    "src_key_padding_mask hides a word; torch.backends.mha.set_fastpath_enabled(False) turns it off"
)
_ALL_STEPS = (
    "pad_packed_sequence returns all steps, in the model only those of the longest sequence of a batch: "
    "total_length= lets the model return all, too"
)


def compare_with_plain_call(graph: Graph, model: torch.nn.Module, call: Any) -> None:
    """Let results of a graph have the model's number types; note where the model returns other numbers.

    Args:
        model: a copy of the user's model in eval mode, in its own number types.
        call: (args, kwargs) of the example call.
    """
    try:
        args, kwargs = call = _few_samples(graph, call)
    except TypeError:  # the device lacks a type of the example, as MPS lacks float64: no plain call takes it
        return
    with torch.random.fork_rng(devices=[]):
        try:
            want = run_example(model, args, kwargs)
        except RefusedCall:  # on this processor, the model runs in float32 alone
            return
        _set_types(graph, want)
        if found := _deviation(graph, call, want):
            if any(n.operand("lengths") is not None for n in graph.nodes):
                with padded_sequences(model):
                    padded = run_example(model, args, kwargs)
                if _deviation(graph, call, padded) is None:
                    graph.notes.append(_ALL_STEPS)
                    return
            name, off = found
            distance = f"{off:.3g}" if isinstance(off, float) else off
            graph.notes.append(f"{_OTHER}: output '{name}' is off by {distance}{_cause(graph, model, call, want)}")


def run_example(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the model as the user would, and register the user's dataclasses with pytree.

    Raises:
        RefusedCall: The model fails.
        MemoryExceeded: The device ran out of memory.
    """
    try:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        device = tensors[0].device if tensors else None
        with torch.no_grad(), memory_errors(device, [x.shape for x in tensors]):
            given = pytree.tree_map(lambda x: x, (args, kwargs))  # the model may change its dictionaries and lists
            out = model(*given[0], **given[1])
    except MemoryExceeded:
        raise
    except Exception as e:  # the user's code may raise anything
        raise_bug(e)
        shown = [describe_value(a) for a in args] + [f"{k}={describe_value(v)}" for k, v in kwargs.items()]
        hint = "call the model on this input yourself, in eval mode, and correct the input or the model"
        what = f"The model fails on the example input: {short_message(e)}"
        raise RefusedCall(what, where=users_line(e), got=", ".join(shown) or "no input", hint=hint) from e
    register_dataclasses(out)
    return out


def run_in_float32(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a float32 copy of the model without its casts to shorter float types; raises as `run_example`."""
    with _InFloat32():
        return run_example(model, args, kwargs)


class _Handler:
    """The handler of dispatched calls, apart from the mode: for a method of the mode, torch would load its compiler."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = without_short_types((args, kwargs or {}))
        return func(*args, **kwargs)


class _InFloat32(_Handler, TorchDispatchMode):
    """A mode in which shorter float types are float32."""

    supports_higher_order_operators = True  #: translation refuses control flow, by the user's line


def _few_samples(graph: Graph, call: Any) -> Any:
    """Return a call with the first samples, where the graph's batch is open, on the graph's device."""
    leaves, tree = pytree.tree_flatten(call)
    places = dict(zip(graph.inputs, json.loads(graph.in_spec)["tensors"], strict=True))
    leaves = [x.detach().to(graph.device) if isinstance(x, torch.Tensor) else x for x in leaves]
    for name, axis in batch_axes(graph).items():
        x = leaves[places[name]]
        leaves[places[name]] = x.narrow(axis, 0, min(_SAMPLES, x.shape[axis]))
    return pytree.tree_unflatten(leaves, tree)


def _set_types(graph: Graph, want: Any) -> None:
    """Enter the float types that the model returns, where they are not the graph's."""
    spec = json.loads(graph.out_spec)
    for leaf, x in zip(spec["leaves"], pytree.tree_leaves(want), strict=False):
        if "output" in leaf and isinstance(x, torch.Tensor) and x.is_floating_point():
            name = graph.outputs[leaf["output"]]
            own = graph.weights[name].dtype if name in graph.weights else dtype_of(graph.values[name].dtype)
            if x.dtype != own:
                leaf["dtype"] = str(x.dtype).removeprefix("torch.")
    graph.out_spec = json.dumps(spec)


def _deviation(graph: Graph, call: Any, want: Any) -> tuple[str, Any] | None:
    """Return an output that deviates from the model's and its distance, beyond what the model's float types round."""
    results = [x for x in pytree.tree_leaves(want) if isinstance(x, torch.Tensor)]
    if len(results) != len(graph.outputs) or any(x.is_nested for x in results):
        return graph.outputs[0], f"{len(results)} results in place of {len(graph.outputs)}"
    inputs = flatten_inputs(graph, *pytree.tree_map_only(torch.Tensor, in_float32, call))
    floats = {t.dtype for t in (*results, *pytree.tree_leaves(call)) if torch.is_tensor(t) and t.is_floating_point()}
    floats |= {t for t in SHORT for note in graph.notes if note.startswith(CAST) and str(t)[6:] in note}
    short = max((torch.finfo(t).eps for t in floats), default=0.0)
    loose = {} if short < 1e-6 else {"tolerance": _STEPS * short}
    return first_deviation(graph, inputs, results, **loose)


def in_float32(x: torch.Tensor) -> torch.Tensor:
    """Return floats as float32, as a tensor object of its own: an object given twice would be one input."""
    return x.detach().float() if x.is_floating_point() else x.detach()


def _cause(graph: Graph, model: torch.nn.Module, call: Any, want: Any) -> str:
    """Return why a model returns other numbers than the graph, where that is known."""
    again = run_example(model, *call)
    pairs = zip(pytree.tree_leaves(want), pytree.tree_leaves(again), strict=True)
    if not all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor)):
        drawn = ", ".join(repr(n.display_name) for n in graph.nodes if n.op == OPAQUE and draws(n.attrs["target"]))
        return f"; it returns other numbers in every call{f': {drawn} draws them' if drawn else ''}"
    enabled = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        slow = run_example(model, *call)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
    return f": {_FAST_PATH}" if enabled and _deviation(graph, call, slow) is None else ""
