"""ExecuTorch with XNNPACK, in a process of its own. Tensors inside its delegates are made outputs of the file."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chipfit.errors import RuntimeUnavailable
from chipfit.files import wrap_read_errors
from chipfit.pte_file.container import PROGRAM, Container, classes, kind_of, misfit, tensor_of
from chipfit.registry import register
from chipfit.runtimes import SAMPLES, check_inputs, join_parts
from chipfit.runtimes.child import Child

NAME = "ExecuTorch"
#: XNNPACK's number of a type, of float32 and of quantized int8 -> ExecuTorch's number, and bytes of an element
_TYPES = {1: (6, 4), 3: (1, 1)}
_INPUTS = {1: np.int8, 3: np.int32, 4: np.int64, 11: np.bool_}  #: ExecuTorch's number of a type -> type; else float32
_OUTPUT = 2  #: flag of values that leave a delegate
_EXTERNAL = 1 | _OUTPUT
_OPERANDS = "with type id"  #: in lines that list operands, behind the one that names the operator


@register("runtime", "executorch", suffix=".pte", libraries=("executorch", "flatbuffers"), extra="executorch")
class ExecuTorch:
    """A loaded program; its batch size is that of the file."""

    def __init__(self, path: str | Path, tensors: Sequence[str] = ()) -> None:
        """Load `path` and make the tensors named in `tensors` readable.

        Raises:
            RuntimeUnavailable: ExecuTorch refuses the file, crashes or hangs.
        """
        with wrap_read_errors(path, RuntimeUnavailable):
            content = Path(path).read_bytes()
        self.file = Container(content)
        self.child = Child("executorch_child.py", NAME, unquoted=_OPERANDS, path=str(path))
        notes = self.file.notes()
        self._outputs, places = len(self.file.method.outputs), notes.get("tensors", {})
        #: tensor -> see `expose`
        self._exposed = expose(self.file, {name: places[name] for name in tensors if name in places})
        try:
            found = self.child.ask("load", self.file.to_bytes() if self._exposed else content)
        except RuntimeUnavailable as e:
            raise RuntimeUnavailable(f"ExecuTorch refuses the file: {e.what}", where=str(path)) from e
        self._shapes, self._types = [s for s, _ in found], [t for _, t in found]
        self.part: int | None = notes.get("batch", 1)  #: number of samples that it computes at once

    @classmethod
    def open(cls, path: Path) -> None:
        """Open a file and run it once on zeros: some kernels refuse their operands only then.

        Raises:
            RuntimeUnavailable: ExecuTorch refuses the file, crashes or hangs.
        """
        device = cls(path)
        device.run(
            [np.zeros(s, _INPUTS.get(t, np.float32)) for s, t in zip(device._shapes, device._types, strict=True)]
        )

    def run(self, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Run one batch in parts of the file's batch size; return outputs and the requested tensors by name."""
        check_inputs(inputs, {f"input {k}": [SAMPLES, *s[1:]] for k, s in enumerate(self._shapes)})
        size = self.part or len(inputs[0])
        parts = [[np.ascontiguousarray(x[k : k + size]) for x in inputs] for k in range(0, len(inputs[0]), size)]
        results = [self.child.ask("run", part) for part in parts]
        if any(len(r) != len(self.file.method.outputs) for r in results):
            raise misfit("the program returned another number of outputs than the file declares")
        out = {f"output_{k}/float": np.concatenate([r[k] for r in results]) for k in range(self._outputs)}
        for name, (k, perm, shape, axis, *front) in self._exposed.items():
            values = (r[k].transpose(perm) if perm and len(perm) == r[k].ndim else r[k] for r in results)
            out[name] = join_parts([v.reshape(shape) for v in values], axis, *front)
        return out

    def executed(self) -> Mapping[str, int]:
        """Return how often each operator runs: "XNNConv2d" and others in a delegate, "aten::elu" outside of them."""
        calls = range(len(self.file.calls))
        inside = (kind_of(n) for call in calls for n in self.file.graph(call).xnodes)
        outside = (o.name.decode() for o in self.file.kernels)
        return dict(sorted(Counter([*inside, *outside]).items()))


def expose(file: Container, places: Mapping[str, Sequence[Any]]) -> dict[str, tuple[Any, ...]]:
    """Change a program so that it returns tensors inside its delegates too.

    Args:
        places: tensor -> where it is, see `chipfit.export.pte.notes`.

    Returns:
        tensor -> its position among the outputs, and the rest of its place.

    Raises:
        RuntimeUnavailable: a place does not exist.
    """
    found, outputs = {}, dict[tuple[int, int], int]()  # (call, value) -> position
    for call in {place[0] for place in places.values()}:
        graph = file.graph(call)
        tensors = {tensor_of(v).idOut: tensor_of(v) for v in graph.xvalues}
        for number in {place[1] for place in places.values() if place[0] == call}:
            if number not in tensors:
                raise misfit(f"a delegate has no value {number}")
            outputs[call, number] = len(file.method.outputs)
            file.method.outputs = [*file.method.outputs, _external_value(file, call, graph, tensors[number])]
        file.set_graph(call, graph)
    for name, (call, number, perm, *rest) in places.items():
        position = outputs[call, number]
        order = file.method.values[int(file.method.outputs[position])].val.dimOrder
        in_order = [*order] == [*range(len(order))]  # else ExecuTorch returns the program's axes
        found[name] = position, perm if in_order else None, *rest
    return found


def _external_value(file: Container, call: int, graph: Any, tensor: Any) -> int:
    """Return the index of a program's value that holds a delegate's tensor, in memory of its own."""
    if not tensor.flags & _EXTERNAL:
        tensor.flags |= _OUTPUT
        tensor.externalId, graph.numExterns = graph.numExterns, graph.numExterns + 1
        graph.outputIds = [*graph.outputIds, tensor.idOut]
        file.calls[call].args = [*file.calls[call].args, len(file.method.values)]
        made = classes(PROGRAM[0])
        value = made.EValueT()
        value.valType, value.val = made.KernelTypes.Tensor, made.TensorT()
        value.val.scalarType, value.val.sizes = _TYPES[tensor.datatype][0], [int(d) for d in tensor.dims]
        value.val.dimOrder, value.val.allocationInfo = [*range(len(tensor.dims))], made.AllocationDetailsT()
        value.val.allocationInfo.memoryId = 1
        file.method.values.append(value)
    index = int(file.calls[call].args[tensor.externalId])
    where, sizes = file.method.values[index].val.allocationInfo, [*file.method.nonConstBufferSizes]
    where.memoryOffsetLow, where.memoryOffsetHigh = sizes[1] & 0xFFFFFFFF, sizes[1] >> 32
    sizes[1] += -(-int(np.prod(tensor.dims)) * _TYPES[tensor.datatype][1] // 64) * 64
    file.method.nonConstBufferSizes = sizes
    return index
