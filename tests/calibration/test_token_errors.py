"""Bad input of networks that read tokens: each is a typed error that says what would be right."""

from functools import partial

import pytest
import torch
from torch import nn

from chipfit import quantize
from chipfit.errors import CaptureError, DataError, UnsupportedError

quantized = partial(quantize, progress=False)  # on the CPU: elsewhere such ids stop the device
IDS, MASK = torch.arange(24).reshape(4, 6) % 20, torch.ones(4, 6, dtype=torch.long)
LONG, LONG_MASK = torch.arange(48).reshape(4, 12) % 20, torch.ones(4, 12, dtype=torch.long)


class Encoder(nn.Module):
    """Of 20 words, in at most 8 places."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.q, self.k, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, ids, mask):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        return self.head((scores.masked_fill(mask[:, None, :] == 0, -1e9).softmax(-1) @ x).mean(1))


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return Encoder().eval()


@pytest.fixture(scope="module")
def result(encoder):
    return quantized(encoder, [(IDS, MASK)])


@pytest.mark.parametrize("ids", [IDS + 1, IDS - 1, torch.full_like(IDS, 1 << 40)], ids=["above", "below", "far"])
def test_ids_that_no_table_has_are_refused_wherever_they_come_in(encoder, result, ids):
    words = r"Ids are out of the table's range. Got: -?\d+ to \d+. Allowed: 0 to 19"
    for act in (
        lambda: result.verify([(ids, MASK)]),
        lambda: result.model(ids, MASK),
        lambda: result.device_model(ids, MASK),
        lambda: quantized(encoder, [(IDS, MASK), (ids, MASK)]),
    ):
        with pytest.raises(DataError, match=words):
            act()
    with pytest.raises(CaptureError, match="index out of range.*self.words"):
        quantized(encoder, [(ids.flip(0), MASK)])  # of the first samples


def test_sequences_beyond_the_table_of_positions_are_refused(encoder, result):
    with pytest.raises(CaptureError, match="index out of range.*self.places"):
        quantized(encoder, [(LONG, LONG_MASK)])
    with pytest.raises(DataError, match=r"'ids' has the wrong shape. Got: \[4, 12\]. Allowed: \['batch', 6\]"):
        quantized(encoder, [(IDS, MASK), (LONG, LONG_MASK)])
    with pytest.raises(DataError, match="'ids' has the wrong shape"):
        result.verify([(LONG, LONG_MASK)])


@pytest.mark.parametrize("bits", [4, 16])
def test_bits_that_the_kernel_of_embeddings_has_not_are_refused(encoder, bits):
    with pytest.raises(UnsupportedError, match=f"'words' cannot have {bits}-bit weights.*Allowed: 8 bits"):
        quantized(encoder, [(IDS, MASK)], overrides={"words": {"bits": bits}})
