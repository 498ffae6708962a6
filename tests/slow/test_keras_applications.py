"""The networks of keras.applications: nothing opaque, model and engine agree, the file has the simulated integers."""

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")

import chipfit  # noqa: E402 -- after the import that may skip
from chipfit.frameworks.torch.lower import lower as engine  # noqa: E402
from chipfit.graph.ir import OPAQUE  # noqa: E402

NAMES = ("MobileNetV2", "MobileNetV3Small", "EfficientNetB0", "ResNet50V2", "DenseNet121", "ConvNeXtTiny")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_way_at_96_pixels(name):
    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(weights=None, input_shape=(96, 96, 3), classes=10)
    for v in model.non_trainable_variables:  # statistics of batch norms, so that folding is real work
        v.assign(keras.random.uniform(v.shape, *((0.5, 2.0) if "variance" in v.name else (-0.2, 0.2)), seed=0))
    x = np.random.default_rng(0).uniform(-1, 1, (4, 96, 96, 3)).astype("float32")
    result = chipfit.quantize(model, [x], platform="ort_cpu", progress=False)
    assert all(n.op != OPAQUE for n in result.graph.nodes)
    with torch.no_grad():
        (want,) = engine(result.graph, result.plan).run_flat([torch.from_numpy(x)])
    (got,) = result.model.run_flat([torch.from_numpy(x)])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))
    found = result.verify([x])
    assert found.integers > 1_000_000 and found.sound, found.summary()
    assert found.exact or found.float_operators, found.summary()
