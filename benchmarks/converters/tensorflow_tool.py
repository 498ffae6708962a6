"""`.tflite` files of chipfit and of TensorFlow's converter: integers throughout, inputs and outputs too, batch 1."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import logging
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from benchmarks.beside_converters import BATCH, CALIBRATION, HELD_OUT
from benchmarks.converters.keras_networks import NETWORKS, with_statistics
from benchmarks.converters.measure import figures, times

import chipfit

#: operators that convert between integers and floats
_CONVERSIONS = ("QUANTIZE", "DEQUANTIZE")


def files_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the figures of both files of a network."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    keras.utils.set_random_seed(0)
    r = np.random.default_rng(1)
    make, batch = NETWORKS[name]
    model = with_statistics(make(), r)
    data, held_out = batch(r, CALIBRATION), batch(r, HELD_OUT)
    given = model(list(held_out) if len(held_out) > 1 else held_out[0], training=False)
    floats = [np.asarray(y) for y in (given if isinstance(given, list | tuple) else [given])]
    out: dict[str, Any] = {}
    opened = {}
    for who, make_file in {"chipfit": _chipfit, "tool": _converter}.items():
        path = folder / f"{who}.tflite"
        try:
            make_file(model, data, path)
            opened[who] = _open(path)
            out[who] = figures(_run(opened[who], held_out), floats, _float_operators(path), path.stat().st_size)
        except Exception as e:  # what a tool cannot do is a result of the table
            out[who] = {"error": f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]}
    if len(opened) == 2 and not any("error" in f for f in out.values()):
        out["chipfit"]["time"], out["tool"]["time"] = times(*(i.invoke for i in opened.values()))
    return out


def _chipfit(model: keras.Model, data: tuple[np.ndarray, ...], path: Path) -> None:
    parts = [tuple(x[k : k + BATCH] for x in data) for k in range(0, CALIBRATION, BATCH)]
    batches = [p[0] if len(p) == 1 else p for p in parts]
    result = chipfit.quantize(model, batches, platform="tflite_int8", progress=False)
    try:
        result.export(path, io="int8", batch=1)
    except chipfit.errors.UnsupportedError:  # an output joins what one grid would lose
        result.export(path, io=("int8", "float"), batch=1)


def _converter(model: keras.Model, data: tuple[np.ndarray, ...], path: Path) -> None:
    fixed = [keras.Input(t.shape[1:], batch_size=1, dtype=t.dtype) for t in model.inputs]
    one = keras.Model(fixed, model(fixed[0] if len(fixed) == 1 else fixed))
    converter = tf.lite.TFLiteConverter.from_keras_model(one)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([x[k : k + 1] for x in data] for k in range(CALIBRATION))
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8, tf.lite.OpsSet.TFLITE_BUILTINS]
    converter.inference_input_type = tf.int8 if all(x.dtype.kind == "f" for x in data) else tf.float32
    converter.inference_output_type = tf.int8
    path.write_bytes(converter.convert())


def _open(path: Path, kind: OpResolverType = OpResolverType.AUTO) -> Interpreter:
    interpreter = Interpreter(model_path=str(path), num_threads=1, experimental_op_resolver_type=kind)
    interpreter.allocate_tensors()
    return interpreter


def _run(interpreter: Interpreter, inputs: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """Return the outputs of samples, which run one by one; integers are quantized and dequantized here."""
    rows = []
    for k in range(len(inputs[0])):
        for entry in interpreter.get_input_details():
            x = next(x for x in inputs if x.shape[1:] == tuple(entry["shape"][1:]))
            scale, zero = entry["quantization"]
            part, limits = x[k : k + 1], np.iinfo(np.int8)
            if entry["dtype"] == np.int8:
                part = np.clip(np.round(part / scale) + zero, limits.min, limits.max)
            interpreter.set_tensor(entry["index"], part.astype(entry["dtype"]))
        interpreter.invoke()
        rows.append([_real(interpreter, entry) for entry in interpreter.get_output_details()])
    return [np.concatenate(column) for column in zip(*rows, strict=True)]


def _real(interpreter: Interpreter, entry: dict[str, Any]) -> np.ndarray:
    value, (scale, zero) = interpreter.get_tensor(entry["index"]), entry["quantization"]
    return (value.astype(np.float32) - zero) * np.float32(scale) if scale else value


def _float_operators(path: Path) -> list[str]:
    """Return the operators that read or write floats, conversions excepted."""
    interpreter = _open(path, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
    floats = {t["index"] for t in interpreter.get_tensor_details() if t["dtype"] in (np.float32, np.float16)}
    operators = interpreter._get_ops_details()
    touching = [o["op_name"] for o in operators if floats & {int(i) for i in (*o["inputs"], *o["outputs"])}]
    return [o for o in touching if o not in _CONVERSIONS]
