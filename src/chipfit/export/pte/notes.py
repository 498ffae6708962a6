"""Where an ExecuTorch program holds the tensors of a plan: notes that the file carries as named data.

A delegate's graph numbers its values and knows no names. ExecuTorch gives each operator a handle, in the order of the
program that `torch.export` returns; nodes of a delegate's graph have that of the operator that they compute.
"""

from collections.abc import Collection, Iterator
from typing import Any

from chipfit.export.pte.program import QuantizedProgram
from chipfit.graph.merged_batch import sizes_in_front
from chipfit.pte_file.container import graph_of, kind_of, tensor_of

#: a field of a kind of node -> its fields with operands, in order
_OPERANDS = {
    "filterId": ("input1Id", "filterId", "biasId"),
    "input1Id": tuple(f"input{k}Id" for k in range(1, 6)),
    "inputId": ("inputId",),
}
_FIRST = [0, 3, 1, 2]  #: axes of a value that lies channels last, channels first
_NO_HANDLE = 65535  #: of nodes that only change the layout
_IMAGES = "XNNConv2d XNNDepthwiseConv2d XNNConvTranspose2d XNNMaxPooling2d XNNAvgPooling2d XNNGlobalAvgPooling2d"
#: kinds of nodes whose 4-dimensional results lie channels last
_CHANNELS_LAST = frozenset(f"{_IMAGES} XNNStaticResizeBilinear2D XNNArgMaxPooling2d".split())


def notes_of(lowered: Any, program: QuantizedProgram, rounded: Collection[str], batch: int) -> dict[str, Any]:
    """Return the notes of a program.

    Args:
        lowered: its graph module, which calls delegates.
        rounded: values that it rounds, to one scale or row by row, in order.

    Returns:
        "tensors": quantized value, or float one that is rounded row by row -> [call of a delegate, number of the value
        in its graph, its axes in the program's order or None, shape for one call, batch axis, and L if that axis
        holds [L, samples]];
        "constants": weight or bias -> [[call, number], ...];
        "batch": number of samples in one call.
    """
    found: list[tuple[int, Any]] = [(_handle(n), None) for n in lowered.graph.nodes if _is_quantize(n)]
    constants: dict[str, list[list[int]]] = {}
    names = {key: name for name, key in program.names.items()}
    for call, (module, given) in enumerate(_delegates(lowered)):
        inside = _Delegate(module, given)
        rounding = (n for n in module.original_module.graph.nodes if _is_quantize(n))
        found += [(_handle(n), (call, *inside.value_of(n), [*n.meta["val"].shape])) for n in rounding]
        for key, number in inside.constants():
            if key in names:
                constants.setdefault(names[key], []).append([call, number])
    places = [place for _, place in sorted(found, key=lambda r: r[0])]
    tensors, front = {}, sizes_in_front(program.graph)
    if len(places) == len(rounded):
        for name, place in zip(rounded, places, strict=True):
            if place is not None and place[1] is not None:
                shape = program.graph.shape(name)
                in_front = [front[name]] if name in front else []
                tensors[name] = [*place, shape.index(None) if None in shape else 0, *in_front]
    return {"tensors": tensors, "constants": constants, "batch": batch}


