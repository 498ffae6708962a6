"""Export under the names of MCT: files with rounded floats, with integers, or with quantizers of mct_quantizers."""

import tempfile
import warnings
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from chipfit.errors import ConfigError, ExportError
from chipfit.files import path_of, write_atomically
from chipfit.mct.qat import result_of
from chipfit.validation import check_value

__all__ = ["KerasExportSerializationFormat", "PytorchExportSerializationFormat", "QuantizationFormat"]
__all__ += ["keras_export_model", "pytorch_export_model"]

_DEFAULT_OPSET = 15


class QuantizationFormat(Enum):
    """The form of quantized weights and results in a file."""

    FAKELY_QUANT = 0  #: as floats: rounded weights, and arithmetic that rounds results
    INT8 = 1  #: as integers, also biases that the chip adds in float
    MCTQ = 2  #: as floats with quantizers of the package mct_quantizers


class KerasExportSerializationFormat(Enum):
    """The file of a Keras model."""

    KERAS = 0
    TFLITE = 1


class PytorchExportSerializationFormat(Enum):
    """The file of a PyTorch model."""

    TORCHSCRIPT = 0
    ONNX = 1


_FAKE, _INT8, _MCTQ = QuantizationFormat
#: file and its content -> suffix and format of `Result.export`
_FORMATS: dict[Any, dict[QuantizationFormat, tuple[str, str]]] = {
    KerasExportSerializationFormat.KERAS: {_FAKE: (".keras", "fake"), _MCTQ: (".keras", "mctq")},
    KerasExportSerializationFormat.TFLITE: {_FAKE: (".tflite", "fake"), _INT8: (".tflite", "int8")},
    PytorchExportSerializationFormat.TORCHSCRIPT: {_FAKE: (".pt", "fake")},
    PytorchExportSerializationFormat.ONNX: {
        _FAKE: (".onnx", "fake"),
        _INT8: (".onnx", "int8"),
        _MCTQ: (".onnx", "mctq"),
    },
}


def pytorch_export_model(
    model: Any,
    save_model_path: Any,
    repr_dataset: Callable[..., Any] | None = None,
    is_layer_exportable_fn: Callable[[Any], Any] | None = None,
    serialization_format: PytorchExportSerializationFormat = PytorchExportSerializationFormat.ONNX,
    quantization_format: QuantizationFormat = QuantizationFormat.MCTQ,
    onnx_opset_version: int = _DEFAULT_OPSET,
) -> None:
    """Write a quantized PyTorch model to a file.

    Args:
        model: model of a facade for post-training quantization, or of one that finalizes training.
        save_model_path: the file, with any suffix.
        repr_dataset: has no effect: the network was read before.
        is_layer_exportable_fn: called with each layer of the model.
        serialization_format, quantization_format: TorchScript files are fakely quantized, ONNX files have any format.
        onnx_opset_version: of ONNX files; 15 stands for the lowest that holds the model.

    Raises:
        ConfigError: there is no such file.
        PlanError: the model does not come from a facade, or was trained since.
        UnsupportedError, ExportError: see `Result.export`.
    """
    kind, where = PytorchExportSerializationFormat, "pytorch_export_model"
    form = check_value(kind, serialization_format, ConfigError, where, "serialization_format")
    opset = None if onnx_opset_version == _DEFAULT_OPSET else onnx_opset_version
    options = {"opset": opset} if form is kind.ONNX else {}
    _export(model, save_model_path, is_layer_exportable_fn, form, quantization_format, **options)


def keras_export_model(
    model: Any,
    save_model_path: Any,
    is_layer_exportable_fn: Callable[[Any], Any] | None = None,
    serialization_format: KerasExportSerializationFormat = KerasExportSerializationFormat.KERAS,
    quantization_format: QuantizationFormat = QuantizationFormat.MCTQ,
) -> dict[str, type]:
    """Write a quantized Keras model to a file.

    Args:
        serialization_format, quantization_format: `.keras` files are fakely quantized or MCTQ, `.tflite` files fakely
            quantized or INT8.
        model: as of `pytorch_export_model`; a float model, which a chip without quantization leaves, gives a float
            `.keras` file, with a warning.
        save_model_path: the file, with any suffix; Keras itself reads `.keras` files alone, and
            `keras_load_quantized_model` files of other suffixes, too.
        is_layer_exportable_fn: see `pytorch_export_model`, which has the same errors.

    Returns:
        The custom objects that loading needs: none.
    """
    kind, where = KerasExportSerializationFormat, "keras_export_model"
    form = check_value(kind, serialization_format, ConfigError, where, "serialization_format")
    _export(model, save_model_path, is_layer_exportable_fn, form, quantization_format)
    return {}


def _export(model: Any, path: Any, check: Any, form: Any, quantized: Any, **options: Any) -> None:
    formats = _FORMATS[form]
    if quantized not in formats:
        allowed = ", ".join(q.name for q in formats)
        what = f"{form.name} files have no such quantization format"
        raise ConfigError(what, got=getattr(quantized, "name", repr(quantized)), allowed=allowed)
    suffix, name = formats[quantized]
    path = path_of(path, ExportError)
    known = hasattr(model, "_chipfit") or getattr(model, "origin", None) is not None
    if form is KerasExportSerializationFormat.KERAS and not known and hasattr(model, "save"):
        warnings.warn("The model has no quantizers of a facade: its file is a float model", stacklevel=3)
        model.save(path)
        return
    result = result_of(model)
    for layer in (model.layers if hasattr(model, "layers") else model.children()) if check is not None else ():
        check(layer)
    if path.suffix == suffix:
        result.export(path, format=name, **options)
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        made = result.export(Path(folder) / f"model{suffix}", format=name, **options)
        write_atomically(path, made.read_bytes())
