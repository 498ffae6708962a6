"""Of equal quantized values the lowest index comes first, in the simulation as in the runtimes."""

import pytest
import torch
from torch import nn

from chipfit.runtimes.litert import LiteRt
from chipfit.runtimes.onnxruntime import OnnxRuntime
from tests.build import model_of, quantized

ORDERED = {
    "the best few": lambda y: y.topk(5, 2),
    "the best channels": lambda y: y.topk(3, 1),
    "the least": lambda y: y.topk(4, -1, largest=False),
    "all in order": lambda y: y.sort(1, descending=True),
    "channels in ascending order": lambda y: (y.sort(1)[0], y.argsort(1)),
    "the largest with its index": lambda y: tuple(y.max(2)),
    "the index of the least": lambda y: y.argmin(1),
    "rows of the best scores": lambda y: torch.gather(y, 2, y.sigmoid().topk(6, 2)[1]),
}
FILES = {"ort_cpu": ("m.onnx", OnnxRuntime, {}), "tflite_int8": ("m.tflite", LiteRt, {"batch": 2})}


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("platform", FILES)
def test_the_device_model_orders_equal_values_as_the_runtime(platform, name, tmp_path):
    model = model_of(lambda m, x: ORDERED[name](m.conv(x).relu().flatten(2)), conv=nn.Conv2d(3, 8, 3, 2, 1))
    data = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    result = quantized(model, [data], platform)
    file, runtime, options = FILES[platform]
    path = result.export(tmp_path / file, **options)
    assert result.verify([data], path=path).exact
    ours = result.device_model(data)
    ours = [ours] if isinstance(ours, torch.Tensor) else [*ours]
    theirs = runtime(path).run([data.numpy()])
    assert [y.tolist() for y in ours] == [y.tolist() for y in theirs.values()][: len(ours)]
