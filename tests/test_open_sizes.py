"""Sizes in which calibration batches differ stay open: in the model, its simulation, saved results and the ONNX file."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.errors import CaptureError, ChipfitError, DataError, UnsupportedError

PLACES = 24  #: rows of the table of positions


class Encoder(nn.Module):
    """A small transformer: words and positions, a mask of padding, one block, a mean over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Parameter(torch.randn(1, PLACES, 16))
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        return x.view(batch, length, 2, 8).transpose(1, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length = ids.shape
        x = self.words(ids) + self.places[:, :length]
        y = self.first(x)
        hidden = (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        scores = self.heads(self.q(y)) @ self.heads(self.k(y)).transpose(-1, -2) / 8**0.5 + hidden
        y = (scores.softmax(-1) @ self.heads(self.v(y))).transpose(1, 2).reshape(batch, length, 16)
        x = x + self.out(y)
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)


def sentences(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(1, 50, (batch, length))
    mask = (torch.arange(length) < torch.randint(2, length + 1, (batch, 1))).long()
    return words * mask, mask


def quantized(model: nn.Module, data: object, platform: str = "ort_cpu", **more: object) -> chipfit.Result:
    return chipfit.quantize(model, data, platform, progress=False, **more)


@pytest.fixture(scope="module")
def encoder() -> nn.Module:
    torch.manual_seed(0)
    return Encoder().eval()


@pytest.fixture(scope="module")
def result(encoder: nn.Module) -> chipfit.Result:
    torch.manual_seed(1)
    return quantized(encoder, [sentences(4, 12), sentences(4, 12), sentences(3, 7), sentences(5, 20)])


FLOAT = {"Add", "Cast", "Div", "Gelu", "LayerNorm", "MatMul", "Mul", "Softmax", "Sum"}


def test_sentences_of_other_lengths_are_computed_as_onnx_runtime_does(encoder, result, tmp_path):
    result.save(tmp_path / "saved")
    for r in (result, chipfit.load(tmp_path / "saved")):
        for batch in (sentences(2, 9), sentences(1, 16), sentences(6, PLACES)):
            r.verify([batch]).require(FLOAT)
            with torch.no_grad():
                near = F.cosine_similarity(r.model(*batch), encoder(*batch), dim=1)
            assert near.min() > 0.99


class Pyramid(nn.Module):
    """A convolutional network for images of any size: strides, pools, a resize back, a skip, a head over all places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.up = nn.Sequential(nn.Upsample(scale_factor=4.0), nn.Conv2d(12, 8, 1))
        self.places, self.head = nn.Conv2d(8, 4, 1), nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(image)
        x = x + self.up(self.down(x))
        rows = self.places(x).flatten(2).transpose(1, 2)
        return {"places": rows, "label": self.head(x.mean((2, 3)))}


def test_images_of_other_heights_and_widths_are_computed_as_onnx_runtime_does(tmp_path):
    torch.manual_seed(0)
    model = Pyramid().eval()
    result = quantized(model, [torch.randn(4, 3, 16, 16), torch.randn(4, 3, 24, 16), torch.randn(2, 3, 16, 32)])
    result.save(tmp_path / "saved")
    for r in (result, chipfit.load(tmp_path / "saved")):
        for batch in (torch.randn(2, 3, 8, 40), torch.randn(1, 3, 20, 12)):
            r.verify([batch]).require({"Resize", "Reshape"})
            with torch.no_grad():
                got, want = r.model(batch), model(batch)
            assert all(F.cosine_similarity(got[k].flatten(1), want[k].flatten(1), dim=1).min() > 0.95 for k in want)
