"""Formats: what readers ask for, what movers carry, and what the user keeps in float."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import UnsupportedError
from chipfit.platform.schema import Format, OpRule, Option, Platform

X = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


class Sum(nn.Module):
    """Two convolutions and the sum of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return self.a(x) + self.b(x)


class Picked(nn.Module):
    """A channel of a convolution's result, chosen at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)

    def forward(self, x):
        y = self.conv(x)
        return torch.index_select(y, 1, torch.argmax(y[0, :, 0, 0]).reshape(1))


#: convolutions write 16 bits, additions read 8
CHIP = Platform(
    name="wide",
    formats={"a8": Format(bits=8), "a16": Format(bits=16), "w8": Format(bits=8)},
    ops=(
        OpRule(match=("Conv2D",), use=(Option(in_="any", w="w8", out="a16"),), src=("M",), conf="V"),
        OpRule(match=("Add",), use=(Option(in_="any", in_bits=(8,), out="a8"),), src=("M",), conf="V"),
    ),
)


def test_codes_that_no_reader_takes_are_refused():
    with pytest.raises(
        UnsupportedError, match=r"result of 'b' is wider than its consumer 'add' can read.*at most 8 bits"
    ):
        chipfit.quantize(Sum().eval(), [X], CHIP, progress=False)


@pytest.mark.parametrize("kept", ["Conv2D", "Add"])
def test_keeping_writers_or_readers_in_float_is_a_way_out(kept):
    plan = chipfit.quantize(Sum().eval(), [X], CHIP, overrides={kept: "float"}, progress=False).plan
    assert plan.quantized("add") is (kept == "Conv2D")
    assert plan.quantized("a.weight") is (kept == "Add")


def test_an_index_that_is_computed_is_not_quantized_with_what_it_picks():
    result = chipfit.quantize(Picked().eval(), [X], "tflite_int8", progress=False)
    gather = next(n for n in result.graph.nodes if n.op == "Gather")
    assert result.plan.quantized(gather.output)
    assert [result.plan.quantized(i) for i in gather.inputs] == [True, False]


def test_a_mover_that_is_kept_in_float_carries_no_codes():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)).eval()
    whole, kept = (
        chipfit.quantize(model, [X], "tflite_int8", overrides=o, progress=False).plan
        for o in ({}, {"MaxPool": "float"})
    )
    assert whole.nodes["max_pool2d"].exec == "follow" and not whole.float_edges
    assert kept.nodes["max_pool2d"].exec == "float" and kept.nodes["max_pool2d"].why
    assert not whole.tensors["max_pool2d"].quantized or whole["max_pool2d"].same_numbers(whole["conv2d"])


class Passed(nn.Module):
    """A convolution, and its input in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return self.conv(x), x.flatten(1)


def test_an_input_that_the_chip_holds_in_codes_is_moved_in_codes():
    result = chipfit.quantize(Passed().eval(), [X], "tflite_int8", progress=False)
    moved = next(n for n in result.graph.nodes if n.op == "Reshape")
    assert result.plan.quantized(moved.output) and result.plan.nodes[moved.name].exec == "follow"


def test_operators_of_one_kernel_name_the_last_as_their_group():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    result = chipfit.quantize(net, [X], "tflite_int8", progress=False)
    first, relu, last = (n.name for n in result.graph.nodes)
    assert [result.plan.nodes[n].group for n in (first, relu, last)] == [relu, relu, ""]


class Mixing(nn.Module):
    """A product of two values, the second of which a layer makes of the first one's codes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.key, self.head = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = nn.functional.avg_pool1d(self.conv(x).relu(), 2).transpose(1, 2)
        return self.head(((y @ self.key(y).transpose(1, 2)).softmax(-1) @ y)[:, 0])


def test_a_result_in_float_is_not_stored_in_a_type_that_its_kernel_does_not_take():
    """Without VNNI products want signed codes, and a linear layer stores what it reads and writes in one type."""
    torch.manual_seed(0)
    result = chipfit.quantize(Mixing().eval(), [torch.randn(8, 8, 12) * 3], "ort_cpu@AVX2", progress=False)
    (pool, key) = (next(n for n in result.graph.nodes if n.op == op).output for op in ("AvgPool", "Linear"))
    assert result.plan[pool].grid.signed is False
    assert not result.plan.quantized(key) or not result.plan[key].grid.signed
    assert result.verify([torch.randn(4, 8, 12) * 3]).verdict == "exact"


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return torch.cat([self.a(x), torch.erf(x)], 1)


def test_a_mover_of_several_takes_all_of_them_in_codes():
    """What an operator in float makes is rounded for it, to the numbers of the others."""
    result = chipfit.quantize(Joined().eval(), [X], "tflite_int8", progress=False)
    plan, (conv, erf, cat) = result.plan, result.graph.nodes
    assert (erf.op, plan.nodes[erf.name].exec, plan.nodes[cat.name].exec) == ("Erf", "float", "follow")
    assert plan[erf.output].same_numbers(plan[cat.output]) and plan[conv.output].same_numbers(plan[cat.output])
    assert (erf.output, cat.name) not in plan.float_edges
