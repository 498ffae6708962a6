"""The functions that training formulas are written in, against torch's own, and gradients by hand."""

import pytest
import torch

from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import TorchOps, clamp, fake_quantize, scale_gradient, ste

INT3 = Grid(bits=3, qmin=-4, qmax=3)
UINT3 = Grid(bits=3, qmin=0, qmax=7, zero="any")
TABLE = Grid(bits=2, qmin=0, qmax=3, kind="lut", table=(-2.0, -1.0, 0.0, 3.0))
LOG = Grid(bits=2, qmin=0, qmax=3, kind="log", table=(-4.0, -1.0, 1.0, 4.0))


def trained(quantize, x, s, z, grid, of=(True, True, True)):
    """The result, and the gradients of the sum of y times 1, 2, 3, ... by x, s and z; None where none is asked for."""
    given = [torch.tensor(v).requires_grad_(r) for v, r in zip((x, s, z), of, strict=True)]
    y = quantize(*given, grid)
    if any(of):
        (y * torch.arange(1.0, y.numel() + 1).view_as(y)).sum().backward()
    return y.detach().tolist(), *(None if v.grad is None else v.grad.tolist() for v in given)


def plain(x, s, z, grid):
    return fake_quantize(TorchOps, x, s, z, grid)


BOTH = pytest.mark.parametrize("quantize", [TorchOps.fake_quantize, plain], ids=["by hand", "plain"])


@BOTH
def test_values_and_gradients_of_one_scale(quantize):
    """x / 0.5 = -9, -1.4, 0.6, 2.4, 8 become codes -4, -1, 1, 2, 3; s has round(v) - v inside, the code outside."""
    y, of_x, of_s, of_z = trained(quantize, [-4.5, -0.7, 0.3, 1.2, 4.0], 0.5, 0.0, INT3)
    assert y == [-2, -0.5, 0.5, 1, 1.5]
    assert of_x == [0, 2, 3, 4, 0]
    assert of_s == pytest.approx(1 * -4 + 2 * 0.4 + 3 * 0.4 + 4 * -0.4 + 5 * 3)
    assert of_z == pytest.approx(-0.5 * (1 + 5))


@BOTH
def test_a_zero_point_moves_the_ends(quantize):
    """Codes 0 .. 7 about 5: reals of -5 s to 2 s."""
    y, of_x, of_s, of_z = trained(quantize, [-3.0, -2.4, 0.1, 1.1, 1.6], 0.5, 5.0, UINT3)
    assert y == [-2.5, -2.5, 0, 1, 1] and of_x == [0, 2, 3, 4, 0]
    assert of_s == pytest.approx(1 * -5 + 2 * -0.2 + 3 * -0.2 + 4 * -0.2 + 5 * 2) and of_z == pytest.approx(-3)


@BOTH
def test_each_channel_has_gradients_of_its_own(quantize):
    x, s, z = [[0.7, 9.0], [-9.0, -0.7]], [[1.0], [0.5]], [[0.0], [1.0]]
    y, of_x, of_s, of_z = trained(quantize, x, s, z, INT3)
    assert y == [[1, 3], [-2.5, -0.5]] and of_x == [[1, 0], [0, 4]]
    assert of_s == [pytest.approx([0.3 + 2 * 3]), pytest.approx([3 * -5 + 4 * 0.4])]
    assert of_z == [[-2.0], [-0.5 * 3]]


@BOTH
@pytest.mark.parametrize("of", [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)])
@pytest.mark.parametrize("channels", [False, True])
def test_gradients_are_of_what_trains_and_do_not_depend_on_what_else_does(quantize, channels, of):
    x = [[-4.5, -0.7], [1.2, 4.0]]
    s, z = ([[0.5], [0.25]], [[0.0], [1.0]]) if channels else (0.5, 0.0)
    y, *grads = trained(quantize, x, s, z, INT3)
    again, *some = trained(quantize, x, s, z, INT3, of)
    assert again == y
    for wanted, found, asked in zip(grads, some, of, strict=True):
        assert found is None if not asked else torch.allclose(torch.tensor(found), torch.tensor(wanted))


@BOTH
def test_the_ends_themselves_are_inside(quantize):
    y, of_x, of_s, of_z = trained(quantize, [-2.0, 1.5], 0.5, 0.0, INT3)
    assert (y, of_x, of_s, of_z) == ([-2, 1.5], [1, 2], 0, 0)


@BOTH
@pytest.mark.parametrize("rule, codes", [("half_away", [-2, -1, 1, 2]), ("floor", [-2, -1, 0, 1])])
def test_other_roundings_train_alike(quantize, rule, codes):
    grid = Grid(bits=3, qmin=-4, qmax=3, rounding=rule)
    y, of_x, of_s, _ = trained(quantize, [-1.5, -0.5, 0.5, 1.5], 1.0, 0.0, grid)
    assert y == codes and of_x == [1, 2, 3, 4]
    v = (-1.5, -0.5, 0.5, 1.5)
    assert of_s == pytest.approx(sum(k * (q - x) for k, q, x in zip((1, 2, 3, 4), codes, v, strict=True)))


