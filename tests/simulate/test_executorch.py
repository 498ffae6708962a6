"""XNNPACK's kernels as ExecuTorch calls them: operators on many codes, with scales drawn at random."""

import random

import pytest
import torch

from tests.simulate.one_operator import Codes, drawn, every, one, pairs, square

pytest.importorskip("executorch", reason="executorch is not installed: pip install 'chipfit[executorch]'")
A, B = (x.reshape(1, -1) for x in pairs())
PLAIN = {"stride": (1, 1), "padding": ((1, 1), (1, 1)), "dilation": (1, 1), "groups": 1}
PLATFORM = "executorch_xnnpack"


def numbers(draw: random.Random) -> dict[str, float | int]:
    return {"scale": 2 ** draw.uniform(-8, -3), "zero": draw.randrange(-128, 128)}


def check(made, folder) -> None:
    made.prove(folder, PLATFORM, ["executorch"])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul"])
def test_every_pair_of_codes_gives_the_runtimes_code(tmp_path, op):
    draw = random.Random(op)
    scale = 0.05 if op != "Mul" else 0.4
    check(one(op, [Codes(A, **numbers(draw)), Codes(B, **numbers(draw))], Codes(A, scale, 3)), tmp_path)


def test_a_square_is_looked_up_in_a_table_of_floats(tmp_path):
    """Two of its numbers lie just beside the middle between two codes."""
    check(square(Codes(every(), 0.0044157849624753), Codes(A, 0.0028892531991004944, -128)), tmp_path)


def test_convolutions_with_a_scale_for_each_channel_round_as_the_runtime(tmp_path):
    draw = random.Random(3)
    scales = [2 ** draw.uniform(-9, -6) for _ in range(8)]
    w, b = drawn(1, 8, 4, 3, 3), drawn(2, 8, bits=16)
    x = Codes(drawn(3, 1, 4, 24, 24), 0.03, -7)
    bias = Codes(b, [float(torch.tensor(0.03) * torch.tensor(s)) for s in scales], bits=32)
    check(one("Conv2D", [x, Codes(w.clamp(-127), scales), bias], Codes(b, 0.11, 5), PLAIN), tmp_path)


@pytest.mark.slow
def test_a_transposed_convolution_with_gaps_rounds_as_the_runtime(tmp_path):
    attrs = {**PLAIN, "stride": (3, 3), "padding": ((0, 0), (0, 0)), "output_padding": (0, 0)}
    x, w = Codes(drawn(3, 1, 4, 6, 6), 0.03, 9), Codes(drawn(4, 4, 8, 2, 2).clamp(-127), 0.01)
    check(one("TransposeConv2D", [x, w, None], Codes(every(), 0.02, -3), attrs), tmp_path)


@pytest.mark.slow
def test_means_of_images_round_as_the_runtime(tmp_path):
    x = Codes(drawn(5, 1, 32, 7, 5), 0.04, -11)
    check(one("GlobalAvgPool", [x], Codes(every(), 0.013, 4)), tmp_path)
