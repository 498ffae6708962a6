"""Quantizer modules: the numerics of the grids, and gradients that train."""

import pytest
import torch

from chipfit.errors import PlanError
from chipfit.frameworks.torch.modules import (
    ActivationQuantizer,
    BiasQuantizer,
    FakeQuantizer,
    LayerWeights,
    fake_quantize_ste,
    register_weight,
)
from chipfit.quantizers.algorithm import Algorithm
from chipfit.quantizers.grids import Grid, fake_quantize
from tests.build import stored

INT4 = Grid(bits=4, qmin=-8, qmax=7)
UINT8 = Grid(bits=8, qmin=0, qmax=255, zero="any")


def _stored(scale, grid=INT4, axis=None):
    return stored(scale, on=grid, axis=axis)


def _quantizer(scale, zero, grid, axis=None):
    return FakeQuantizer("t", stored(scale, zero, on=grid, axis=axis))


def test_numbers_become_the_nearest_on_the_grid_halves_to_even():
    q = _quantizer(0.5, 0, INT4)
    assert q(torch.tensor([-9.0, -0.75, 0.25, 0.75, 9.0])).tolist() == [-4.0, -1.0, 0.0, 1.0, 3.5]
    assert q(torch.tensor([torch.inf, -torch.inf])).tolist() == [3.5, -4.0]
    assert q.quantize(torch.tensor([torch.inf, -torch.inf])).tolist() == [7, -8]


def test_a_quantizer_has_the_arguments_of_the_inferable_one_with_its_present_numbers():
    """A signed grid of 4 bits covers 8 steps below 0; a uniform one of 8 bits at zero point 128 covers -128 to 127."""
    weight = FakeQuantizer("t", _stored(torch.tensor([0.5, 0.25]), axis=0))
    assert (weight.per_channel, weight.channel_axis, weight.num_bits) == (True, 0, 4)
    assert weight.threshold == [4.0, 2.0] and weight.threshold_np.tolist() == [4.0, 2.0]
    with torch.no_grad():
        weight.scale.mul_(2)
    assert weight.threshold == [8.0, 4.0] and not hasattr(weight, "min_range")
    result = ActivationQuantizer("t", stored(0.5, 128, on=UINT8)).activation_holder_quantizer
    assert (result.min_range, result.max_range) == (-64.0, 63.5) and not hasattr(result, "per_channel")
    assert ActivationQuantizer("t", _stored(0.5)).signed is True


def test_scalars_are_rounded_and_a_tensor_of_one_axis_may_leave_its_axis_out():
    assert [_quantizer(0.5, 0, INT4, axis)(torch.tensor(0.7)).item() for axis in (None, 0)] == [0.5, 0.5]
    assert _quantizer([0.5, 0.25], [0, 0], INT4)(torch.tensor([0.7, 0.7])).tolist() == [0.5, 0.75]


@pytest.mark.parametrize("axis", [None, 1])
def test_a_quantizer_rounds_bit_for_bit_as_the_grid_does(axis):
    x = torch.randn(5, 3, 7) * 4
    s, z = ([0.031, 0.0173, 0.022], [120, 3, 250]) if axis else (0.031, 120)
    q = _quantizer(s, z, UINT8, axis)
    assert torch.equal(q(x), fake_quantize(x, q.scale, q.zero_point, UINT8, axis))


def test_gradients_pass_inside_the_range_and_stop_outside():
    x = torch.tensor([-5.0, -4.0, 0.3, 3.5, 3.9], requires_grad=True)
    _quantizer(0.5, 0, INT4)(x).sum().backward()
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_the_gradient_of_the_scale_is_that_of_lsq():
    """Esser et al. 2020, eq. 3: qmin, round(v) - v, or qmax by position of v = x / s."""
    q = _quantizer(0.5, 0, INT4)
    q.scale.requires_grad_()
    q(torch.tensor([-9.0, 0.35, 9.0])).sum().backward()
    assert q.scale.grad.item() == pytest.approx(-8 + (1 - 0.7) + 7)


