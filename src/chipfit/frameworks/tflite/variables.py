"""Variables of `.tflite` files, which keep their values from call to call, as inputs and outputs of the network."""

from typing import Any

import flatbuffers
from ai_edge_litert.schema_py_generated import BuiltinOperator

from chipfit.errors import CaptureError


def packed(table: Any) -> bytes:
    """Return the bytes of the file of a `ModelT`."""
    builder = flatbuffers.Builder()
    builder.Finish(table.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def variables_to_inputs(table: Any, where: str) -> int:
    """Turn the variables of a `ModelT` into its last inputs, and their next values into its last outputs.

    Reads and assignments disappear: operators read the latest value itself. Returns the number of variables.

    Raises:
        CaptureError: a variable does not start from zeros.
    """
    graph, codes = table.subgraphs[0], [max(c.builtinCode, c.deprecatedBuiltinCode) for c in table.operatorCodes]
    names, states, kept = dict[int, bytes](), dict[bytes, tuple[int, int]](), []
    latest: dict[int, int] = {}  #: tensor that is read from a variable -> tensor of its latest value
    for op in graph.operators if BuiltinOperator.VAR_HANDLE in codes else ():
        code, inputs = codes[op.opcodeIndex], [latest.get(int(k), int(k)) for k in op.inputs]
        if code == BuiltinOperator.VAR_HANDLE:
            names[int(op.outputs[0])] = op.builtinOptions.sharedName
        elif code == BuiltinOperator.READ_VARIABLE:
            name, read = names[inputs[0]], int(op.outputs[0])
            latest[read] = states.setdefault(name, (read, read))[1]
            graph.tensors[read].name = name
        elif code == BuiltinOperator.ASSIGN_VARIABLE:
            name = names[inputs[0]]
            states[name] = (states.get(name, inputs[1:])[0], inputs[1])
        elif code == BuiltinOperator.CALL_ONCE:
            _check_zeros(table, table.subgraphs[op.builtinOptions.initSubgraphIndex], where)
        else:
            op.inputs = inputs
            kept.append(op)
    if states:
        graph.operators, outputs = kept, [latest.get(int(k), int(k)) for k in graph.outputs]
        graph.inputs = [*graph.inputs, *(first for first, _ in states.values())]
        graph.outputs = [*outputs, *(last for _, last in states.values())]
    return len(states)


def _check_zeros(table: Any, graph: Any, where: str) -> None:
    """Check that a subgraph sets variables to constants that stand for zeros."""
    for value in (graph.tensors[op.inputs[1]] for op in graph.operators if len(op.inputs) > 1):
        data, q = table.buffers[value.buffer].data, value.quantization
        zero = 0 if q is None or q.zeroPoint is None else int(q.zeroPoint[0])
        if data is None or (data != zero % 256).any():
            hint = "start from the model that the file was converted from"
            raise CaptureError(
                "A variable does not start from zeros", where=where, got=value.name.decode(errors="replace"), hint=hint
            )
