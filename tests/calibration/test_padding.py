"""What a mask calls padding sets no range."""

import torch
from torch import nn

import chipfit


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.a, self.b = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        with torch.no_grad():
            self.words.weight[0] = 100.0  # the word of padding

    def forward(self, input_ids, attention_mask):
        y = self.b(self.a(self.words(input_ids)).relu()) * attention_mask.unsqueeze(2)
        return y.sum(1) / attention_mask.sum(1, keepdim=True)


def data(padded):
    g = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(1, 50, (32, 6), generator=g), torch.ones(32, 6, dtype=torch.int64)
    if padded:
        ids[::2, 4:], mask[::2, 4:] = 0, 0
    return [{"input_ids": ids, "attention_mask": mask}]


def test_padding_sets_no_range_and_that_is_said():
    torch.manual_seed(0)
    model = Words().eval()
    padded = chipfit.quantize(model, data(True), "ort_cpu", progress=False)
    found = padded.stats["embedding"]
    assert found.high < 10 and found.count == 8 * (32 * 6 - 16 * 2)
    assert "calibration leaves out what 'attention_mask' says is padding" in padded.plan.rewrites


def test_without_a_mask_every_place_counts():
    class Plain(Words):
        def forward(self, input_ids, attention):
            return super().forward(input_ids, attention)

    torch.manual_seed(0)
    [batch] = data(True)
    given = [{"input_ids": batch["input_ids"], "attention": batch["attention_mask"]}]
    assert chipfit.quantize(Plain().eval(), given, "ort_cpu", progress=False).stats["embedding"].high == 100
