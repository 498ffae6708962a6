"""Run files and modules in plain sessions of their runtimes, sample by sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

Sample = tuple[np.ndarray, ...]
Run = Callable[[Sample], list[np.ndarray]]


def samples(arrays: Sequence[np.ndarray], bare: Sequence[int] = ()) -> list[Sample]:
    """Return samples of one from arrays; those named `bare` are used without an axis for the batch."""
    count = len(arrays[0])
    return [tuple(x[k] if j in bare else x[k : k + 1] for j, x in enumerate(arrays)) for k in range(count)]


def stored() -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the samples of the file that GALLERY_SAMPLES names."""
    held = np.load(os.environ["GALLERY_SAMPLES"])
    count = 1 + max(int(k.partition(".")[0]) for k in held.files)
    width = len(held.files) // count
    yield from (tuple(torch.from_numpy(held[f"{k}.{j}"]) for j in range(width)) for k in range(count))


def joined(rows: Iterable[list[np.ndarray]]) -> list[np.ndarray]:
    """Return each output of all samples, the batch in front."""
    return [np.concatenate([y if y.ndim else y[None] for y in column]) for column in zip(*rows, strict=True)]


def arranged(results: list[np.ndarray], floats: list[np.ndarray]) -> list[np.ndarray]:
    """Return outputs in the order and layout of the float network's, where a file has channels last or sorts them."""
    if len(results) != len(floats) or any(r.size != f.size for r, f in zip(results, floats, strict=True)):
        left = list(results)
        results = [left.pop(next(k for k, r in enumerate(left) if r.size == f.size)) for f in floats]
    return [_in_layout(r, f.shape) for r, f in zip(results, floats, strict=True)]


def _in_layout(y: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return (
        y.transpose(0, 3, 1, 2) if y.ndim == len(shape) == 4 and y.shape == _last(shape) != shape else y.reshape(shape)
    )


def _last(shape: Sequence[int]) -> tuple[int, ...]:
    return (shape[0], *shape[2:], shape[1])


def floats_of(network: str) -> Run:
    """Return the float network of a file, or of module:factory, in its own runtime."""
    if network.endswith((".onnx", ".tflite")):
        return session(Path(network))
    if ":" in network:
        from chipfit.import_by_name import import_by_name

        module = import_by_name(network, "model", ValueError)()
        return lambda x: _flat(module(*map(torch.from_numpy, x)))
    import chipfit

    model = chipfit.load_model(network)
    return lambda x: [np.asarray(y) for y in _flat(model(x[0] if len(x) == 1 else list(x), training=False))]


def _flat(y: Any) -> list[np.ndarray]:
    if isinstance(y, torch.Tensor):
        return [y.detach().numpy()]
    return [part for v in y for part in _flat(v)] if isinstance(y, list | tuple) else [np.asarray(y)]


def session(path: Path) -> Run:
    """Return a function that runs one sample in a plain session with one thread; integers are (de)quantized here."""
    return _onnx(path) if path.suffix == ".onnx" else _tflite(path)


def opened(path: Path) -> ort.InferenceSession:
    """Return a session of an ONNX file with one thread, in which no sum of products saturates on old processors."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # as a processor with VNNI computes
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _onnx(path: Path) -> Run:
    session = opened(path)
    names = [i.name for i in session.get_inputs()]
    return lambda x: session.run(None, dict(zip(names, x, strict=True)))


def _tflite(path: Path) -> Run:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=1)
    interpreter.allocate_tensors()
    entries, ends = interpreter.get_input_details(), interpreter.get_output_details()

    def run(x: Sample) -> list[np.ndarray]:
        interpreter.reset_all_variables()  # of recurrent layers
        for entry, part in zip(entries, x, strict=True):
            if tuple(entry["shape"]) != part.shape and tuple(entry["shape"]) == _last(part.shape):
                part = part.transpose(0, 2, 3, 1)
            interpreter.set_tensor(entry["index"], codes(part, entry))
        interpreter.invoke()
        return [reals(interpreter.get_tensor(e["index"]), e) for e in ends]

    return run


def codes(x: np.ndarray, entry: dict[str, Any]) -> np.ndarray:
    scale, zero = entry["quantization"]
    if scale and np.issubdtype(entry["dtype"], np.integer):
        limits = np.iinfo(entry["dtype"])
        x = np.clip(np.round(x / scale) + zero, limits.min, limits.max)
    return np.ascontiguousarray(x.astype(entry["dtype"]))


def reals(y: np.ndarray, entry: dict[str, Any]) -> np.ndarray:
    scale, zero = entry["quantization"]
    return (y.astype(np.float32) - zero) * np.float32(scale) if scale and y.dtype.kind in "iu" else y
