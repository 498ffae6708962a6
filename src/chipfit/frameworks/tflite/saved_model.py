"""TensorFlow SavedModels: TensorFlow converts their concrete function to a float `.tflite` file, which is then read."""

import importlib
import os

from chipfit.errors import CaptureError, raise_bug, short_message
from chipfit.frameworks.tflite.model import TfliteModel


def load_saved_model(folder: str) -> TfliteModel:
    """Load the default signature of a SavedModel.

    A SavedModel is a program that TensorFlow loads: only load those of a source that you trust.

    Raises:
        CaptureError: TensorFlow is not installed, or cannot convert the model.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        tf = importlib.import_module("tensorflow")
    except ImportError as e:
        hint = "pip install tensorflow; or convert it elsewhere: tf.lite.TFLiteConverter.from_saved_model(folder)"
        raise CaptureError(f"'{folder}' is a SavedModel of TensorFlow, which is not installed", hint=hint) from e
    try:
        content = tf.lite.TFLiteConverter.from_saved_model(folder).convert()
    except Exception as e:  # of TensorFlow, of many types
        raise_bug(e)
        hint = "give it a signature 'serving_default' of operators that TensorFlow Lite has"
        what = f"TensorFlow cannot convert the SavedModel: {short_message(e)}"
        raise CaptureError(what, where=folder, hint=hint) from e
    return TfliteModel(content, folder)