@BOTH
def test_tables_train_between_their_ends(quantize):
    """x / 0.5 = -6, -1.4, 0.5, 2, 8 take -2, -1, 0, 3, 3; beyond an end that end has the gradient."""
    y, of_x, of_s, _ = trained(quantize, [-3.0, -0.7, 0.25, 1.0, 4.0], 0.5, 0.0, TABLE, (True, True, False))
    assert y == [-1, -0.5, 0, 1.5, 1.5] and of_x == [0, 2, 3, 4, 0]
    assert of_s == pytest.approx(1 * -2 + 2 * 0.4 + 3 * -0.5 + 4 * 1 + 5 * 3)
    assert trained(quantize, [-2.1, -1.9, 2.4], 1.0, 0.0, LOG)[0] == [-4, -1, 4]  # from -2 and 2 on, on the logarithm


def test_gradients_are_the_same_however_numbers_lie_in_memory():
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    found = []
    last = x.contiguous(memory_format=torch.channels_last)
    for y in (x, last, x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)):
        s, v = torch.tensor(0.3, requires_grad=True), y.detach().requires_grad_()
        (TorchOps.fake_quantize(v, s, torch.tensor(0.0), INT3) * x).sum().backward()
        found.append((v.grad, s.grad))
    for of_x, of_s in found[1:]:
        torch.testing.assert_close(of_x, found[0][0])
        torch.testing.assert_close(of_s, found[0][1])


def test_infinite_numbers_take_the_ends():
    x = torch.tensor([-float("inf"), float("inf"), 1e30])
    for grid in (INT3, TABLE):
        top = 3.0
        low = -4.0 if grid is INT3 else -2.0
        for quantize in (TorchOps.fake_quantize, plain):
            assert quantize(x, torch.tensor(1.0), torch.tensor(0.0), grid).tolist() == [low, top, top]


def test_a_scale_keeps_its_shape_in_its_gradient():
    for shape in ((), (1,), (1, 1)):
        s = torch.full(shape, 0.5, requires_grad=True)
        TorchOps.fake_quantize(torch.ones(2, 3), s, torch.zeros(shape), INT3).sum().backward()
        assert s.grad.shape == shape


def test_functions_are_those_of_torch_under_the_names_of_keras():
    x = torch.tensor([[3.0, -1.0], [2.0, 0.5]])
    assert TorchOps.size(x) == 4 and TorchOps.traced(x) is False
    assert float(TorchOps.sum(x)) == 4.5 and float(TorchOps.mean(x)) == 1.125
    assert TorchOps.sum(x, 0).tolist() == [5, -0.5] and TorchOps.mean(x, 1).tolist() == [1, 1.25]
    assert TorchOps.sum(x, 1, keepdims=True).tolist() == [[2], [2.5]]
    assert TorchOps.mean(x, (0, 1), keepdims=True).tolist() == [[1.125]]
    assert TorchOps.sum(x, 0).shape == TorchOps.mean(x, 0).shape == (2,)
    assert TorchOps.sort(torch.tensor([3.0, -1.0, 2.0])).tolist() == [-1, 2, 3]
    assert float(TorchOps.power(2.0, torch.tensor(3.0))) == 8
    table, edges = torch.tensor([10.0, 20.0, 30.0]), torch.tensor([0.0, 1.0])
    at = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0])
    assert TorchOps.entry(table, edges, at).tolist() == [10, 10, 20, 20, 30]
    made = TorchOps.constant([1, 2], x.double())
    assert made.tolist() == [1, 2] and made.dtype is torch.float64
    v = torch.ones(1, requires_grad=True)
    assert not TorchOps.stop_gradient(v).requires_grad and TorchOps.tanh is torch.tanh


def test_a_straight_through_value_is_exact_and_its_gradient_is_that_of_the_other():
    x, y = torch.tensor([0.1, 7.0], requires_grad=True), torch.tensor([3.3, -2.2], requires_grad=True)
    found = ste(TorchOps, x, y)
    (found * torch.tensor([1.0, 2.0])).sum().backward()
    assert torch.equal(found, y) and x.grad.tolist() == [1, 2] and y.grad is None
    v = torch.tensor([2.0], requires_grad=True)
    scaled = scale_gradient(TorchOps, v, 0.25)
    scaled.backward()
    assert float(scaled.detach()) == 2 and float(v.grad) == 0.25


def test_what_is_clamped_has_its_gradient_at_both_ends_and_the_ends_have_it_beyond():
    x, low, high = (torch.tensor(v, requires_grad=True) for v in ([-2.0, -1.0, 0.0, 1.0, 2.0], -1.0, 1.0))
    y = clamp(TorchOps, x, low, high)
    (y * torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])).sum().backward()
    assert y.tolist() == [-1, -1, 0, 1, 1] and x.grad.tolist() == [0, 2, 4, 8, 0]
    assert float(low.grad) == 1 and float(high.grad) == 16


def test_a_compiler_is_given_plain_operators():
    seen = []

    def backend(module, inputs):
        seen.extend(str(n.target) for n in module.graph.nodes)
        return module.forward

    def rounded(x, s):
        return TorchOps.fake_quantize(x, s, torch.tensor(0.0), INT3)

    torch.compiler.reset()
    x, s = torch.tensor([-4.5, -0.7, 1.2], requires_grad=True), torch.tensor(0.5, requires_grad=True)
    y = torch.compile(rounded, backend=backend, fullgraph=True)(x, s)
    y.sum().backward()
    assert y.tolist() == [-2, -0.5, 1] and x.grad.tolist() == [0, 1, 1]
    assert any("round" in t for t in seen) and not any("autograd" in t for t in seen)
