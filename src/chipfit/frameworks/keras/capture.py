"""Read a Keras 3 model into a Graph, from its symbolic calls.

An operation without reader is opened: its `call` is traced on symbolic tensors, and the operations in it are read. An
operation that cannot be traced (recurrent layers, foreign code) becomes an opaque node that calls the layer.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import torch
from torch.utils import _pytree as pytree

from chipfit.engine.run import first_deviation
from chipfit.engine.trees import dump_call, dump_result
from chipfit.errors import CaptureError, raise_bug, short_message
from chipfit.frameworks.keras.backend import forward, in_float32
from chipfit.frameworks.keras.call import narrowed
from chipfit.frameworks.keras.layers import KerasActivationQuantizationHolder, KerasQuantizationWrapper
from chipfit.frameworks.keras.models import DeviceModel
from chipfit.frameworks.keras.translate import Translator, calls_before, functional, leaves
from chipfit.graph.builder import Origin
from chipfit.graph.check import check
from chipfit.graph.edit import drop_dead
from chipfit.graph.ir import Graph, Value
from chipfit.graph.removed import remember_layers_without_nodes
from chipfit.passes.layout import change_layout, keep_constant_names

_SIMULATED = KerasActivationQuantizationHolder, KerasQuantizationWrapper, DeviceModel
_READ_IN_FLOAT32 = "warning: the model computes in {}; it was read, and is simulated, in float32"


def capture(model: Any, args: Sequence[Any] = (), kwargs: Any = None, others: Sequence[Any] = ()) -> Graph:
    """Read a Keras 3 model into a Graph with channels first; inputs and outputs keep the model's layout.

    The graph computes `model(x, training=False)`. The model is not changed. Weights are named "layer/variable".

    Args:
        model: a built keras.Model: Functional, Sequential, or a subclass whose `call` can be traced.
        args, kwargs: one batch of inputs, torch tensors, in the structure of the model's inputs. It is required if the
            model does not fix the shapes of its inputs; the Graph is compared with the model on it.
        others: further batches, as (args, kwargs); sizes in which they differ stay open.

    Raises:
        CaptureError: The model cannot be read; names the layer and what to change.
    """
    _check_model(model)
    inner = functional(model)
    struct = inner._inputs_struct if inner is not None else None
    examples = [x for x in (_example(model, struct, a, k or {}) for a, k in ((args, kwargs), *others)) if x is not None]
    model, cast = _in_float32(model, *examples[:1])
    struct = functional(model)._inputs_struct if inner is not None else None
    examples = [_floats_as(struct, x) for x in examples]
    wanted = [outputs_of(model, x) for x in examples]  # before tracing, which leaves random states as they are
    graph = _with_open_batch(model, struct, examples, wanted) or _read(model, struct, examples)
    remember_layers_without_nodes(graph, _layer_classes(model))
    if cast:
        graph.notes.append(_READ_IN_FLOAT32.format(cast))
    if examples:
        graph.example = tuple(x.detach() for x in leaves(examples[0]))
    for given, want in zip(examples, wanted, strict=True):
        compare(graph, model, given, want, partial(_read_part, given))
    return graph


def _read(model: Any, struct: Any, examples: Sequence[Any], refined: bool = False) -> Graph:
    """Read a model into a graph.

    Args:
        struct: symbolic inputs of a Functional or Sequential model; None for a model with a `call` of its own.
        refined: whether `struct` has other sizes than the model was built with.
    """
    translator, inner = Translator(refined), functional(model)
    if inner is None or (len(examples) < 2 and any(None in kt.shape[1:] for kt in leaves(struct))):
        if not examples:
            hint = "give an example batch: the shapes are taken from it"
            raise CaptureError(f"The shapes of the inputs of '{model.name}' are not fixed", hint=hint)
        given = examples[0]
        struct, outputs = keras.tree.map_structure(_symbol, *examples), None
    else:
        given, outputs = examples[0] if examples else struct, inner._outputs_struct
    names = _input_names(struct if outputs is None else inner._inputs_struct, model)
    tensors = [_input(translator, n, kt, x) for n, kt, x in zip(names, leaves(struct), leaves(given), strict=True)]
    if outputs is None:
        filled = keras.tree.pack_sequence_as(struct, tensors)
        results = translator.open(model, model.call, (filled,), {}, Origin())
        if results is None:
            what = f"The model '{model.name}' cannot be traced: {translator.last_failure}"
            hint = "write its call with keras layers and keras.ops, without branches on values, "
            raise CaptureError(what, hint=hint + "or as a Functional model")
    else:
        env = {id(kt): t for kt, t in zip(leaves(inner._inputs_struct), tensors, strict=True)}
        results = keras.tree.pack_sequence_as(outputs, translator.add_calls(leaves(outputs), env, ""))
    return _finish(translator, results, struct, names)


def _layer_classes(model: Any, path: str = "") -> dict[str, str]:
    """Return path of each layer of a model, and of the models inside it -> its class."""
    out = dict[str, str]()
    for layer in (x for x in model.layers if not isinstance(x, keras.layers.InputLayer)):
        out[f"{path}{layer.name}"] = type(layer).__name__
        out |= _layer_classes(layer, f"{path}{layer.name}/") if isinstance(layer, keras.Model) else {}
    return out


def _read_part(example: Any, part: Any) -> Graph:
    """Read a Functional model that is a part of another one."""
    return _read(part, part._inputs_struct, [example])


def _with_open_batch(
    model: Any, struct: Any, examples: Sequence[Any], wanted: Sequence[Sequence[torch.Tensor]]
) -> Graph | None:
    """Read a model whose inputs fix the batch with an open one; return None where its samples depend on each other."""
    sizes = {kt.shape[:1] for kt in leaves(struct)} if struct is not None else set()
    if not examples or len(sizes) != 1 or sizes & {(), (None,)}:
        return None
    opened = keras.tree.map_structure(lambda kt: keras.KerasTensor((None, *kt.shape[1:]), dtype=kt.dtype), struct)
    try:
        graph = _read(model, opened, examples, refined=True)
    except CaptureError:  # an operation needs this batch
        return None
    if any(graph.shape(o)[:1] != (None,) for o in graph.outputs):
        return None
    alone = [x.detach()[:1] for x in leaves(examples[0])]
    return graph if first_deviation(graph, alone, [y[:1] for y in wanted[0]]) is None else None


# ---------------------------------------------------------------- the model and its inputs


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        hint = "wrap a layer: keras.Sequential([layer])"
        raise CaptureError("A Keras model is an instance of keras.Model", got=type(model).__name__, hint=hint)
    if not model.built:
        hint = "call it once on data, or load its weights, first"
        raise CaptureError(f"The model '{model.name}' has no weights yet", hint=hint)
    inside = list(model._flatten_layers())
    first = next((x for x in inside if getattr(x, "data_format", None) == "channels_first"), None)
    if first is not None:
        how = "build the model with keras.config.set_image_data_format('channels_last')"
        hint, allowed = f"{how} and copy the weights, which are the same", "data_format='channels_last'"
        raise CaptureError(f"Layer '{first.name}' works channels-first", allowed=allowed, hint=hint)
    simulated = sorted({type(x).__name__ for x in inside if isinstance(x, _SIMULATED)})
    if simulated:
        hint = "pass the float model; `result.edit(overrides)` changes a result"
        raise CaptureError("The model is quantized already", got=", ".join(simulated), hint=hint)
    for x in inside:
        if getattr(x, "stateful", False) is True:
            hint = "build it with stateful=False; chipfit.streaming makes a network of one step of it, states as inputs"
            raise CaptureError(f"Layer '{x.name}' keeps its states from call to call", got="stateful=True", hint=hint)
        if mode := getattr(x, "quantization_mode", None):
            hint = "give the float model, as it was before `model.quantize`"
            raise CaptureError(f"Layer '{x.name}' has been quantized by Keras", got=mode, hint=hint)


def _in_float32(model: Any, example: Any = None) -> tuple[Any, str]:
    """Return the model, or a float32 copy of a model in other float types, and the names of those types.

    Args:
        example: inputs with which a copy is built, if its class has no configuration of its variables.

    Raises:
        CaptureError: The model cannot be created again from its configuration, or a weight is beyond float32.
    """
    kinds = sorted({x.compute_dtype for x in model._flatten_layers() if x.variables} - {"float32"})
    if not kinds:
        return model, ""
    old = [np.asarray(w, "float64") for w in model.get_weights()]
    try:
        with in_float32():
            copied = type(model).from_config(_as_float32(model.get_config()))
            if not copied.built:
                outputs_of(copied, _floats_as(None, example))
        copied.set_weights([w.astype("float32") for w in old])
    except Exception as e:  # Keras raises many types for classes without a configuration
        raise_bug(e)
        hint = "build the model with keras.config.set_dtype_policy('float32') and load its weights"
        raise CaptureError(f"'{model.name}' computes in {', '.join(kinds)}", allowed="float32", hint=hint) from e
    both = zip(copied.weights, copied.get_weights(), old, strict=True)
    lost = [v.path for v, new, w in both if np.isinf(new).any() and not np.isinf(w).any()]
    if lost:
        raise CaptureError(f"'{lost[0]}' holds numbers outside the range of float32, in which models are read")
    return copied, " and ".join(kinds)


def _as_float32(config: Any) -> Any:
    """Return a configuration with float32 in place of every other float type and policy."""
    if isinstance(config, Mapping):
        return {k: "float32" if k == "dtype" and "float" in str(v) else _as_float32(v) for k, v in config.items()}
    return type(config)(map(_as_float32, config)) if isinstance(config, (list, tuple)) else config


def _symbol(x: torch.Tensor, *like: torch.Tensor) -> Any:
    sizes = [None if k == 0 or any(y.shape[k] != s for y in like) else s for k, s in enumerate(x.shape)]
    return keras.KerasTensor(sizes, dtype=_dtype(x))


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _floats_as(struct: Any, given: Any) -> Any:
    """Return an example on the CPU, floats in the types in which the model's inputs are read."""

    def cast(x: torch.Tensor, dtype: str) -> torch.Tensor:
        x = x.cpu()  # where the graph is; Keras moves what it is given to its own device
        return x.to(getattr(torch, dtype)) if x.is_floating_point() and "float" in dtype else x

    types = [narrowed(kt.dtype) for kt in leaves(struct)] if struct is not None else ["float32"] * len(leaves(given))
    return keras.tree.pack_sequence_as(given, [cast(x, t) for x, t in zip(leaves(given), types, strict=True)])


