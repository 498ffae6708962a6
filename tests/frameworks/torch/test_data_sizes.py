"""Networks that return lists whose length depends on data: entries above a threshold, places, distinct numbers."""

import pytest
import torch
from torch import nn

from tests.build import images, model_of, quantized

ENDS = {
    "entries under a mask": lambda y: y[y[..., 0] > 0.1],
    "places beside the numbers": lambda y: (y, torch.nonzero(y[..., 0] > 0.1)),
    "places by axis and distinct numbers": lambda y: (y.amax(1), torch.where(y[..., 0] > 0.1)[0], y[..., 0].unique()),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=list(ENDS))
def test_a_network_that_ends_in_a_list_of_open_length_is_quantized_and_proved(end):
    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(3, 8, 3), "head": nn.Linear(8, 5)}
    net = model_of(lambda m, x: end(m.head(m.conv(x).relu().flatten(2).transpose(1, 2))), **layers)
    data = [images(4, size=8)]
    assert quantized(net, data, "ort_cpu").verify(data).exact
