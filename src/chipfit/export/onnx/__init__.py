"""ONNX files."""

from chipfit.export.onnx import writer as writer
