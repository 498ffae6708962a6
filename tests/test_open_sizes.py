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