def _inputs_built_with(model: Any) -> int:
    """Return the number of tensors in the list that a subclassed model was built with; 0 if it took no list."""
    shapes = (model.get_build_config() or {}).get("input_shape")
    return len(shapes) if isinstance(shapes, list) and all(isinstance(s, (list, tuple)) for s in shapes) else 0


def _example(model: Any, struct: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the example in the structure of the model's inputs, without labels; None if there is no example."""
    if not args and not kwargs:
        return None
    given = dict(kwargs) if kwargs and not args else args[0]
    if isinstance(struct, (list, tuple)) and isinstance(given, torch.Tensor):
        given = list(args[: len(struct)])
    if struct is None and isinstance(given, torch.Tensor) and 1 < (built := _inputs_built_with(model)) <= len(args):
        given = list(args[:built])
    if struct is not None and isinstance(given, Mapping) and isinstance(struct, Mapping):
        given = {k: given[k] for k in struct if k in given}
    elif struct is not None and isinstance(given, Mapping) and set(names := _input_names(struct, model)) <= set(given):
        given = keras.tree.pack_sequence_as(struct, [given[n] for n in names])  # by name, as Keras takes them, too
    if struct is not None:
        want, got = len(leaves(struct)), len(leaves(given))
        if isinstance(struct, Mapping) != isinstance(given, Mapping) or want != got:
            described = f"inputs named {sorted(struct)}" if isinstance(struct, Mapping) else f"{want} inputs"
            what = "The example does not fit the model"
            hint = "a batch holds every input: give a list of such batches, or a dict of arrays by the names of inputs"
            raise CaptureError(what, got=f"{type(given).__name__} of {got}", allowed=described, hint=hint)
    if any(not isinstance(x, torch.Tensor) or x.dim() == 0 for x in leaves(given)):
        what = "The example holds something else than batches of numbers"
        raise CaptureError(what, got=str([type(x).__name__ for x in leaves(given)]))
    return given


def _input_names(struct: Any, model: Any) -> list[str]:
    by_name, several = isinstance(struct, Mapping), isinstance(struct, (list, tuple))
    nested = by_name and any(not isinstance(k, str) or len(leaves(v)) != 1 for k, v in struct.items())
    if nested or (several and any(isinstance(x, (list, tuple, Mapping)) for x in struct)):
        raise CaptureError(f"The inputs of '{model.name}' are a nested structure", hint="use one flat dict, or a list")
    if by_name:
        return sorted(struct)  # the order in which Keras flattens a dict
    kts = leaves(struct)
    made_by = [getattr(getattr(kt, "_keras_history", None), "operation", None) for kt in kts]
    numbered = ["input"] if len(kts) == 1 else [f"input_{i}" for i in range(len(kts))]
    return [name if op is None else op.name for op, name in zip(made_by, numbered, strict=True)]


# ---------------------------------------------------------------- inputs and outputs of the graph


def _input(translator: Translator, name: str, symbol: Any, given: Any) -> Value:
    """Add a graph input; data of another type than the model declares are cast, as Keras does."""
    builder = translator.builder
    declared = narrowed(symbol.dtype)
    dtype = narrowed(_dtype(given)) if isinstance(given, torch.Tensor) else declared
    dtype = declared if "float" in dtype and "float" in declared else dtype
    value = builder.value(name, symbol.shape, dtype)
    builder.graph.inputs.append(name)
    if dtype == declared:
        return value
    attrs, outs = {"dtype": declared}, [(value.shape, declared)]
    return builder.emit(Origin(), f"{name}_cast", "Cast", [name], attrs, outs)[0]


def _finish(translator: Translator, results: Any, struct: Any, names: Sequence[str]) -> Graph:
    """Add outputs and call structure to the graph, and return it with channels first."""
    graph = translator.builder.graph
    flat = leaves(results)  # Keras sorts the keys of a dict, torch does not
    for t in flat:
        if not isinstance(t, Value):
            raise CaptureError("An output of the model is not a tensor that it computes", got=type(t).__name__)
    graph.outputs = [t.name for t in flat]
    order, tree = pytree.tree_flatten(keras.tree.pack_sequence_as(results, list(range(len(flat)))))
    graph.out_spec = dump_result(pytree.tree_unflatten(order, tree), [{"output": i} for i in order], tree)
    by_name, packed = isinstance(struct, Mapping), not isinstance(struct, keras.KerasTensor)
    args, kwargs = ((), dict.fromkeys(names, 0)) if by_name else ((0,) * len(names), {})
    graph.in_spec = dump_call(args, kwargs, () if by_name else names, packed=packed)
    graph.notes += translator.notes
    graph.notes += [_READ_IN_FLOAT32.format("float64")] if translator.builder.has_float64 else []
    drop_dead(graph)
    graph.drop_empty_layers()
    check(graph, blame="capture")
    moved = change_layout(graph, "channels_first")
    keep_constant_names(moved.graph, moved.copies)
    check(moved.graph, blame="layout")
    return moved.graph


def outputs_of(model: Any, example: Any) -> list[torch.Tensor]:
    """Return the results of a model on an example.

    Raises:
        CaptureError: The model fails.
    """
    try:
        return leaves(forward(model, example))
    except Exception as e:  # the user's code may raise anything
        raise_bug(e)
        raise CaptureError(f"The model fails on the example input: {short_message(e)}") from e


def compare(graph: Graph, model: Any, example: Any, want: Sequence[torch.Tensor], read: Callable[[Any], Graph]) -> None:
    """Compare the graph with the model on an example, to find layers that compute something else when they are traced.

    Args:
        want: results of the model, from before it was traced.
        read: function that reads a part of the model into a graph.

    Raises:
        CaptureError: They compute something else, or the model fails.
    """
    found = first_deviation(graph, [x.detach() for x in leaves(example)], want)
    if found is None:
        return
    if _differ(want, outputs_of(model, example)):
        layer = _first(model, lambda part: _differ(outputs_of(part, example), outputs_of(part, example)))
        what = f"{layer} returns other numbers at each call, although it is called with training=False"
        hint = "let its `call` take the argument `training`, and draw random numbers only where it is true"
        raise CaptureError(what, hint=hint)
    inputs = [x.detach() for x in leaves(example)]
    layer = _first(model, lambda part: first_deviation(read(part), inputs, outputs_of(part, example)) is not None)
    hint = "write its `call` with keras.ops alone, without state and without branches on values"
    what = f"{layer} computes something else when it is called than when it is traced"
    raise CaptureError(what, where=f"output '{found[0]}'", got=f"deviation {found[1]}", hint=hint)


def _differ(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    same = all(x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))
    return not same


def _first(model: Any, faulty: Callable[[Any], bool]) -> str:
    """Return the name and class of the first layer whose results are faulty; of the model where it has a `call`."""
    inner, described = functional(model), f"The model '{model.name}' ({type(model).__name__})"
    if inner is None:
        return described
    calls = [c for c in calls_before(leaves(inner._outputs_struct), {}) if c.input_tensors]

    def is_faulty(call: Any) -> bool:
        try:
            return faulty(keras.Model(inner._inputs_struct, list(call.outputs)))
        except CaptureError:
            return True

    at = bisect_left(calls, True, key=is_faulty)
    if at == len(calls):
        return described
    operation = calls[at].operation
    return f"Layer '{operation.name}' ({type(operation).__name__})"
