"""Layers whose weights the network computes are written with these weights in the layout of the file."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from chipfit.graph.linear import LINEAR
from chipfit.registry import lookup
from tests.build import model_of, quantized, randn

#: name -> function of data, weight and bias, and the shapes of all three without the batch
LAYERS = {
    "image": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), (4, 7, 6), (5, 4, 3, 2), 5),
    "groups": (lambda x, w, b: F.conv2d(x, w, b, groups=2), (4, 7, 6), (6, 2, 3, 2), 6),
    "depthwise": (lambda x, w, b: F.conv2d(x, w, b, groups=4), (4, 7, 6), (8, 1, 3, 2), 8),
    "row": (lambda x, w, b: F.conv1d(x, w, b, dilation=2), (4, 9), (5, 4, 3), 5),
    "transposed": (lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), (4, 5, 6), (4, 3, 2, 3), 3),
    "linear": (F.linear, (3, 4), (5, 4), 5),
}


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_the_file_multiplies_by_the_computed_weight(name, tmp_path):
    layer, x, w, b = LAYERS[name]
    model = model_of(lambda m, x, w, b: layer(x.relu(), w.tanh(), b.sin()))
    *data, new = [(randn(3, *x, seed=k), randn(*w, seed=k + 9), randn(b, seed=k + 20)) for k in range(4)]
    result = quantized(model, data, "tflite_int8")
    assert {n.exec for n in result.plan.nodes.values() if n.op in LINEAR} == {"float"} and result.verify([new]).exact
    got = lookup("runtime", "litert")(result.export(tmp_path / "m.tflite", batch=3)).run([v.numpy() for v in new])
    want = result.model.eval()(*new)
    np.testing.assert_allclose(got[result.graph.outputs[0]], want.numpy(), atol=1e-4)