def _delegates(lowered: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Return the lowered modules and the operands of each, in the order of their calls."""
    for n in lowered.graph.nodes:
        if n.op == "call_function" and n.target.__name__ == "executorch_call_delegate":
            yield getattr(lowered, n.args[0].target), [*n.args[1:]]


def _expanded(operand: Any) -> Any:
    """Return what a kernel in front of a delegate repeats for each sample, else the operand itself."""
    while operand.op == "call_function" and "expand" in str(operand.target):
        operand = operand.args[0]
    return operand


def _handle(node: Any) -> int:
    return int(node.meta.get("debug_handle") or 0)


def _is_quantize(node: Any) -> bool:
    return node.op == "call_function" and "decomposed.quantize_per_t" in str(node.target)  # per_tensor, per_token


class _Delegate:
    """The graph of a lowered module, beside the operators that it was made from and its operands."""

    def __init__(self, module: Any, given: list[Any]) -> None:
        self.module, self.graph = module.original_module, graph_of(module.processed_bytes)
        self.names = {x.name: _expanded(x).name for x in given}  #: operand -> the constant that it repeats, or itself
        self.made: dict[int, Any] = {}  #: value -> its node
        self.nodes: dict[int, list[Any]] = {}  #: handle -> nodes
        for n in self.graph.xnodes:
            self.made[n.xnodeUnion.outputId] = n
            self.nodes.setdefault(n.debugHandle, []).append(n)
        self.dims = {tensor_of(v).idOut: tensor_of(v).dims for v in self.graph.xvalues}
        self.quantized = {tensor_of(v).idOut for v in self.graph.xvalues if hasattr(v.xvalueUnion, "quantParams")}

    def value_of(self, quantize: Any) -> tuple[int | None, list[int] | None]:
        """Return the value that an operator rounds, and its form; None if there is none.

        The value of one that rounds row by row is still in float. Any other is a node of its own, or part of the node
        that computes what it rounds. A permutation that only undoes a change of layout has no node.
        """
        node, undone = quantize, list[int]()
        if "per_token" in str(node.target):
            read = [n.xnodeUnion.inputId for n in self.nodes.get(_handle(node), ())]
            return (read[0], self._form(read[0])) if read else (None, None)
        while getattr(node, "op", "") == "call_function":
            found = [n.xnodeUnion.outputId for n in self.nodes.get(_handle(node), ()) if _handle(node) != _NO_HANDLE]
            found = [k for k in found if k in self.quantized]
            if found:
                form = self._form(found[-1]) or [*range(len(undone))]
                if undone:
                    return found[-1], [form[axis] for axis in undone]
                return found[-1], self._form(found[-1]) or self._form_of_input(found[-1], node)
            if "permute" in str(node.target):
                undone = [node.args[1][axis] for axis in undone] if undone else [*node.args[1]]
            node = node.args[0]
        return None, None

    def _form(self, number: int) -> list[int] | None:
        """Return the program's axes of a value in the order of the graph's; None if they are equal."""
        while (node := self.made.get(number)) is not None:
            kind, of = kind_of(node), node.xnodeUnion
            if kind == "XNNStaticTranspose" and node.debugHandle == _NO_HANDLE:
                return _FIRST if [*of.perm] == [0, 2, 3, 1] else None
            if kind in _CHANNELS_LAST or kind in ("XNNStaticReshape", "XNNFullyConnected"):
                return _FIRST if kind in _CHANNELS_LAST else None
            number = of.inputId if hasattr(of, "inputId") else of.input1Id
        return None

    def _form_of_input(self, number: int, node: Any) -> list[int] | None:
        """Return the axes of a value that a delegate reads channels last, from a kernel outside, by its sizes."""
        dims, shape = [int(d) for d in self.dims[number]], [*node.meta["val"].shape]
        return _FIRST if len(shape) == 4 and dims != shape and [dims[k] for k in _FIRST] == shape else None

    def _source(self, number: int) -> int:
        """Return the constant of which a value is another layout."""
        while number in self.made and kind_of(self.made[number]) in ("XNNStaticTranspose", "XNNStaticReshape"):
            number = self.made[number].xnodeUnion.inputId
        return number

    def constants(self) -> Iterator[tuple[str, int]]:
        """Return keys of constants that operators read, each with the number of its value.

        A constant is a placeholder: "b_" and the name of a buffer, which begins with the key.
        """
        for node in self.module.graph.nodes:
            for made in self.nodes.get(_handle(node), ()) if node.op == "call_function" else ():
                fields = next((names for own, names in _OPERANDS.items() if hasattr(made.xnodeUnion, own)), ())
                operands = node.args[0] if isinstance(node.args[0], list) else node.args  # of a concatenation
                for operand, field in zip(operands, fields, strict=False):
                    while getattr(operand, "op", "") == "call_function" and "dequantize" in str(operand.target):
                        operand = operand.args[0]
                    if getattr(operand, "op", "") == "placeholder" and hasattr(made.xnodeUnion, field):
                        number = self._source(getattr(made.xnodeUnion, field))
                        name = self.names.get(operand.name, operand.name)
                        yield name.removeprefix("b_").partition("_")[0], number