def test_the_compiled_form_has_the_same_values_and_gradients():
    x, q = torch.randn(4, 3, 5) * 9, _quantizer([0.03, 0.1, 0.07], [7, 128, 200], UINT8, 1)
    x[0, 0, 0], x[0, 0, 1] = torch.inf, -torch.inf
    q.scale.requires_grad_()

    def run(f):
        a, q.scale.grad = x.clone().requires_grad_(), None
        y = f(a, q.scale, q.zero_point, UINT8, 1)
        y.square().sum().backward()
        return y, a.grad, q.scale.grad[1:]  # channel 0 meets an infinity

    torch._dynamo.reset()
    for eager, compiled in zip(
        run(fake_quantize_ste), run(torch.compile(fake_quantize_ste, backend="eager", fullgraph=True)), strict=True
    ):
        torch.testing.assert_close(eager, compiled, rtol=1e-5, atol=1e-4, equal_nan=True)


def test_scales_stay_in_single_precision_or_better_and_results_have_the_type_of_the_data():
    """A scale in half precision would move every code."""
    q = _quantizer(0.1, 0, INT4).bfloat16()
    assert q.scale.dtype == torch.float32 and q.scale.item() == torch.tensor(0.1).item()
    assert q(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert q.double().scale.dtype == torch.float64 and q.half().scale.dtype == torch.float64
    assert q.float().scale.dtype == torch.float32


def test_a_function_that_rounds_in_its_place_moves_with_it_and_is_not_trained():
    q = FakeQuantizer("t", _stored(0.5), Algorithm())
    q.function = torch.nn.PReLU()
    assert q.double().function.weight.dtype == torch.float64
    assert list(q.trainable_parameters()) == ["scale"] and q.trained_grid() == INT4


def test_of_what_is_rounded_a_share_is_blended_in():
    q, x = _quantizer(0.5, 0, INT4), torch.tensor([0.3, 0.7])
    q.share = 0.25
    assert q(x).tolist() == pytest.approx([0.3 + 0.25 * 0.2, 0.7 - 0.25 * 0.2])
    q.function = lambda x: x + 4
    assert q(x).tolist() == pytest.approx([1.3, 1.7])
    q.share = 1.0
    assert q(x).tolist() == pytest.approx([4.3, 4.7])
    q.function, q.share = None, 0.0
    assert torch.equal(q(x), x) and set(q.state_dict()) == {"scale", "zero_point"}


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_codes_and_the_reals_that_they_stand_for_run_along_an_axis(axis):
    x = torch.linspace(-4, 4, 27).view(3, 3, 3)
    q = _quantizer([0.25, 0.5, 1.0], [3, 100, 250], UINT8, axis)
    shape = [3 if d == axis else 1 for d in range(3)]
    s, z = torch.tensor([0.25, 0.5, 1.0]).view(shape), torch.tensor([3, 100, 250]).view(shape)
    want = (torch.round(x / s) + z).clamp(0, 255)
    assert torch.equal(q.quantize(x).float(), want) and torch.equal(q.dequantize(q.quantize(x)), (want - z) * s)
    assert torch.equal(q.reals(x), x) and not q.quantize(x.requires_grad_()).requires_grad


def test_codes_of_a_table_stand_for_its_entries():
    table = Grid(bits=2, qmin=0, qmax=2, kind="lut", table=(-3.0, 0.0, 2.0))
    q = _quantizer(0.5, 0, table)
    codes = q.quantize(torch.tensor([-9.0, 0.1, 1.2]))
    assert codes.tolist() == [0, 1, 2] and q.dequantize(codes).tolist() == [-1.5, 0, 1]


def test_numbers_that_do_not_train_are_there_and_frozen():
    q = FakeQuantizer("t", _stored(0.5))
    assert (
        not q.scale.requires_grad and q.trainable_parameters() == {} and set(q.state_dict()) == {"scale", "zero_point"}
    )
    learned = FakeQuantizer("t", _stored(0.5), Algorithm())
    assert learned.scale.requires_grad and list(learned.trainable_parameters()) == ["scale"]
    learned.rescale(torch.tensor(4.0))
    assert learned.numbers()[0].tolist() == 2 and learned.scale.tolist() == [2]


def test_a_bias_is_bypassed_or_blended_as_others_are():
    factors = _quantizer(0.5, 0, INT4), _quantizer([0.5, 0.25], [0, 0], INT4, 0)
    grid = Grid(bits=32, qmin=-(2**31), qmax=2**31 - 1)
    bias = BiasQuantizer("b", _stored([1.0] * 4, grid, 0), factors)  # two groups of two channels
    b = torch.tensor([0.3, 0.3, -0.4, -0.4])
    assert bias.numbers()[0].tolist() == [0.25, 0.125, 0.25, 0.125] and bias.numbers()[1].tolist() == [0] * 4
    assert bias(b).tolist() == [0.25, 0.25, -0.5, -0.375]
    bias.share = 0.5
    assert bias(b).tolist() == pytest.approx([0.275, 0.275, -0.45, -0.3875])
    bias.share = 0.0
    assert torch.equal(bias(b), b)


def test_weights_are_registered_under_their_dotted_names():
    host = torch.nn.Module()
    table, leaf = register_weight(host, "a.b.weight", torch.nn.Parameter(torch.ones(2)), rounded={"a.b"})
    assert leaf == "weight" and isinstance(host.a.b, LayerWeights) and type(host.a) is torch.nn.Module
    assert table is host.a.b._parameters and torch.equal(host.a.b.weight_of("weight"), torch.ones(2))
    table, _ = register_weight(host, "a.b.mean", torch.zeros(3), rounded={"a.b"})
    assert table is host.a.b._buffers and torch.equal(host.a.b.weight_of("mean"), torch.zeros(3))
    assert register_weight(host, "top", torch.zeros(1))[0] is host._buffers
    register_weight(host, "a.b.c.weight", torch.zeros(1), rounded={"a.b"})
    assert type(host.a.b.c) is torch.nn.Module


@pytest.mark.parametrize("kind, computed", [(torch.float16, torch.float32), (torch.float64, torch.float64)])
def test_numbers_are_rounded_in_the_wider_type_and_come_back_in_their_own(kind, computed):
    x = torch.tensor([0.35, 1.05, 2.45], dtype=kind)
    q = _quantizer(0.1, 0, UINT8)
    y = q(x)
    s = q.scale.to(computed)
    assert y.dtype == kind and torch.equal(y, (torch.round(x.to(computed) / s) * s).to(kind))


def test_a_quantizer_and_a_bias_say_what_they_are():
    assert repr(_quantizer(0.5, 0, INT4)) == "FakeQuantizer(t, 4 bit, codes -8..7, axis=None)"
    factors = _quantizer(0.5, 0, INT4), _quantizer(0.25, 0, INT4)
    bias = BiasQuantizer("b", _stored(1.0, Grid(bits=32, qmin=-(2**31), qmax=2**31 - 1)), factors)
    assert repr(bias) == "BiasQuantizer(b, 32 bit at input scale x weight scale)"
    assert bias.share == 1.0 and list(bias.parameters()) == []


def test_the_grid_lies_beside_a_checkpoint_under_the_name_of_the_quantizer():
    """A checkpoint without it, as of plain tables of tensors, is taken."""
    host, other = (torch.nn.ModuleDict({"ab": _quantizer(0.5, 0, g)}) for g in (INT4, UINT8))
    state = host.state_dict()
    assert state._metadata["ab"]["grid"] == repr(INT4) and set(state) == {"ab.scale", "ab.zero_point"}
    with pytest.raises(PlanError, match="the grid of 't' differs") as refused:
        other.load_state_dict(state)
    assert (refused.value.got, refused.value.allowed) == (repr(INT4), repr(UINT8))
    other.load_state_dict(dict(state))
    assert float(other["ab"].scale) == 0.5


def test_an_algorithm_is_told_when_it_trains():
    told = []

    class Told(Algorithm):
        def call(self, ops, x, p, grid):
            told.append(p["training"])
            return super().call(ops, x, p, grid)

    q = FakeQuantizer("t", _stored(0.5), Told())
    q.train()(torch.ones(2))
    q.eval()(torch.ones(2))
    assert told == [True, False]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_weight_that_is_rounded_in_place_of_another_has_scales_along_its_axis(axis):
    class Twice(Algorithm):
        """Rounds w + s."""

        def reals(self, ops, x, p, grid):
            return x + p["scale"]

    w, s = torch.zeros(3, 3, 3), torch.tensor([0.25, 0.5, 1.0])
    got = FakeQuantizer("t", _stored(s.tolist(), axis=axis), Twice()).reals(w.half())
    assert got.dtype == torch.float16
    assert torch.equal(got.float(), s.reshape([3 if d == axis else 1 for d in range(3)]).expand(3, 3, 3))


def test_a_holder_names_what_rounds():
    class Theirs(Algorithm):
        quantizer = torch.nn.Identity()

    holder = ActivationQuantizer("t", _stored(0.5))
    assert holder.activation_holder_quantizer is holder
    assert ActivationQuantizer("t", _stored(0.5), Theirs()).activation_holder_quantizer is Theirs.quantizer
