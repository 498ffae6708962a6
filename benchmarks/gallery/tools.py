"""The usual tools beside chipfit: ONNX Runtime's quantization, TensorFlow's converter, AI Edge Quantizer."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import torch
from benchmarks.gallery import runs
from benchmarks.gallery.files import path_of

#: first opset with scales per channel
_PER_CHANNEL = 13
Make = Callable[[list[Any], Path], None]


def of(network: str, platform: str, shipped: str) -> dict[str, Make]:
    """Return the tools that write the platform's kind of file from this kind of network."""
    made: dict[str, Make] = {}
    if platform == "ort_cpu" and (network.endswith(".onnx") or ":" in network):
        made = {"static": partial(_static, network), "dynamic": partial(_dynamic, network)}
    elif platform == "tflite_int8":
        if network.endswith(".h5"):
            made["converter"] = partial(_converter, network)
        elif network.endswith(".tflite") and find_spec("ai_edge_quantizer"):
            made["ai_edge"] = partial(_ai_edge, network)
        if shipped:
            made["shipped"] = lambda _, path: shutil.copyfile(path_of(shipped), path)
    return made


def _plain(network: str, batches: list[Any], path: Path) -> Path:
    """Return the float ONNX file of a network."""
    if network.endswith(".onnx"):
        return Path(network)
    from chipfit.import_by_name import import_by_name

    plain = path.with_suffix(".float.onnx")
    args = tuple(map(torch.from_numpy, batches[0]))
    module = import_by_name(network, "model", ValueError)()
    with contextlib.redirect_stdout(None):
        torch.onnx.export(module, args, str(plain), dynamo=True, verbose=False, external_data=False)
    return plain


def _static(network: str, batches: list[Any], path: Path) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    logging.disable(logging.WARNING)
    plain, prepared = _plain(network, batches, path), path.with_suffix(".prepared.onnx")
    held = onnx.load(plain)
    if next(o.version for o in held.opset_import if o.domain in ("", "ai.onnx")) < _PER_CHANNEL:
        onnx.save(onnx.version_converter.convert_version(held, _PER_CHANNEL), plain := path.with_suffix(".newer.onnx"))
    try:
        quant_pre_process(str(plain), str(prepared))
    except Exception:  # its symbolic shapes do not know every operator
        quant_pre_process(str(plain), str(prepared), skip_symbolic_shape=True)

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            names = [i.name for i in runs.opened(prepared).get_inputs()]
            self.feeds = iter([dict(zip(names, x, strict=True)) for x in batches])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    types = {"weight_type": QuantType.QInt8, "activation_type": QuantType.QUInt8}
    quantize_static(str(prepared), str(path), Reader(), quant_format=QuantFormat.QDQ, per_channel=True, **types)


def _dynamic(network: str, batches: list[Any], path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    logging.disable(logging.WARNING)
    quantize_dynamic(str(_plain(network, batches, path)), str(path))


def _converter(network: str, batches: list[Any], path: Path) -> None:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import tensorflow as tf

    import chipfit

    model = chipfit.load_model(network)
    fixed = [keras.Input(t.shape[1:], batch_size=1, dtype=t.dtype) for t in model.inputs]
    one = keras.Model(fixed, model(fixed[0] if len(fixed) == 1 else fixed))
    converter = tf.lite.TFLiteConverter.from_keras_model(one)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: iter([list(x) for x in batches])
    path.write_bytes(converter.convert())


def _ai_edge(network: str, batches: list[Any], path: Path) -> None:
    from ai_edge_litert.interpreter import Interpreter
    from ai_edge_quantizer import quantizer, recipe

    signed = path.with_suffix(".signed.tflite")
    signed.write_bytes(_signed(Path(network).read_bytes()))
    names = [d["name"] for d in Interpreter(network).get_input_details()]
    key, signature = next(iter(Interpreter(str(signed)).get_signature_list().items()))
    if {*signature["inputs"]} != {*names}:
        names = signature["inputs"]
    tool = quantizer.Quantizer(str(signed))
    tool.load_quantization_recipe(recipe.static_wi8_ai8())
    data = {key: [dict(zip(names, x, strict=True)) for x in batches]}
    tool.quantize(tool.calibrate(data, num_threads=1)).export_model(str(path))


def _signed(file: bytes) -> bytes:
    """Return a `.tflite` file with a signature, without which AI Edge Quantizer cannot calibrate."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(file))
    if model.signatureDefs:
        return file
    graph = model.subgraphs[0]

    def named(indices: Any) -> list[Any]:
        out = []
        for k in indices:
            tensor = schema.TensorMapT()
            tensor.name, tensor.tensorIndex = graph.tensors[k].name.decode(), int(k)
            out.append(tensor)
        return out

    signature = schema.SignatureDefT()
    signature.signatureKey, signature.subgraphIndex = "serving_default", 0
    signature.inputs, signature.outputs = named(graph.inputs), named(graph.outputs)
    model.signatureDefs = [signature]
    builder = flatbuffers.Builder(len(file))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())
