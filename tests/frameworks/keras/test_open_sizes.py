"""Sizes in which calibration batches of a Keras network differ stay open, and are computed as ONNX Runtime does."""

import keras
import pytest
import torch
import torch.nn.functional as F
from keras import layers

import chipfit
from chipfit.errors import DataError


def sentences():
    """Ids of words: a network, batches of two lengths, and one of another."""
    x = inputs = keras.Input((None,), dtype="int32")
    x = layers.Conv1D(8, 3, padding="same", activation="relu")(layers.Embedding(20, 8)(x))
    ids = [torch.randint(0, 20, (8, n), dtype=torch.int32) for n in (7, 5, 11)]
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x))), ids[:2], ids[2]


def images():
    """The same of heights and widths."""
    x = inputs = keras.Input((None, None, 3))
    x = layers.Conv2D(8, 3, strides=2, activation="relu")(x)
    pictures = [torch.randn(8, h, w, 3) for h, w in ((9, 7), (6, 7), (9, 8), (12, 10))]
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x))), pictures[:3], pictures[3]


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="the other backends read the same graph more slowly")
@pytest.mark.parametrize("make, shape", [(sentences, (None, None)), (images, (None, None, None, 3))])
def test_sizes_in_which_batches_differ_stay_open(make, shape):
    keras.utils.set_random_seed(0)
    model, data, new = make()
    result = chipfit.quantize(model, data, "ort_cpu", progress=False)
    (name,) = result.graph.inputs
    assert result.graph.shape(name) == shape
    check = result.verify([new])
    assert check.verdict == "exact" and sum(r.elements for r in check.rows) > 500
    got, want = (torch.as_tensor(m(new)).detach() for m in (result.model, model))
    assert float(F.cosine_similarity(got, want).min()) > 0.95
    fixed = chipfit.quantize(model, data[:1], "ort_cpu", progress=False)
    with pytest.raises(DataError, match="sizes stay dynamic"):
        fixed.verify([new])
