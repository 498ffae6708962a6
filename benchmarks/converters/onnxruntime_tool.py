"""ONNX files of chipfit and of ONNX Runtime's static quantization: QDQ, weights per channel s8, activations u8."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from benchmarks.beside_converters import BATCH, CALIBRATION, HELD_OUT
from benchmarks.converters.measure import figures, times
from benchmarks.converters.torch_networks import NETWORKS, with_statistics
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

import chipfit

Batch = tuple[torch.Tensor, ...]
#: operators of an optimised graph that read floats or integers and write integers
_TO_INTEGERS = ("QuantizeLinear", "DynamicQuantizeLinear")


def files_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the figures of both files of a network."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, batch = NETWORKS[name]
    model = with_statistics(make())
    torch.manual_seed(1)
    data, held_out = batch(CALIBRATION), batch(HELD_OUT)
    whole = lambda x: x if isinstance(x, tuple) else (x,)  # noqa: E731
    batches = [tuple(p) for p in zip(*(t.split(BATCH) for t in whole(data)))]
    tests = whole(held_out)
    with torch.no_grad():
        floats = [t.numpy() for t in whole(model(*tests))]
    made: dict[str, Any] = {"chipfit": _chipfit, "tool": _static}
    out: dict[str, Any] = {}
    sessions = {}
    for who, make_file in made.items():
        path = folder / f"{who}.onnx"
        try:
            make_file(model, batches, path)
            session, optimised = _session(path), folder / f"{who}.optimised.onnx"
            results = session.run(None, _feeds(session, tests))
            _session(path, optimised)
            out[who] = figures(results, floats, _float_operators(onnx.load(optimised)), path.stat().st_size)
            sessions[who] = session
        except Exception as e:  # what a tool cannot do is a result of the table
            out[who] = {"error": f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]}
    if len(sessions) == 2:
        ours, tool = (partial(s.run, None, _feeds(s, batches[0])) for s in sessions.values())
        out["chipfit"]["time"], out["tool"]["time"] = times(ours, tool)
    return out


def _chipfit(model: torch.nn.Module, batches: list[Batch], path: Path) -> None:
    data = [b[0] if len(b) == 1 else b for b in batches]
    chipfit.quantize(model, data, platform="ort_cpu", progress=False).export(path)


def _static(model: torch.nn.Module, batches: list[Batch], path: Path) -> None:
    plain, prepared = str(path) + ".float", str(path) + ".prepared"
    open_batch = tuple({0: torch.export.Dim("batch")} for _ in batches[0])
    torch.onnx.export(
        model, batches[0], plain, dynamo=True, verbose=False, external_data=False, dynamic_shapes=open_batch
    )
    try:
        quant_pre_process(plain, prepared)
    except Exception:  # its symbolic shapes do not know every operator
        quant_pre_process(plain, prepared, skip_symbolic_shape=True)

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.feeds = iter([_feeds(_session(Path(prepared)), b) for b in batches])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    types = {"weight_type": QuantType.QInt8, "activation_type": QuantType.QUInt8}
    quantize_static(prepared, str(path), Reader(), quant_format=QuantFormat.QDQ, per_channel=True, **types)


def _session(path: Path, optimised: Path | None = None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if optimised:
        options.optimized_model_filepath = str(optimised)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _feeds(session: ort.InferenceSession, batch: Batch) -> dict[str, np.ndarray]:
    return {i.name: t.numpy() for i, t in zip(session.get_inputs(), batch, strict=True)}


def _float_operators(model: onnx.ModelProto) -> list[str]:
    """Return the operators of an optimised graph that read floats that are not constants, and write floats."""
    floats = {i.name for i in model.graph.input if i.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
    found = []
    for n in model.graph.node:
        if n.op_type == "DequantizeLinear" or n.op_type == "MatMulIntegerToFloat":
            floats |= set(n.output)
        elif n.op_type not in _TO_INTEGERS and floats & set(n.input) and n.op_type != "Shape":
            floats |= set(n.output)
            if n.op_type not in ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"):
                found.append(n.op_type)
    return found
