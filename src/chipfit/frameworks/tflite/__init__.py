"""TensorFlow Lite: networks in `.tflite` files."""
