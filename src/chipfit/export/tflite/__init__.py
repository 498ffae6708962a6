"""TensorFlow Lite files."""

from chipfit.export.tflite import writer as writer
