"""The loss at the outputs: every part counts by its own power."""

import math

import pytest
import torch

from chipfit.rounding.outputs import OutputErrors


def test_a_small_output_beside_a_large_one_counts_as_much():
    pixels, score = torch.full((2, 1), 640.0), torch.full((2, 1), 0.5)
    errors = OutputErrors()
    errors.add({"boxes": pixels, "scores": score}, {"boxes": pixels, "scores": torch.zeros(2, 1)})
    assert errors.loss == 1.0  # the scores are lost
    assert errors.sqnr_db == pytest.approx(10 * math.log10(2))  # half of the parts


def test_class_scores_lose_nats_and_batches_add_up():
    errors, even = OutputErrors(), torch.zeros(1, 2)
    for _ in range(2):
        errors.add({"y": even}, {"y": torch.tensor([[math.log(3.0), 0.0]])})  # 1/2, 1/2 became 3/4, 1/4
    assert errors.loss == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))


def test_equal_outputs_have_no_noise():
    errors = OutputErrors()
    errors.add({"y": torch.ones(2, 1)}, {"y": torch.ones(2, 1)})
    assert (errors.loss, errors.sqnr_db) == (0.0, math.inf)
