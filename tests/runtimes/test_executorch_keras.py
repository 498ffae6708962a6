"""Keras models, whose images lie channels last, as ExecuTorch programs."""

import pytest

keras = pytest.importorskip("keras")
pytest.importorskip("executorch", reason="executorch is not installed: pip install 'chipfit[executorch]'")

from tests.build import quantized  # noqa: E402 -- after the imports that may skip
from tests.keras_zoo import batch_for, make  # noqa: E402


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "name, floats", [("mobilenet", {"Softmax"}), ("attention", {"Gelu", "LayerNorm", "Mean", "SDPA"})]
)
def test_every_integer_of_a_keras_model_is_the_runtimes(name, floats):
    model, batch = make(name)
    found = quantized(model, [batch], "executorch_xnnpack").verify([batch_for(model, seed=1)])
    assert found.sound and found.differing == 0 and found.float_ops == floats, found.summary()
    assert not found.not_compared
