"""What a mask calls padding sets no range."""

import torch
from torch import nn

from tests.build import model_of, quantized


def words(forward):
    """Quantize a network of sentences, every other of which ends in two places of padding: the word 0."""
    ids, mask = torch.randint(1, 50, (32, 6)), torch.ones(32, 6, dtype=torch.int64)
    ids[::2, 4:], mask[::2, 4:] = 0, 0
    model = model_of(forward, words=nn.Embedding(50, 8), a=nn.Linear(8, 8), b=nn.Linear(8, 4))
    nn.init.constant_(model.words.weight[0], 100.0)
    return quantized(model, [(ids, mask)])


def mean_of_words(m, ids, mask):
    y = m.b(m.a(m.words(ids)).relu()) * mask.unsqueeze(2)
    return y.sum(1) / mask.sum(1, keepdim=True)


def test_padding_sets_no_range_and_that_is_said():
    padded = words(lambda m, input_ids, attention_mask: mean_of_words(m, input_ids, attention_mask))
    found = padded.stats["embedding"]
    assert found.high < 10 and found.count == 8 * (32 * 6 - 16 * 2)
    assert "calibration leaves out what 'attention_mask' says is padding" in padded.plan.rewrites
