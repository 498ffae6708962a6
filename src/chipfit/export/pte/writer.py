"""Writer of ExecuTorch programs: a Graph under a Plan, lowered to XNNPACK where its partitioner takes the operators."""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from chipfit.engine.types import dtype_of
from chipfit.errors import ExportError, UnsupportedError, short_message
from chipfit.export.pte.notes import notes_of
from chipfit.export.pte.program import QuantizedProgram
from chipfit.files import write_atomically
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.plan.tables import with_integers
from chipfit.pte_file.container import NOTES_KEY


def export_pte(graph: Graph, plan: Plan | None, path: str | Path, *, batch: int = 1) -> Path:
    """Write the model to `path`.

    Args:
        graph, plan: the model; without a plan the float network is written.
        path: the `.pte` file; it appears complete or not at all.
        batch: number of samples in one call, fixed in the file.

    Raises:
        UnsupportedError: open sizes beside the batch; formats that the file cannot hold.
        ExportError: ExecuTorch cannot write the model, or the disk refuses the file.
    """
    graph, plan = with_integers(graph, plan or Plan())
    _check(graph, plan)
    inputs = [_example(graph, i, batch) for i in graph.inputs]
    with warnings.catch_warnings(), _quiet_logs():
        warnings.simplefilter("ignore")
        content = _lowered(graph, plan, inputs)
    return write_atomically(Path(path), content)


def _check(graph: Graph, plan: Plan) -> None:
    """Check that the file can hold the sizes and formats of a model.

    Raises:
        UnsupportedError: it cannot.
    """
    if unsized := [i for i in graph.inputs if None in graph.shape(i)[1:]]:
        what = "Only the batch size can be open in the model, and other sizes of this one are open"
        shown, hint = ", ".join(f"'{i}' {list(graph.shape(i))}" for i in unsized), "quantize with batches of one size"
        raise UnsupportedError(what, got=shown, hint=f"{hint}: pad, cut or resize them")
    wrong = [t for t in plan.tensors.values() if t.grid is not None and not _holds(t.role, t.grid, t.scale)]
    if wrong:
        got = ", ".join(f"{t.role} '{t.name}' ({t.format})" for t in wrong[:8])
        allowed = "signed integers of at most 8 bits, and one scale for each value that is not a weight"
        hint = "quantize for a platform whose runtime is ExecuTorch"
        raise UnsupportedError("An ExecuTorch program cannot hold these tensors", got=got, allowed=allowed, hint=hint)


def _holds(role: str, grid: Any, scale: Any) -> bool:
    """Return whether the file can hold a tensor of this grid."""
    if role == "bias":
        return bool(grid.kind == "int")
    plain = grid.kind == "int" and grid.table is None and grid.signed and grid.bits <= 8
    return bool(plain and scale.dim() <= (2 if role == "weight" else 0))


def _example(graph: Graph, name: str, batch: int) -> torch.Tensor:
    """Return zeros of the shape of an input."""
    v = graph.values[name]
    shape = [batch if s is None else s for s in v.shape]
    return torch.zeros(shape, dtype=dtype_of(v.dtype))


def _lowered(graph: Graph, plan: Plan, inputs: Sequence[torch.Tensor]) -> bytes:
    """Return the bytes of a program, lowered.

    Raises:
        ExportError: torch or ExecuTorch refuses it.
    """
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    how = {"partitioner": [XnnpackPartitioner()], "compile_config": EdgeCompileConfig(_check_ir_validity=False)}
    rounded: dict[str, None] = {}
    program = QuantizedProgram(graph, plan, rounded.setdefault).eval()
    try:
        with torch.no_grad():
            edge = to_edge_transform_and_lower(torch.export.export(program, tuple(inputs)), **how)
        _check_delegated(edge.exported_program().graph, program)
        notes = notes_of(edge.exported_program().graph_module, program, rounded, len(inputs[0]))
        edge._named_data_store.add_named_data(NOTES_KEY, json.dumps(notes).encode())
        return bytes(edge.to_executorch().buffer)
    except ExportError:
        raise
    except Exception as e:  # the errors of both share no base
        raise ExportError(f"ExecuTorch cannot write the model: {short_message(_cause(e))}") from e


def _check_delegated(lowered: torch.fx.Graph, program: QuantizedProgram) -> None:
    """Check that no weight with a scale for each channel is read outside of XNNPACK: no kernel there can."""
    names = {key: name for name, key in program.names.items()}
    for n in lowered.nodes:
        if "dequantize_per_channel" in str(n.target):
            key = n.args[0].name.removeprefix("b_").partition("_")[0]
            layer = next((k for k in program.graph.nodes if names.get(key) in k.inputs), None)
            what = f"XNNPACK leaves '{layer.display_name if layer else key}' to kernels that read no quantized weights"
            raise ExportError(what, hint="keep this layer in float with overrides, or export another format")


def _cause(e: BaseException) -> BaseException:
    """Return the error that others were raised from."""
    return e if e.__cause__ is None else _cause(e.__cause__)


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Leave out what the libraries log on loading and lowering."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
