"""Files that a platform is listed with can be written for it."""

import pytest
import torch
from torch import nn

from chipfit.platform.load import load, names
from chipfit.platform.support import file_suffixes
from tests.build import quantized, sequential

SOME = ("stm32mp2_npu", "ort_qnn_ep", "esp_dl", "xnnpack")


@pytest.mark.parametrize(
    "platform",
    [pytest.param(n, marks=[] if n in SOME else pytest.mark.slow) for n in names() if file_suffixes(load(n))],
)
def test_every_file_that_a_platform_is_listed_with_can_be_written(platform, tmp_path):
    torch.manual_seed(0)
    convs = nn.Conv2d(3, 40, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(40, 40, 3, groups=40), nn.ReLU()
    net = sequential(*convs, nn.Flatten(), nn.Linear(160, 8))
    result = quantized(net, torch.randn(4, 3, 8, 8), platform)
    for suffix in file_suffixes(load(platform)):
        assert result.export(tmp_path / f"m{suffix}").stat().st_size > 1000
