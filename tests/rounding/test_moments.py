"""What a linear operator reads at an output position, against torch's own operators."""

import copy

import pytest
import torch

from chipfit.engine.kernels import execute
from chipfit.graph.ir import Node
from chipfit.rounding.moments import Moments, as_rows, from_rows, patches, positions, targets


def conv(op: str, **attrs) -> Node:
    return Node(op, op, ("x", "w", None), ("y",), attrs)


ONE = {"stride": (1,), "padding": ((2, 1),), "dilation": (2,), "groups": 1}
TWO = {"stride": (2, 1), "padding": ((1, 0), (2, 2)), "dilation": (1, 2), "groups": 2}
THREE = {"stride": (2, 1, 1), "padding": ((1, 1), (0, 0), (1, 0)), "dilation": (1, 1, 1), "groups": 1}
CASES = [
    (conv("Linear"), (5, 7), (3, 7)),
    (conv("Linear"), (5, 4, 6, 7), (3, 7)),
    (conv("Conv1D", **ONE), (3, 4, 11), (6, 4, 3)),
    (conv("Conv2D", **TWO), (3, 4, 9, 8), (6, 2, 3, 2)),
    (conv("DepthwiseConv2D", **{**TWO, "groups": 4}), (3, 4, 9, 8), (8, 1, 3, 3)),
    (conv("Conv3D", **THREE), (2, 2, 5, 4, 6), (3, 2, 3, 2, 2)),
    (conv("TransposeConv1D", **ONE, output_padding=(0,)), (3, 4, 7), (4, 5, 3)),
    (conv("TransposeConv2D", **TWO, output_padding=(1, 0)), (3, 4, 5, 6), (4, 3, 3, 2)),
    (conv("TransposeConv3D", **THREE, output_padding=(1, 0, 0)), (2, 2, 3, 4, 3), (2, 3, 3, 2, 2)),
]


@pytest.mark.parametrize("node, size, kernel", CASES, ids=lambda x: getattr(x, "op", None))
@pytest.mark.parametrize("most", [4, 10_000])
def test_weights_times_patches_are_the_operators_outputs_at_the_positions(node, size, kernel, most):
    torch.manual_seed(0)
    x, w = torch.randn(size), torch.randn(kernel)
    (y,) = execute(node, [x, w, None])
    where = positions(node, y, most, torch.Generator().manual_seed(1))
    got = as_rows(node, w) @ patches(node, x, w, where)
    torch.testing.assert_close(got, targets(node, y, where), rtol=1e-4, atol=1e-4)
    assert torch.equal(from_rows(node, as_rows(node, w), w), w)


@pytest.mark.parametrize("most, drawn", [(4, 4), (62, 62), (63, 63), (1000, 63)])
def test_positions_are_drawn_without_replacement_all_where_there_are_no_more(most, drawn):
    found = positions(conv("Conv2D", **TWO), torch.zeros(3, 6, 7, 9), most, torch.Generator().manual_seed(1)).tolist()
    assert len(found) == len(set(found)) == drawn and set(found) <= set(range(63))
    assert drawn == 63 or found != sorted(found)


@pytest.mark.parametrize("node, size, kernel", CASES, ids=lambda x: getattr(x, "op", None))
def test_patches_of_codes_stand_for_the_patches_of_their_reals(node, size, kernel):
    codes = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    reals, w = codes.float() - 7, torch.zeros(kernel)  # 7 stands for 0, around an image and between its positions too
    where = torch.tensor([2, 0, 1] if len(size) > 2 else [0])
    got = patches(node, codes, w, where, 7.0)
    assert got.dtype == torch.uint8
    assert torch.equal(got.float() - 7, patches(node, reals, w, where))


def test_moments_are_means_of_products_by_hand():
    m = Moments.empty(torch.zeros(1, 1, 2))
    m.add(torch.tensor([[[1.0, 3.0], [2.0, 2.0]]]), torch.tensor([[[1.0, 5.0]]]))
    m.add(torch.tensor([[[5.0], [8.0]]]), torch.tensor([[[0.0]]]))
    x, t = m.means()
    assert x.tolist() == [[3.0, 4.0]] and t.tolist() == [[2.0]]
    again = copy.deepcopy(m)
    h, c = m.centred()  # var x0 = (4+0+4)/3, cov = (4+0+8)/3, var x1 = (4+4+16)/3
    torch.testing.assert_close(h, torch.tensor([[[8 / 3, 4.0], [4.0, 8.0]]]))
    torch.testing.assert_close(c, torch.tensor([[[(2 + 0 - 4) / 3, (2 - 6 - 8) / 3]]]))
    h, c = again.with_fixed_bias(torch.tensor([[2.0]]))
    torch.testing.assert_close(h, torch.tensor([[[35 / 3, 16.0], [16.0, 24.0]]]))
    torch.testing.assert_close(c, torch.tensor([[[16 / 3 - 6.0, 12 / 3 - 8.0]]]))


def test_moments_of_many_weights_are_summed_in_blocks_of_one_triangle():
    x = torch.randn(1, 530, 40, generator=torch.Generator().manual_seed(0))
    m = Moments.empty(torch.zeros(1, 2, 530))
    m.add(x, torch.zeros(1, 2, 40))
    h, _ = m.with_fixed_bias(torch.zeros(1, 2))
    torch.testing.assert_close(h, x @ x.transpose(1, 2) / 40)


def test_moments_of_groups_are_those_of_numpy():
    rng = torch.Generator().manual_seed(0)
    x, t, bias = (torch.randn(s, generator=rng) for s in ((2, 4, 50), (2, 3, 50), (2, 3)))
    a, b = x.double().numpy() + 1, t.double().numpy() - 2
    pairs = [Moments.empty(torch.zeros(2, 3, 4)) for _ in range(2)]
    for m in pairs:
        for part, of in zip((x + 1).split([20, 30], 2), (t - 2).split([20, 30], 2), strict=True):
            m.add(part, of)
    assert pairs[0].count == 50
    h, c = pairs[0].centred()
    ah, bh = a - a.mean(2, keepdims=True), b - b.mean(2, keepdims=True)
    torch.testing.assert_close(h.double(), torch.from_numpy(ah @ ah.transpose(0, 2, 1) / 50), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(c.double(), torch.from_numpy(bh @ ah.transpose(0, 2, 1) / 50), rtol=1e-4, atol=1e-5)
    h, c = pairs[1].with_fixed_bias(bias)
    rest = b - bias.double().numpy()[..., None]
    torch.testing.assert_close(h.double(), torch.from_numpy(a @ a.transpose(0, 2, 1) / 50), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(c.double(), torch.from_numpy(rest @ a.transpose(0, 2, 1) / 50), rtol=1e-4, atol=1e-5)
