"""The counting behind a verification: each number by hand, on results of a device that are made up."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from chipfit.errors import DataError, RuntimeUnavailable, UnknownNameError, VerificationError
from chipfit.export import FileTensor
from chipfit.graph.ir import Graph, Node, Value
from chipfit.pipeline import quantize
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.platform.load import load
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.registry import DeviceRuntime
from chipfit.verify import (
    BORDER,
    DEQUANTIZED_GAP,
    MAX_SIMULATED_SAMPLES,
    OUTPUT_GAP,
    Comparator,
    ConstantComparison,
    OutputComparison,
    TensorComparison,
    Verification,
    _by_tensor,
    _differing,
    _gap,
    _held,
    _least_differing,
    _misshapen,
    _types,
    own_runtime,
)


def stored(scale=0.5, zero=0, bits=8, axis=None) -> Stored:
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    grid = Grid(bits=bits, qmin=low, qmax=high, zero="any", per="tensor" if axis is None else "channel")
    return Stored(
        format=f"i{bits}",
        grid=grid,
        scale=torch.tensor(scale),
        zero_point=torch.tensor(zero, dtype=torch.int32),
        axis=axis,
    )


def ints(*v: int, dtype=torch.int8) -> torch.Tensor:
    return torch.tensor(v, dtype=dtype)


# ---------------------------------------------------------------- tensors


def test_a_tensor_begins_with_nothing_counted():
    row = TensorComparison("t", "layer", "Conv2D")
    assert (row.elements, row.op_differing, row.op_largest, row.freely, row.differing, row.largest) == (0,) * 6
    assert (row.ties, row.astray, row.missed, row.signal, row.noise) == (0, 0, 0, 0.0, 0.0)
    assert row.fraction == 0.0
    assert (row.in_float, row.float_ops, row.why, row.wrong, row.fault) == (False, (), "", "", "")
    out = OutputComparison("y", "t")
    assert (out.float_ops, out.span, out.elements, out.differing, out.gap, out.op_gap) == ((), 0.0, 0, 0, 0.0, 0.0)
    assert not out.wrong and not out.inner and not out.fault
    held = ConstantComparison("t", "weight")
    assert (held.elements, held.differing, held.why, held.wrong, held.fault) == (0, 0, "", "", "")
    found = Verification("r", True)
    assert (found.samples, found.freely, found.labelled, found.calibrated, found.integers, found.differing) == (0,) * 6
    assert (found.exact_share, found.output_gap, found.rows, found.first_difference) == (0.0, 0.0, [], None)


def test_batches_add_up_and_the_largest_difference_stays():
    """Reals 1, 2, -1 in steps of 0.5 about code 1 are 3, 5, -1; the device is off by 1, by -3, and by nothing."""
    row, reals = TensorComparison("t", "", "Conv2D"), torch.tensor([1.0, 2.0, -1.0])
    row.add(ints(4, 2, -1), ints(3, 2, -1), stored(0.5, 1))
    assert (row.elements, row.op_differing, row.op_largest) == (3, 1, 1)
    assert (row.freely, row.differing, row.largest, row.ties, row.astray) == (0, 0, 0, 0, 0)
    row.add_free(ints(4, 2, -1), ints(3, 5, -1), reals, stored(0.5, 1))
    assert (row.elements, row.freely, row.differing, row.largest) == (3, 3, 2, 3)
    assert row.signal == 1 + 4 + 1 and row.noise == 0.5**2 + 1.5**2
    assert row.sqnr_db == pytest.approx(10 * math.log10(6 / 2.5))
    row.add(ints(3), ints(5), stored(0.5, 1))
    row.add_free(ints(3), ints(3), torch.tensor([1.0]), stored(0.5, 1))
    assert (row.elements, row.differing, row.largest, row.op_differing, row.op_largest) == (4, 2, 3, 2, 2)
    assert (row.freely, row.signal, row.noise, row.fraction) == (4, 7.0, 2.5, 0.5)


def test_without_noise_the_ratio_is_infinite_and_without_signal_it_is_far_below_zero():
    assert TensorComparison("t", "", "Relu", signal=4.0).sqnr_db == math.inf
    assert TensorComparison("t", "", "Relu", noise=1.0).sqnr_db == pytest.approx(-3000)
    assert TensorComparison("t", "", "Relu", signal=1.0, noise=100.0).sqnr_db == pytest.approx(-20)


def test_codes_of_no_sign_differ_by_as_much_as_they_are_apart():
    a, b = torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([255, 255], dtype=torch.uint8)
    places, none = _differing(a, b), _differing(a, a)
    assert _gap(a, b, places) == 255 and _gap(b, a, places) == 255 and _gap(a, a, none) == 0


@pytest.mark.parametrize(
    "place, bits, tie, astray",
    [
        (0.5, 8, 1, 0),
        (0.5 + 1 / 512, 8, 1, 0),  # the 512th of a code
        (0.5 - 1 / 512, 8, 1, 0),
        (0.5 + 1 / 511, 8, 0, 0),  # within 255 / 65536 of a code
        (0.5 - 255 / 65536, 8, 0, 0),
        (0.5 + 256 / 65536, 8, 0, 1),
        (-1.5 - 256 / 65536, 8, 0, 1),
        (0.5, 16, 1, 0),
        (-1.0, 8, 0, 1),
        (0.0, 16, 0, 0),  # the codes of 16 bits span 65535: all reals are near
    ],
)
def test_a_real_is_near_to_half_way_by_the_border_or_by_a_512th_of_a_code(place, bits, tie, astray):
    row = TensorComparison("t", "", "Tanh", float_ops=("Tanh",))
    device = torch.tensor([math.floor(place) + 1])
    row.add(device, device - 1, stored(0.25, 0, bits), torch.tensor([place * 0.25]))
    assert (row.ties, row.astray, row.op_differing) == (tie, astray, 1)


def test_of_many_bits_a_512th_of_a_code_is_near_and_no_more():
    """4 bits: 15 / 65536 is less than 1 / 512."""
    for off, astray in ((1 / 512, 0), (1 / 500, 1)):
        row = TensorComparison("t", "", "Tanh", float_ops=("Tanh",))
        row.add(ints(1), ints(0), stored(1.0, 0, 4), torch.tensor([0.5 + off]))
        assert row.astray == astray
    assert BORDER == 1 / 65536 and OUTPUT_GAP == 1e-4 and DEQUANTIZED_GAP == 1 / 4194304


@pytest.mark.parametrize("elements, allowed", [(0, 1), (100, 1), (199, 1), (200, 2), (1000, 10)])
def test_behind_floats_one_in_a_hundred_may_differ_or_one(elements, allowed):
    assert TensorComparison("t", "", "Tanh", elements=elements, float_ops=("Tanh",)).allowed == allowed
    assert TensorComparison("t", "", "Tanh", elements=elements, float_ops=("Tanh",), ties=7).allowed == allowed + 7
    assert TensorComparison("t", "", "Tanh", elements=elements, ties=7).allowed == 0


def test_a_fault_says_how_many_differ_and_by_how_much():
    assert TensorComparison("t", "", "Relu", elements=9, op_differing=2, op_largest=3).fault == (
        "2 of 9 integers differ by up to 3 given the device's inputs, 0 may"
    )
    behind = TensorComparison("t", "", "Tanh", elements=9, op_differing=2, op_largest=1, astray=1, float_ops=("Tanh",))
    assert behind.fault == (
        "2 of 9 integers differ by up to 1 given the device's inputs, 1 may by 1, half way between two codes; "
        "1 lie elsewhere"
    )
    assert TensorComparison("t", "", "Relu", elements=9, differing=4, largest=9).fault == ""  # of others' errors
    assert TensorComparison(
        "t", "", "Tanh", elements=9, op_differing=1, op_largest=2, float_ops=("Tanh",)
    ).fault  # by two
    assert not TensorComparison("t", "", "Tanh", elements=9, op_differing=1, op_largest=1, float_ops=("Tanh",)).fault
    assert TensorComparison(
        "t", "", "Tanh", elements=9, op_differing=2, op_largest=1, float_ops=("Tanh",)
    ).fault  # too many
    assert TensorComparison("t", "", "Tanh", elements=9, astray=1, float_ops=("Tanh",)).fault
    assert (TensorComparison("t", "l", "Relu").who, TensorComparison("t", "", "Relu").who) == ("Relu 'l'", "Relu 't'")


# ---------------------------------------------------------------- outputs


def test_numbers_of_an_output_are_compared_bit_for_bit_and_nan_is_nan():
    out, nan = OutputComparison("y", "y"), float("nan")
    device = torch.tensor([1.0, nan, nan, math.inf, 5.0])
    out.add(device, torch.tensor([1.0, nan, nan, math.inf, 5.5]), torch.tensor([1.5, nan, 0.0, math.inf, 5.0]))
    assert (out.elements, out.differing, out.gap) == (5, 1, math.inf)  # NaN against 0
    assert out.op_gap == 0.5 / 5.5
    out.add(torch.tensor([2.0]), torch.tensor([2.0]), torch.tensor([2.0]))
    assert (out.elements, out.differing, out.op_gap) == (6, 1, 0.5 / 5.5)


@pytest.mark.parametrize("alone", [[0.0, 0.25], [float("nan"), 0.25], [-math.inf, 0.25], [math.inf, 0.25]])
def test_a_gap_is_relative_to_the_largest_finite_number(alone):
    """NaN and infinities that both sides have are no differences, and no size."""
    out, x = OutputComparison("y", "y"), torch.tensor(alone)
    out.add(x + torch.tensor([0.0, 0.125]), x, x)
    assert out.op_gap == 0.125 / 0.25 and out.gap == 0.125 and out.differing == 1


@pytest.mark.parametrize(
    "device, alone, differing, gap",
    [
        ([True, False], [True, True], 1, 1.0),
        ([7, -7], [7, 1], 1, 8.0),
        ([3e38, 1.0], [-3e38, 1.0], 1, 6e38),  # more than float32 holds
        ([1.0, 1.0 + 2.0**-23], [1.0, 1.0], 1, 2.0**-23),
        ([2.0**-149, 1.0], [0.0, 1.0], 1, 2.0**-149),
        ([math.inf, 1.0], [math.inf, 3.0], 1, 2.0),
    ],
)
def test_numbers_of_any_type_are_apart(device, alone, differing, gap):
    out = OutputComparison("y", "y", span=1.0)
    out.add(torch.tensor(device), torch.tensor(alone), torch.tensor(alone))
    assert (out.elements, out.differing) == (2, differing) and out.gap == out.op_gap == pytest.approx(gap)


def test_the_gap_of_an_output_in_codes_is_relative_to_what_these_span():
    out, x = OutputComparison("y", "y", span=8.0), torch.tensor([0.5])
    out.add(x + 1, x, x + 2)
    assert (out.op_gap, out.gap) == (0.125, 1.0)
    nothing = OutputComparison("y", "y")
    nothing.add(torch.zeros(2), torch.zeros(2), torch.zeros(2))
    assert (nothing.op_gap, nothing.elements, nothing.fault) == (0.0, 2, "")


@pytest.mark.parametrize(
    "float_ops, differing, fault", [((), 0, ""), ((), 1, "1 of"), (("Erf",), 2, ""), (("Erf",), 3, "3 of")]
)
def test_of_integers_behind_floats_one_in_a_hundred_may_differ(float_ops, differing, fault):
    out, x = OutputComparison("y", "y", float_ops), torch.zeros(200, dtype=torch.long)
    out.add(x + (torch.arange(200) < differing), x, x)
    assert out.fault[:4] == fault[:4] and (out.elements, out.differing) == (200, differing)


def test_an_output_of_another_shape_is_wrong_from_then_on():
    out, x = OutputComparison("y", "y"), torch.zeros(2, 3)
    out.add(torch.zeros(3, 2), x, x)
    assert out.elements == 0 and out.fault == "the device gives float32 [3, 2], not float32 [2, 3]"
    out.add(x, x, x)
    assert out.elements == 0 and out.wrong
    absent = OutputComparison("y", "y")
    absent.add(None, x, x)
    assert absent.fault == "it is missing from the device's results"
    empty = OutputComparison("y", "y")
    empty.add(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3))
    assert empty.elements == 0 and empty.fault == ""


def test_the_fault_of_an_output_says_the_gap():
    out = OutputComparison("y", "y", elements=4, differing=2, op_gap=0.25)
    assert out.fault == "2 of 4 numbers are not the simulation's given the device's codes; largest relative gap 0.25"
    at_the_end = (
        OutputComparison("y", "y", ("Erf",), op_gap=OUTPUT_GAP),
        OutputComparison("y", "y", op_gap=DEQUANTIZED_GAP),
    )
    assert [o.fault for o in at_the_end] == ["", ""]


@pytest.mark.parametrize(
    "bits, signed, kind",
    [
        (4, True, "int8"),
        (8, True, "int8"),
        (8, False, "uint8"),
        (9, True, "int16"),
        (16, False, "uint16"),
        (17, False, "int32"),
        (32, True, "int32"),
    ],
)
def test_codes_come_in_the_narrowest_type_and_beyond_16_bits_with_a_sign(bits, signed, kind):
    assert _types(bits, signed) == {kind}


def test_what_cannot_be_compared_says_both_sides():
    x = torch.zeros(2, 3, dtype=torch.int8)
    assert _misshapen(x, x, {"int8"}) == "" and "missing" in _misshapen(None, x, {"int8"})
    assert _misshapen(x, x, {"uint8", "int16"}) == "the device gives int8 [2, 3], not int16 or uint8 [2, 3]"
    assert _misshapen(x[0], x, {"int8"}) == "the device gives int8 [3], not int8 [2, 3]"


# ---------------------------------------------------------------- the whole


def verification(*rows: TensorComparison, **more) -> Verification:
    return Verification("chip", True, rows=list(rows), **more)


def test_what_was_found_in_numbers():
    found = verification(
        TensorComparison("a", "", "Relu", elements=60, differing=3, largest=2),
        TensorComparison("b", "", "Tanh", elements=20, float_ops=("Tanh",), in_float=True),
        TensorComparison("c", "", "Relu", why="elided by the runtime", missed=20),
        TensorComparison("d", "", "Relu", why="elided by the runtime"),
    )
    found.outputs = [
        OutputComparison("y", "y", ("Erf",), gap=0.5),
        OutputComparison("z", "z", gap=0.25),
        OutputComparison("i", "i", gap=9.0, inner=True),
    ]
    assert (found.integers, found.differing, len(found.compared)) == (80, 3, 2)
    assert found.not_compared == {"elided by the runtime": 2}
    assert found.exact_share == 0.6 and found.output_gap == 0.5
    assert found.float_ops == {"Tanh", "Erf"} and found.float_operators == ["Tanh 'b'"]
    assert found.first_difference is found.rows[0] and found.sound and not found.exact
    assert found.verdict == "sound" and found.require({"Tanh", "Erf"}) is found
    with pytest.raises(VerificationError, match="Erf runs in float.*Allowed: in float: Tanh; elsewhere no difference"):
        found.require(["Tanh"])
    with pytest.raises(VerificationError, match="in float: nothing"):
        found.require()


@pytest.mark.parametrize(
    "facts, verdict",
    [
        ({}, "exact"),
        ({"differing": 1}, "sound"),
        ({"op_differing": 1, "op_largest": 1}, "departs"),
        ({"wrong": "bad"}, "departs"),
    ],
)
def test_a_verdict_is_a_word(facts, verdict):
    found = verification(TensorComparison("a", "", "Relu", elements=5, **facts))
    assert found.verdict == verdict and found.sound is (verdict in ("exact", "sound"))
    found.promised = False
    alone = {"departs": "departs" if "wrong" in facts else "unpromised"}
    assert found.verdict == alone.get(verdict, verdict)


def test_departures_are_of_the_file_of_tensors_and_of_outputs():
    found = verification(
        TensorComparison("a", "", "Relu", elements=5, op_differing=2, op_largest=1),
        TensorComparison("b", "", "Relu", elements=5, wrong="missing"),
    )
    found.held = [ConstantComparison("w", "weight", 4, 1), ConstantComparison("v", "bias", 4)]
    found.outputs = [
        OutputComparison("y", "y", wrong="odd"),
        OutputComparison("m", "m", wrong="odd", inner=True),
        OutputComparison("z", "z"),
    ]
    assert found.departures == [
        "weight 'w' in the file: 1 of its 4 codes are not the plan's",
        "Relu 'b': missing",
        "Relu 'a': 2 of 5 integers differ by up to 1 given the device's inputs, 0 may",
        "output 'y': odd",
        "float 'm': odd",
    ]
    assert found.file_departures == found.departures[:2]


def test_where_nothing_is_stored_in_codes_the_weights_of_the_file_are_what_is_checked():
    assert not verification().checked and verification(held=[ConstantComparison("w", "weight", 3)]).checked
    assert not verification(held=[ConstantComparison("w", "weight")]).checked
    assert not verification(TensorComparison("a", "", "Relu"), held=[ConstantComparison("w", "weight", 3)]).checked
    with pytest.raises(VerificationError, match="nothing was compared"):
        verification().require()


def test_coverage_counts_constants_and_floats_of_the_moment():
    found = verification(TensorComparison("a", "", "Relu", elements=4))
    assert found.coverage() == "compared 1 of 1 tensors; 100.00 % of all integers compared at 0"
    found.held = [
        ConstantComparison("w", "weight"),
        ConstantComparison("b", "bias", why="absent"),
        ConstantComparison("x", "activation"),
        ConstantComparison("v", "weight", 4, 1),
    ]
    found.outputs = [
        OutputComparison("m", "m", inner=True),
        OutputComparison("k", "k", wrong="odd", inner=True),
        OutputComparison("y", "y"),
    ]
    assert found.coverage() == (
        "compared 1 of 1 tensors; 1 of 3 weights and biases read back from the file; "
        "1 of 2 floats as kernels round them each time; 100.00 % of all integers compared at 0"
    )


def test_a_summary_names_what_is_not_modelled_and_accuracies():
    found = verification(samples=3, labelled=2, accuracy={"float": 0.5, "device": 1.0}, warnings=["hot"])
    found.not_modelled = [f"math.{k}: said" for k in "abcde"]
    assert found.summary().splitlines() == [
        "chip: no value is stored in codes over 3 samples",
        "compared 0 of 0 tensors",
        "said by the platform, not modelled: math.a, math.b, math.c, math.d, ...",
        "top-1 of 2 samples: float 50.00 %, device 100.00 %",
        "hot",
    ]
    found.rows = [TensorComparison(f"r{k}", "", "Tanh", in_float=True) for k in range(7)]
    assert "in float by the runtime: " + ", ".join(f"Tanh 'r{k}'" for k in range(6)) + " and 1 more" in found.summary()
    found.not_modelled = found.not_modelled[:4]
    assert "math.d\n" in found.summary()


def test_a_screen_shows_faults_first_and_then_what_differs_most():
    rows = [
        TensorComparison("a", "", "Relu", elements=9, differing=1, largest=1),
        TensorComparison("b", "", "Relu", why="elided"),
        TensorComparison("c", "", "Relu", elements=9, differing=4, largest=2, wrong="bad"),
        TensorComparison("d", "", "Relu", elements=9, differing=3, largest=5, op_differing=0),
    ]
    screen = verification(*rows, TensorComparison("e", "", "Relu", elements=9))._summary()
    assert [r[0] for r in screen.rows] == ["c", "d", "a", "e", "b"]
    assert screen.rows[0] == ("c", "Relu", 9, 4, 2, 0, "bad") and screen.rows[4][-1] == "elided"
    assert screen.title == "Verification on chip: departs" and screen.facts["coverage"].startswith("compared 4 of 5")


def test_a_record_in_json_has_what_is_derived_too():
    found = verification(
        TensorComparison("a", "", "Relu", elements=9, signal=1.0, noise=100.0),
        TensorComparison("b", "", "Relu", wrong="bad"),
    )
    said = found.to_dict()
    assert [r["sqnr_db"] for r in said["rows"]] == [pytest.approx(-20), None]
    assert [r["fault"] for r in said["rows"]] == ["", "bad"]
    assert (said["verdict"], said["exact"], said["integers"]) == ("departs", False, 9)
    found.outputs = [OutputComparison("y", "y", wrong="odd"), OutputComparison("z", "z")]
    assert [o["fault"] for o in found.to_dict()["outputs"]] == ["odd", ""]


@pytest.mark.parametrize(
    "platform, suffix, runtime",
    [
        ("ort_cpu", "", "onnxruntime"),
        ("ort_cpu", ".onnx", "onnxruntime"),
        ("tflite_int8", "", "litert"),
        ("tflite_int8", ".onnx", "onnxruntime"),
        ("ort_cpu", ".tflite", "litert"),
        ("imx500", "", "onnxruntime"),
        ("ort_cpu", ".other", "onnxruntime"),
    ],
)
def test_the_own_runtime_of_a_platform_loads_the_file(platform, suffix, runtime):
    assert own_runtime(load(platform), suffix) == runtime


# ---------------------------------------------------------------- what a file holds


def test_a_file_holds_a_tensor_itself_in_floats_and_in_copies():
    known = {"w", "w_1", "x", "v_t0"}
    held = {
        n: FileTensor(None, [(np.array(k), np.array(0))])
        for k, n in enumerate(["w", "w_1", "w_2", "w/float", "x_t1/float_t2_3", "x/float_4", "v_t0", "x_t1", "other"])
    }
    found = {k: [int(f.numbers[0][0]) for f in fs] for k, fs in _by_tensor(known, held).items()}
    assert found == {"w": [0, 2, 3], "w_1": [1], "x": [7, 5, 4], "v_t0": [6], "other": [8]}


WEIGHT = torch.tensor([[0.5, 1.0, -2.0], [0.25, 0.5, 0.75]])


def planned(numbers: Stored, role: str = "weight") -> tuple[Graph, Plan]:
    graph = Graph([], [], [], {}, {"w": WEIGHT} if role == "weight" else {})
    return graph, Plan(tensors={"w": TensorPlan(name="w", role=role, stored=numbers)})


PER_ROW = stored([0.5, 0.25], [0, 0], axis=0)
CODES = np.array([[1, 2, -4], [1, 2, 3]])


def numbers(scale, zero=(0, 0)) -> list:
    return [(np.array(scale, np.float32), np.array(zero))]


@pytest.mark.parametrize(
    "codes, said, elements, differing, wrong",
    [
        (CODES, numbers([0.5, 0.25]), 6, 0, ""),
        (CODES.T, numbers([0.5, 0.25]), 6, 0, ""),
        (CODES.reshape(2, 1, 3), numbers([0.5, 0.25]), 6, 0, ""),
        (CODES + [[0, 0, 1], [1, 0, 0]], numbers([0.5, 0.25]), 6, 2, ""),
        (CODES.reshape(-1), numbers([0.5, 0.25]), 6, 0, "its shape is [6]"),
        (CODES * np.float32([[0.5], [0.25]]), numbers([0.5, 0.25]), 6, 0, ""),
        (CODES, numbers([0.5, 0.125]), 6, 0, "scale 0.125 instead of 0.25"),
        (CODES, numbers([0.5, 0.25], (0, 3)), 6, 0, "zero point 3 instead of 0"),
        (None, numbers([0.5, 0.25]), 0, 0, "it is missing from the file"),
    ],
)
def test_a_weight_in_a_file_is_the_plans_or_says_why_not(codes, said, elements, differing, wrong):
    found = _held(*planned(PER_ROW), "w", [FileTensor(codes, said)], {})
    assert (found.elements, found.differing, found.role) == (elements, differing, "weight")
    assert (found.wrong, found.why) == (wrong, "")


def test_what_a_file_does_not_name_is_not_compared():
    assert _held(*planned(PER_ROW), "w", (), {}).why == "not in the file under its name"
    assert _held(*planned(stored(), "activation"), "w", (), {}).wrong == ""
    twice = _held(*planned(PER_ROW), "w", [FileTensor(CODES, []), FileTensor(CODES + [[1, 0, 0], [0, 0, 0]], [])], {})
    assert (twice.elements, twice.differing) == (12, 1)


def test_scales_of_blocks_may_lie_in_either_order_of_axes():
    blocks = Stored(
        format="w",
        grid=Grid(bits=8, qmin=-128, qmax=127, per="block"),
        scale=torch.tensor([[0.5, 0.25, 1.0], [0.125, 2.0, 4.0]]),
        zero_point=torch.zeros(2, 3, dtype=torch.int32),
        axis=1,
    )
    q = blocks.quantize(WEIGHT).numpy()
    for scale in (blocks.scale.numpy(), blocks.scale.t().numpy()):
        assert _held(*planned(blocks), "w", [FileTensor(q, [(scale, np.zeros_like(scale))])], {}).wrong == ""
    off = blocks.scale.numpy() + np.float32([[0, 0, 0], [0, 1, 0]])
    assert (
        _held(*planned(blocks), "w", [FileTensor(q, [(off, np.zeros_like(off))])], {}).wrong == "scale 3 instead of 2"
    )
    flat = blocks.scale.numpy().reshape(-1)
    assert _held(*planned(blocks), "w", [FileTensor(q, [(flat, flat)])], {}).wrong == "scale of the shape [6]"


def test_a_weight_that_is_read_in_float_too_may_stand_there_as_it_is():
    graph, plan = planned(PER_ROW)
    odd = WEIGHT + 0.01
    graph.weights["w"] = odd
    assert _held(graph, plan, "w", [FileTensor(odd.numpy(), [])], {}).differing == 6
    plan = Plan(tensors=plan.tensors, float_edges=frozenset({("w", "reader")}))
    assert _held(graph, plan, "w", [FileTensor(odd.numpy(), [])], {}).differing == 0
    plan = Plan(tensors=plan.tensors, float_edges=frozenset({("v", "reader")}))
    assert _held(graph, plan, "w", [FileTensor(odd.numpy(), [])], {}).differing == 6


def test_the_order_of_axes_is_taken_in_which_the_fewest_differ():
    a = np.array([[1, 2], [3, 4]])
    assert _least_differing(a, a.T) == 0 and _least_differing(a, a) == 0
    assert _least_differing(a, np.array([[1, 3], [2, 5]])) == 1
    assert _least_differing(a, np.zeros((2, 3))) is None
    assert _least_differing(np.zeros((1, 3)), np.array([0, 0, 7])) == 1


# ---------------------------------------------------------------- side by side


def network() -> tuple[Graph, Plan]:
    """y = relu(x) in codes of a half, and z = flatten(y), which holds the same codes."""
    nodes = [Node("r", "Relu", ("x",), ("y",)), Node("f", "Reshape", ("y",), ("z",), {"shape": (-1, 3)})]
    values = {n: Value(n, (None, 3)) for n in "xyz"}
    graph = Graph(nodes, ["x"], ["z"], values, {}, in_spec="{}")
    tensors = {n: TensorPlan(name=n, role="activation", stored=stored(0.5, -128 if n != "x" else 0)) for n in "xyz"}
    plans = {"r": NodePlan(name="r", op="Relu", exec="int"), "f": NodePlan(name="f", op="Reshape", exec="follow")}
    return graph, Plan(tensors=tensors, nodes=plans)


X = torch.tensor([[1.0, -1.0, 2.0], [0.5, 3.0, 2.5]])
CODES_OF = {"x": [[2, -2, 4], [1, 6, 5]], "y": [[-126, -128, -124], [-127, -122, -123]]}
CODES_OF["z"] = CODES_OF["y"]


class Device:
    """It returns what it was made with."""

    def __init__(self, **results) -> None:
        self.results = results

    def run(self, inputs):
        return {k: v(inputs) if callable(v) else v for k, v in self.results.items()}


def result(**changes):
    """The right results of the network: the output in floats, then codes by name."""
    codes = {k: np.array(v, np.int8) for k, v in CODES_OF.items()}
    floats = (np.array(CODES_OF["z"]) + 128) * np.float32(0.5)
    return {k: v for k, v in {"output": floats.astype(np.float32), **codes, **changes}.items() if v is not None}


def compared(results, label=None, filed=(), model=None, x=X, groups=(), freely=None, times=1) -> Verification:
    graph, plan = network()
    plan = replace(plan, groups=groups)
    out = Verification("chip", True)
    out.rows = [TensorComparison(v, "", op) for v, op in (("x", "Input"), ("y", "Relu"), ("z", "Reshape"))]
    out.outputs = [OutputComparison("output", "z", span=127.5)]
    declared = DeviceRuntime(suffix=".tflite", kernels="litert_reference")
    device = Device(**results)
    comparison = Comparator(graph, plan, load("tflite_int8"), device, declared, model, out, set(filed), {}, freely)
    with torch.inference_mode():
        for _ in range(times):
            comparison.add([x], label)
    return out


def test_a_device_that_is_right_is_exact():
    found = compared(result())
    assert found.exact and found.samples == 2 and [r.elements for r in found.rows] == [6, 6, 6]
    assert found.outputs[0].elements == 6 and found.accuracy == {} and found.labelled == 0


def test_an_operator_is_compared_given_the_devices_codes():
    wrong = np.array(CODES_OF["y"], np.int8) + np.int8([[1, 0, 0], [0, 0, 0]])
    found = compared(result(y=wrong, z=wrong, output=(wrong.astype(np.float32) + 128) / 2))
    assert [(r.differing, r.op_differing) for r in found.rows] == [(0, 0), (1, 1), (1, 0)]
    assert found.outputs[0].gap == 0.5 and found.outputs[0].op_gap == 0


@pytest.mark.parametrize(
    "freely, label, own", [(0, None, 0), (1, None, 2), (3, None, 4), (None, None, 8), (0, ints(2, 0), 8)]
)
def test_behind_the_first_samples_without_labels_each_operator_is_compared_by_itself(freely, label, own):
    """Four batches of two samples, of three integers each."""
    found = compared(result(), label, freely=freely, times=4)
    assert (found.samples, found.freely) == (8, own) and found.exact
    assert [(r.elements, r.freely) for r in found.rows] == [(24, 3 * own)] * 3
    assert found.accuracy.keys() == (set() if label is None else {"float", "integer", "device"})
    wrong = np.array(CODES_OF["y"], np.int8) + np.int8([[1, 0, 0], [0, 0, 0]])
    off = compared(result(y=wrong, z=wrong, output=(wrong.astype(np.float32) + 128) / 2), label, freely=freely, times=4)
    assert [(r.differing, r.op_differing) for r in off.rows] == [(0, 0), (own // 2, 4), (own // 2, 0)]
    assert off.outputs[0].gap == (0.5 if own else 0.0) and off.outputs[0].op_gap == 0
    assert not off.exact and "by itself" in off.summary()


@pytest.mark.parametrize(
    "name, filed, why, wrong",
    [
        ("y", (), "missing from its results", "it is missing from the device's results"),
        ("z", (), "elided by the runtime", ""),
        ("z", ("z",), "missing from its results", "it is missing from the device's results"),
        ("x", (), "missing from its results", "it is missing from the device's results"),
    ],
)
def test_a_runtime_may_leave_out_only_what_computes_nothing(name, filed, why, wrong):
    found = compared(result(**{name: None}), filed=filed)
    (row,) = (r for r in found.rows if r.tensor == name)
    assert (row.why, row.wrong, row.missed, row.elements) == (why, wrong, 6, 0)


def test_what_lies_inside_a_fused_kernel_is_not_compared():
    found = compared(result(y=None), groups=(("r", "f"),))
    assert [(r.why, r.wrong, r.missed, r.elements) for r in found.rows] == [
        ("", "", 0, 6),
        ("inside a fused kernel", "", 0, 0),
        ("", "", 0, 6),
    ]
    assert found.exact


@pytest.mark.parametrize("runtime, platform", [("onnxruntime", "ort_cpu"), ("litert", "tflite_int8")])
def test_a_batch_is_cut_where_the_samples_end_that_run_on_their_own_results(runtime, platform):
    pytest.importorskip("ai_edge_litert" if runtime == "litert" else runtime)
    data = [torch.randn(40, 4, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    fit = quantize(nn.Linear(4, 3).eval(), data, platform, progress=False)
    whole = runtime == "litert"  # whose file takes a fixed number at once
    for freely, own in (
        (MAX_SIMULATED_SAMPLES, 40 if whole else 16),
        (50, 80 if whole else 50),
        (0, 0),
        (80, 80),
        (None, 80),
    ):
        found = fit.verify(data, freely=freely)
        assert (found.samples, found.freely) == (80, own) and found.sound
        assert {(r.elements, r.freely) for r in found.rows} == {(80 * n, own * n) for n in (4, 3)}
    labelled = fit.verify([(x, torch.zeros(40, dtype=torch.long)) for x in data])
    assert (labelled.samples, labelled.freely, labelled.labelled) == (80, 80, 80)


def test_a_batch_whose_inputs_differ_in_size_or_are_fixed_is_not_cut():
    graph, plan = network()
    declared = DeviceRuntime(suffix=".onnx")
    comparison = Comparator(
        graph, plan, load("ort_cpu"), Device(), declared, None, Verification("chip", True), set(), {}, 4
    )
    x = torch.randn(6, 3)
    assert [len(part[0]) for part, _ in comparison.parts([x], None)] == [4, 2]
    assert [len(part[0]) for part, _ in comparison.parts([x[:4]], None)] == [4]
    assert len(comparison.parts([x, x[:1]], None)) == 1 and len(comparison.parts([x[0, 0]], None)) == 1
    comparison.graph.values["x"] = replace(graph.values["x"], shape=(6, 3))
    assert len(comparison.parts([x], None)) == 1


@pytest.mark.parametrize("batches, samples", [(None, 9), (1, 2), (2, 5), (4, 9)])
def test_it_stops_after_as_many_batches_as_are_asked_for(batches, samples):
    data = [torch.randn(n, 4) for n in (2, 3, 4)]
    fit = quantize(nn.Linear(4, 3).eval(), data, progress=False)
    assert fit.verify(data, batches=batches).samples == samples
    with pytest.raises(DataError, match="There are no data to verify on"):
        fit.verify(data, batches=0)


class Operators(nn.Module):
    """An input of rank 0 beside one of two samples."""

    def forward(self, gain, x):
        return gain * x


def test_a_number_without_axes_is_one_sample_and_the_first_input_counts():
    from chipfit.frameworks.torch.capture import capture

    graph = capture(Operators(), (torch.tensor(2.0), torch.randn(3, 2)))
    for inputs, samples in (([torch.tensor(2.0), torch.randn(3, 2)], 1), ([torch.ones(3, 1), torch.randn(1, 2)], 3)):
        out = Verification("chip", True)
        device = Device(output=(inputs[0] * inputs[1]).numpy())
        declared = DeviceRuntime(suffix=".onnx")
        Comparator(graph, Plan(), load("ort_cpu"), device, declared, None, out, set(), {}).add(inputs, None)
        assert out.samples == samples


def test_what_a_runtime_raises_is_a_runtime_that_is_not_there_and_our_own_errors_are_ours():
    graph, _ = network()
    with pytest.raises(RuntimeUnavailable, match="cannot run the file on these inputs"):
        compared({"output": lambda inputs: np.zeros(2).reshape(3)})
    with pytest.raises(UnknownNameError):
        compared({"output": lambda inputs: graph.node("none")})


def test_codes_of_another_type_are_not_compared():
    found = compared(result(y=np.array(CODES_OF["y"], np.int16)))
    assert found.rows[1].why == "of another shape or type" and "int16" in found.rows[1].wrong
    assert found.rows[2].elements == 6


def test_a_device_that_returns_none_of_the_tensors_is_another():
    with pytest.raises(RuntimeUnavailable, match="returned none of the 3 tensors.*Got: output"):
        compared(result(x=None, y=None, z=None))


def test_right_answers_are_counted_for_each_side():
    """Labels 2 and 0: the float network says 2 and 1, the device the same but for its second sample."""
    output = result()["output"].copy()
    output[1] = [9, 0, 0]

    class Model(torch.nn.Module):
        def run_flat(self, inputs):
            return [torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), torch.eye(3)[[2, 0]]]

    found = compared(result(output=output), torch.tensor([2, 0]), model=Model)
    assert found.accuracy == {"float": 0.5, "integer": 0.5, "device": 1.0, "simulated": 0.5} and found.labelled == 2
    assert compared(result(), torch.tensor([2])).accuracy == {}  # labels of another batch
    assert compared(result(), torch.tensor([[2], [1]])).accuracy["float"] == 1.0
    assert compared(result(output=np.zeros((2, 4), np.float32)), torch.tensor([2, 1])).accuracy.keys() == {
        "float",
        "integer",
    }


def test_a_batch_without_samples_is_empty_and_not_compared():
    none = {"output": np.zeros((0, 3), np.float32)} | {k: np.zeros((0, 3), np.int8) for k in "xyz"}
    found = compared(none, torch.zeros(0, dtype=torch.long), x=X[:0])
    assert [r.why for r in found.rows] == ["empty"] * 3 and found.samples == 0 and found.accuracy == {}


def test_codes_of_16_bits_without_sign_are_compared():
    """ONNX files hold them; torch, which compares, does not compute with that type."""
    pytest.importorskip("onnxruntime")
    platform = load("ort_cpu")
    wide = {k: f.model_copy(update={"bits": 16}) if k in ("u8", "s8") else f for k, f in platform.formats.items()}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    data = [torch.randn(8, 3, 6, 6)]
    found = quantize(model, data, platform=platform.model_copy(update={"formats": wide}), progress=False)
    grids = [t.grid for t in found.plan.tensors.values() if t.quantized and t.role == "activation"]
    assert {(g.bits, g.signed) for g in grids} == {(16, False)}
    proof = found.verify([torch.randn(4, 3, 6, 6)], runtime="onnxruntime")
    assert proof.integers == 4 * (3 * 36 + 4 * 16 + 4 + 4 + 3) and not proof.departures
