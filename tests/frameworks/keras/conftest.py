"""Choose the Keras backend of these tests: KERAS_BACKEND, else torch. `test_backends` runs tests on the others."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if os.environ["KERAS_BACKEND"] == "jax":  # many small programs that run once: compiling costs more than running
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
