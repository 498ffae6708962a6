"""The counting behind a verification: each number by hand, on results of a device that are made up."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import DataError, RuntimeUnavailable, UnknownNameError, VerificationError
from chipfit.export import FileTensor
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.ir import Graph
from chipfit.plan.record import NodePlan, Plan
from chipfit.platform.load import load
from chipfit.registry import DeviceRuntime
from chipfit.settings import END_TO_END_SAMPLES
from chipfit.simulate.integer import simulate
from chipfit.verify import DEQUANTIZED_GAP, OUTPUT_GAP, Verification, comparisons, default_runtime
from chipfit.verify.run import Comparator, storage_type
from tests.build import graph_of, grid, model_of, node, plan_of, quantized, randn, sequential, stored


def row(name="t", op="Relu", **facts) -> comparisons.TensorComparison:
    return comparisons.TensorComparison(name, "", op, **facts)


def behind_tanh(**facts) -> comparisons.TensorComparison:
    return row(op="Tanh", float_ops=("Tanh",), **facts)


def out(name="y", float_ops=(), **facts) -> comparisons.OutputComparison:
    return comparisons.OutputComparison(name, name, float_ops, **facts)


def ints(*v: int) -> torch.Tensor:
    return torch.tensor(v, dtype=torch.int8)


# ---------------------------------------------------------------- tensors


def test_batches_add_up_and_the_largest_difference_stays():
    """Floats 1, 2, -1 in steps of 0.5 about 1 are 3, 5, -1; the device is off by 1, by -3, and by nothing."""
    found, floats = row(), torch.tensor([1.0, 2.0, -1.0])
    assert (found.fraction, found.sqnr_db, found.fault) == (0.0, math.inf, "")
    found.add(ints(4, 2, -1), ints(3, 2, -1), stored(0.5, 1))
    assert (found.elements, found.op_differing, found.op_largest) == (3, 1, 1)
    assert (found.end_to_end_elements, found.differing, found.largest, found.ties, found.astray) == (0, 0, 0, 0, 0)
    found.add_end_to_end(ints(4, 2, -1), ints(3, 5, -1), floats, stored(0.5, 1))
    assert (found.elements, found.end_to_end_elements, found.differing, found.largest) == (3, 3, 2, 3)
    assert found.signal == 1 + 4 + 1 and found.noise == 0.5**2 + 1.5**2
    assert found.sqnr_db == pytest.approx(10 * math.log10(6 / 2.5))
    found.add(ints(3), ints(5), stored(0.5, 1))
    found.add_end_to_end(ints(3), ints(3), torch.tensor([1.0]), stored(0.5, 1))
    assert (found.elements, found.differing, found.largest, found.op_differing, found.op_largest) == (4, 2, 3, 2, 2)
    assert (found.end_to_end_elements, found.signal, found.noise, found.fraction) == (4, 7.0, 2.5, 0.5)


def test_without_noise_the_ratio_is_infinite_and_without_signal_it_is_far_below_zero():
    assert row(signal=4.0).sqnr_db == math.inf and row(noise=1.0).sqnr_db == pytest.approx(-3000)
    assert row(signal=1.0, noise=100.0).sqnr_db == pytest.approx(-20)


def test_unsigned_integers_differ_by_as_much_as_they_are_apart():
    a, b = torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([255, 255], dtype=torch.uint8)
    for device, alone, largest in ((a, b, 255), (b, a, 255), (a, a, 0)):
        found = row()
        found.add(device, alone, stored())
        assert found.op_largest == largest


@pytest.mark.parametrize(
    "place, bits, tie, astray",
    [
        (0.5, 8, 1, 0),
        (0.5 + 1 / 512, 8, 1, 0),  # the 512th of a step
        (0.5 - 1 / 512, 8, 1, 0),
        (0.5 + 1 / 511, 8, 0, 0),  # within 255 / 65536 of a step
        (0.5 - 255 / 65536, 8, 0, 0),
        (0.5 + 256 / 65536, 8, 0, 1),
        (-1.5 - 256 / 65536, 8, 0, 1),
        (0.5, 16, 1, 0),
        (-1.0, 8, 0, 1),
        (0.0, 16, 0, 0),  # 16-bit integers span 65535: all floats are near
        (0.5 + 1 / 512, 4, 1, 0),  # 15 / 65536 is less than 1 / 512
        (0.5 + 1 / 500, 4, 0, 1),
    ],
)
def test_a_float_is_near_to_half_way_by_the_border_or_by_a_512th_of_a_step(place, bits, tie, astray):
    found, device = behind_tanh(), torch.tensor([math.floor(place) + 1])
    found.add(device, device - 1, stored(0.25, 0, bits), torch.tensor([place * 0.25]))
    assert (found.ties, found.astray, found.op_differing) == (tie, astray, 1)


@pytest.mark.parametrize("error, astray", [(0.02, 1), (0.03, 0)])
def test_where_sums_cancel_floats_may_lie_as_far_from_half_way_as_float32_is_off(error, astray):
    """The device rounds 0.4 of a step up; four times the error of float32 must reach half way."""
    found, floats = behind_tanh(), torch.tensor([0.4, 7.0])
    found.add(ints(1, 7), ints(0, 7), stored(1.0), floats, lambda: floats.double() + error)
    assert found.astray == astray
    tail = out(float_ops=("Log",))
    tail.add(floats + 0.1 * error, floats, exact=lambda: floats.double() - 0.03 * error)
    assert bool(tail.fault) is False and tail.allowed_gap == pytest.approx(0.12 * error / 7)
    tail.add(floats + error, floats, exact=lambda: floats.double())
    assert tail.fault


def test_floats_in_float64_show_what_float32_loses():
    """The variance 14 / 9 of 10000 + {0, 1, 3}, as a mean of squares less the square of the mean."""
    net = model_of(lambda m, x: (x.square().mean(-1) - x.mean(-1).square()) * 3)
    graph, plan = capture(net, [x := torch.tensor([[1e4, 1e4 + 1, 1e4 + 3]])]), plan_of()
    single, double = (simulate(graph, plan, [x], load("ort_cpu"), in_double=d) for d in (False, True))
    (end,) = graph.outputs
    assert double[end].dtype == torch.float64 and single[end].dtype == torch.float32
    assert abs(float(double[end]) - 14 / 3) < 1e-6 < abs(float(single[end]) - 14 / 3)


@pytest.mark.parametrize("elements, allowed", [(0, 1), (100, 1), (199, 1), (200, 2), (1000, 10)])
def test_behind_floats_one_in_a_hundred_may_differ_or_one(elements, allowed):
    assert behind_tanh(elements=elements).allowed == allowed
    assert behind_tanh(elements=elements, ties=7).allowed == allowed + 7
    assert row(elements=elements, ties=7).allowed == 0


def test_a_fault_says_how_many_differ_and_by_how_much():
    assert row(elements=9, op_differing=2, op_largest=3).fault == (
        "2 of 9 integers differ by up to 3 given the device's inputs, and 0 may differ"
    )
    assert behind_tanh(elements=9, op_differing=2, op_largest=1, astray=1).fault == (
        "2 of 9 integers differ by up to 1 given the device's inputs, and 1 may differ by 1, half way between two "
        "integers; 1 differ elsewhere"
    )
    assert row(elements=9, differing=4, largest=9).fault == ""  # of others' errors
    assert behind_tanh(elements=9, op_differing=1, op_largest=2).fault  # by two
    assert behind_tanh(elements=900, op_differing=1, op_largest=2).fault  # however many may
    assert not behind_tanh(elements=9, op_differing=1, op_largest=1).fault
    assert behind_tanh(elements=9, op_differing=2, op_largest=1).fault  # too many
    assert not behind_tanh(elements=9, op_differing=3, op_largest=1, ties=2).fault
    assert behind_tanh(elements=9, astray=1).fault
    assert (comparisons.TensorComparison("t", "l", "Relu").display_name, row().display_name) == ("Relu 'l'", "Relu 't'")


# ---------------------------------------------------------------- outputs


def test_numbers_of_an_output_are_compared_bit_for_bit_and_nan_is_nan():
    found, nan = out(), float("nan")
    device = torch.tensor([1.0, nan, nan, math.inf, 5.0])
    found.add(device, torch.tensor([1.0, nan, nan, math.inf, 5.5]), torch.tensor([1.5, nan, 0.0, math.inf, 5.0]))
    assert (found.elements, found.differing, found.gap) == (5, 1, math.inf)  # NaN against 0
    assert found.op_gap == 0.5 / 5.5
    found.add(torch.tensor([2.0]), torch.tensor([2.0]), torch.tensor([2.0]))
    assert (found.elements, found.differing, found.op_gap) == (6, 1, 0.5 / 5.5)


@pytest.mark.parametrize("alone", [[0.0, 0.25], [float("nan"), 0.25], [-math.inf, 0.25], [math.inf, 0.25]])
def test_a_gap_is_relative_to_the_largest_finite_number(alone):
    """NaN and infinities that both sides have are no differences, and no size."""
    found, x = out(), torch.tensor(alone)
    found.add(x + torch.tensor([0.0, 0.125]), x, x)
    assert found.op_gap == 0.125 / 0.25 and found.gap == 0.125 and found.differing == 1


@pytest.mark.parametrize(
    "device, alone, differing, gap",
    [
        ([True, False], [True, True], 1, 1.0),
        ([7, -7], [7, 1], 1, 8.0),
        ([3e38, 1.0], [-3e38, 1.0], 1, 6e38),  # more than float32 holds
        ([1.0, 1.0 + 2.0**-23], [1.0, 1.0], 1, 2.0**-23),
        ([2.0**-149, 1.0], [0.0, 1.0], 1, 2.0**-149),
        ([math.inf, 1.0], [math.inf, 3.0], 1, 2.0),
        ([0.0, 0.0], [0.0, 0.0], 0, 0.0),
    ],
)
def test_numbers_of_any_type_are_apart(device, alone, differing, gap):
    found = out(span=1.0)
    found.add(torch.tensor(device), torch.tensor(alone), torch.tensor(alone))
    assert (found.elements, found.differing) == (2, differing) and found.gap == found.op_gap == pytest.approx(gap)


def test_the_gap_of_a_quantized_output_is_relative_to_the_span_of_its_grid():
    found, x = out(span=8.0), torch.tensor([0.5])
    found.add(x + 1, x, x + 2)
    assert (found.op_gap, found.gap) == (0.125, 1.0)


@pytest.mark.parametrize(
    "float_ops, differing, fault", [((), 0, ""), ((), 1, "1 of"), (("Erf",), 2, ""), (("Erf",), 3, "3 of")]
)
def test_of_integers_behind_floats_one_in_a_hundred_may_differ(float_ops, differing, fault):
    found, x = out(float_ops=float_ops), torch.zeros(200, dtype=torch.long)
    found.add(x + (torch.arange(200) < differing), x, x)
    assert found.fault[:4] == fault[:4] and (found.elements, found.differing) == (200, differing)


def test_an_output_of_another_shape_is_wrong_from_then_on():
    found, x = out(), torch.zeros(2, 3)
    found.add(torch.zeros(3, 2), x, x)
    assert found.elements == 0 and found.fault == "the device gives float32 [3, 2], not float32 [2, 3]"
    found.add(x, x, x)
    assert found.elements == 0 and found.wrong
    absent, empty = out(), out()
    absent.add(None, x, x)
    empty.add(*[torch.zeros(0, 3)] * 3)
    assert absent.fault == "it is missing from the device's results"
    assert empty.elements == 0 and empty.fault == ""


def test_the_fault_of_an_output_says_the_gap():
    assert out(elements=4, differing=2, op_gap=0.25).fault == (
        "2 of 4 numbers are not the simulation's given the device's integers; largest relative gap 0.25"
    )
    assert out(float_ops=("Erf",), op_gap=OUTPUT_GAP).fault == out(op_gap=DEQUANTIZED_GAP).fault == ""


#: type -> bits and signedness of grids that it stores
TYPES = {"int8": [(4, True), (8, True)], "uint8": [(8, False)], "int16": [(9, True)], "uint16": [(16, False)]}
TYPES |= {"int32": [(17, False), (32, True)]}


@pytest.mark.parametrize("kind", TYPES)
def test_integers_come_in_the_narrowest_type_and_beyond_16_bits_with_a_sign(kind):
    assert {storage_type(grid(bits, signed=signed)) for bits, signed in TYPES[kind]} == {kind}


def test_what_cannot_be_compared_says_both_sides():
    x = torch.zeros(2, 3, dtype=torch.int8)
    assert comparisons.not_comparable(x, x, "int8") == "" and "missing" in comparisons.not_comparable(None, x, "int8")
    assert comparisons.not_comparable(x, x, "uint8") == "the device gives int8 [2, 3], not uint8 [2, 3]"
    assert comparisons.not_comparable(x[0], x, "int8") == "the device gives int8 [3], not int8 [2, 3]"


# ---------------------------------------------------------------- the whole


def verification(*rows: comparisons.TensorComparison, **more) -> Verification:
    return Verification("chip", True, rows=list(rows), **more)


def test_a_verification_counts_integers_floats_and_what_was_not_compared():
    found = verification(
        row("a", elements=60, differing=3, largest=2),
        row("b", "Tanh", elements=20, float_ops=("Tanh",), in_float=True),
        row("c", why="elided by the runtime", missed=20),
        row("d", why="elided by the runtime"),
        outputs=[out("y", ("Erf",), gap=0.5), out("z", gap=0.25), out("i", gap=9.0, inner=True)],
    )
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


@pytest.mark.parametrize("facts, count", [({}, 9), ({"differing": 1}, 4), ({"op_differing": 1}, 4)])
def test_differences_are_counted_among_the_integers_of_the_samples_that_ran_end_to_end(facts, count):
    assert verification(row(elements=9, end_to_end_elements=4, **facts)).out_of == count


@pytest.mark.parametrize(
    "facts, verdict, unpromised",
    [
        ({}, "exact", "exact"),
        ({"differing": 1}, "sound", "sound"),
        ({"op_differing": 1, "op_largest": 1}, "departs", "unpromised"),
        ({"wrong": "bad"}, "departs", "departs"),
    ],
)
def test_a_verdict_is_a_word(facts, verdict, unpromised):
    found = verification(row(elements=5, **facts))
    assert found.verdict == verdict and found.sound is (verdict in ("exact", "sound"))
    found.promised = False
    assert found.verdict == unpromised


@pytest.mark.parametrize("promised", [True, False])
def test_integers_within_what_a_runtime_promises_are_bounded(promised):
    kernel = {"elements": 5, "op_differing": 4, "within": 2}
    found = verification(row("a", **kernel, op_largest=2), row("b", elements=15, within=0))
    found.promised = promised
    assert (found.verdict, found.departures, found.exact_share) == ("bounded", [], 0.75)
    assert "within what is promised of chip" in found.summary()
    over = verification(row("a", **kernel, op_largest=3))
    assert over.verdict == "departs" and over.departures == [
        "Relu 'a': 4 of 5 integers differ by up to 3 given the device's inputs, and at most 2 is promised"
    ]
    assert verification(row(elements=5, within=2)).verdict == "exact"
    assert not verification(row(elements=5, within=0, op_differing=1, op_largest=1)).sound


def test_departures_are_of_the_file_of_tensors_and_of_outputs():
    found = verification(
        row("a", elements=5, op_differing=2, op_largest=1),
        row("b", elements=5, wrong="missing"),
        held=[comparisons.ConstantComparison("w", "weight", 4, 1), comparisons.ConstantComparison("v", "bias", 4)],
        outputs=[out("y", wrong="odd"), out("m", wrong="odd", inner=True), out("z")],
    )
    assert found.departures == [
        "weight 'w' in the file: 1 of its 4 quantized values are not the plan's",
        "Relu 'b': missing",
        "Relu 'a': 2 of 5 integers differ by up to 1 given the device's inputs, and 0 may differ",
        "output 'y': odd",
        "float 'm': odd",
    ]
    assert found.file_departures == found.departures[:2]


def test_where_no_tensor_is_quantized_the_weights_of_the_file_are_what_is_checked():
    weight = comparisons.ConstantComparison("w", "weight", 3)
    assert verification(held=[weight]).checked and not verification(row("a"), held=[weight]).checked
    assert not verification(held=[comparisons.ConstantComparison("w", "weight")]).checked
    nothing = verification()
    assert not nothing.checked and nothing.departures == [] and not nothing.sound and nothing.verdict == "departs"
    with pytest.raises(VerificationError, match="nothing was compared"):
        nothing.require()


def test_coverage_counts_constants_and_float_inputs_of_dynamic_kernels():
    found = verification(row("a", elements=4))
    assert found.coverage() == "compared 1 of 1 tensors; 100.00 % of all integers compared without tolerance"
    found.held = [
        comparisons.ConstantComparison("w", "weight"),
        comparisons.ConstantComparison("b", "bias", why="absent"),
        comparisons.ConstantComparison("x", "activation"),
        comparisons.ConstantComparison("v", "weight", 4, 1),
    ]
    found.outputs = [out("m", inner=True), out("k", wrong="odd", inner=True), out("y")]
    assert found.coverage() == (
        "compared 1 of 1 tensors; 1 of 3 weights and biases read back from the file; "
        "1 of 2 float inputs of dynamic kernels; 100.00 % of all integers compared without tolerance"
    )


def test_a_summary_names_what_is_not_modelled_and_accuracies():
    found = verification(samples=3, labelled=2, accuracy={"float": 0.5, "device": 1.0}, warnings=["hot"])
    found.not_modelled = [f"math.{k}: said" for k in "abcde"]
    assert found.summary().splitlines() == [
        "chip: no value is quantized over 3 samples",
        "compared 0 of 0 tensors",
        "stated by the platform, not modelled: math.a, math.b, math.c, math.d, ...",
        "top-1 of 2 samples: float 50.00 %, device 100.00 %",
        "hot",
    ]
    found.not_modelled = found.not_modelled[:4]
    assert "math.d\n" in found.summary()


@pytest.mark.parametrize("in_float, how", [(True, ", computed in float by the runtime"), (False, "")])
def test_a_summary_names_the_first_difference_and_how_it_came_about(in_float, how):
    text = verification(
        row("a"), row("b", elements=8, end_to_end_elements=4, differing=1, largest=2, in_float=in_float)
    ).summary()
    assert f"first difference: Relu 'b', 25.0000 % of its integers, at most 2{how}\n" in text
    assert ("computed in float by the runtime: Relu 'b'" in text) is in_float


def test_a_screen_shows_faults_first_and_then_what_differs_most():
    screen = verification(
        row("a", elements=9, differing=1, largest=1),
        row("b", why="elided"),
        row("c", elements=9, differing=4, largest=2, wrong="bad"),
        row("d", elements=9, differing=3, largest=5, op_differing=0),
        row("e", elements=9),
    )._summary()
    assert [r[0] for r in screen.rows] == ["c", "d", "a", "e", "b"]
    assert screen.rows[0] == ("c", "Relu", 9, 4, 2, 0, "bad") and screen.rows[4][-1] == "elided"
    assert screen.title == "Verification on chip: departs" and screen.facts["coverage"].startswith("compared 4 of 5")


def test_a_record_in_json_has_what_is_derived_too():
    found = verification(row("a", elements=9, signal=1.0, noise=100.0), row("b", wrong="bad")).to_dict()
    assert [r["sqnr_db"] for r in found["rows"]] == [pytest.approx(-20), None]
    assert [r["fault"] for r in found["rows"]] == ["", "bad"]
    assert (found["verdict"], found["exact"], found["integers"], found["among"]) == ("departs", False, 9, 9)
    outputs = verification(outputs=[out("y", wrong="odd"), out("z")]).to_dict()["outputs"]
    assert [o["fault"] for o in outputs] == ["odd", ""]


#: runtime -> platforms, and suffixes of files, for which it is the default
RUNTIMES = {
    "onnxruntime": ["ort_cpu", "ort_cpu .onnx", "tflite_int8 .onnx", "imx500"],
    "litert": ["tflite_int8", "ort_cpu .tflite"],
}


@pytest.mark.parametrize("runtime, given", [(runtime, given) for runtime, of in RUNTIMES.items() for given in of])
def test_the_default_runtime_of_a_platform_loads_the_file(runtime, given):
    platform, _, suffix = given.partition(" ")
    assert default_runtime(load(platform), suffix) == runtime


# ---------------------------------------------------------------- what a file holds


def test_a_file_holds_a_tensor_itself_in_floats_and_in_copies():
    names = ["w", "w_1", "w_2", "w/float", "x_t1/float_t2_3", "x/float_4", "v_t0", "x_t1", "other"]
    in_file = {n: FileTensor(None, [(np.array(k), np.array(0))]) for k, n in enumerate(names)}
    grouped = comparisons.by_tensor({"w", "w_1", "x", "v_t0"}, in_file)
    found = {k: [int(f.qparams[0][0]) for f in fs] for k, fs in grouped.items()}
    assert found == {"w": [0, 2, 3], "w_1": [1], "x": [7, 5, 4], "v_t0": [6], "other": [8]}


WEIGHT = torch.tensor([[0.5, 1.0, -2.0], [0.25, 0.5, 0.75]])
PER_ROW = stored([0.5, 0.25], 0, axis=0)
CODES = np.array([[1, 2, -4], [1, 2, 3]])


def in_file(*tensors: FileTensor, on=PER_ROW, weight=WEIGHT, **plan) -> comparisons.ConstantComparison:
    return comparisons.compare_constant(Graph([], [], [], {}, {"w": weight}), plan_of(w=on, **plan), "w", tensors, {})


def qparams(scale, zero=(0, 0)) -> list:
    return [(np.array(scale, np.float32), np.array(zero))]


@pytest.mark.parametrize(
    "codes, numbers, elements, differing, wrong",
    [
        (CODES, qparams([0.5, 0.25]), 6, 0, ""),
        (CODES.T, qparams([0.5, 0.25]), 6, 0, ""),
        (CODES.reshape(2, 1, 3), qparams([0.5, 0.25]), 6, 0, ""),
        (CODES + [[0, 0, 1], [1, 0, 0]], qparams([0.5, 0.25]), 6, 2, ""),
        (CODES.reshape(-1), qparams([0.5, 0.25]), 6, 0, "its shape is [6]"),
        (CODES * np.float32([[0.5], [0.25]]), qparams([0.5, 0.25]), 6, 0, ""),
        (CODES, qparams([0.5, 0.125]), 6, 0, "scale 0.125 instead of 0.25"),
        (CODES, qparams([0.5, 0.25], (0, 3)), 6, 0, "zero point 3 instead of 0"),
        (None, qparams([0.5, 0.25]), 0, 0, "it is missing from the file"),
    ],
)
def test_a_weight_in_a_file_is_the_plans_or_says_why_not(codes, numbers, elements, differing, wrong):
    found = in_file(FileTensor(codes, numbers))
    assert (found.elements, found.differing, found.role) == (elements, differing, "weight")
    assert (found.wrong, found.why) == (wrong, "")


def test_what_a_file_does_not_name_is_not_compared():
    assert in_file().why == "not in the file under its name"
    assert comparisons.compare_constant(Graph([], [], [], {}, {}), plan_of(x=stored()), "x", (), {}).wrong == ""
    twice = in_file(FileTensor(CODES, []), FileTensor(CODES + [[1, 0, 0], [0, 0, 0]], []))
    assert (twice.elements, twice.differing) == (12, 1)


def test_scales_of_blocks_may_lie_in_either_order_of_axes():
    blocks = stored([[0.5, 0.25, 1.0], [0.125, 2.0, 4.0]], axis=1)
    q, scale = blocks.quantize(WEIGHT).numpy(), blocks.scale.numpy()
    off = scale + np.float32([[0, 0, 0], [0, 1, 0]])
    wrong = [(scale, ""), (scale.T, ""), (off, "scale 3 instead of 2"), (scale.reshape(-1), "scale of the shape [6]")]
    for numbers, fault in wrong:
        assert in_file(FileTensor(q, [(numbers, np.zeros_like(numbers))]), on=blocks).wrong == fault


def test_a_weight_that_is_read_in_float_too_may_stand_there_as_it_is():
    odd = WEIGHT + 0.01
    for edges, differing in (((), 6), ({("w", "reader")}, 0), ({("v", "reader")}, 6)):
        assert in_file(FileTensor(odd.numpy(), []), weight=odd, float_edges=edges).differing == differing


def test_the_order_of_axes_is_taken_in_which_the_fewest_differ():
    a = np.array([[1, 2], [3, 4]])
    assert comparisons.fewest_differing(a, a.T) == 0 and comparisons.fewest_differing(a, a) == 0
    assert comparisons.fewest_differing(a, np.array([[1, 3], [2, 5]])) == 1
    assert comparisons.fewest_differing(a, np.zeros((2, 3))) is None
    assert comparisons.fewest_differing(np.zeros((1, 3)), np.array([0, 0, 7])) == 1


# ---------------------------------------------------------------- side by side


def network() -> tuple[Graph, Plan]:
    """y = relu(x) quantized in steps of a half, and z = flatten(y), which holds the same integers."""
    flatten = node("z = Reshape(y)", {"shape": (-1, 3)}, name="f")
    graph = graph_of(node("y = Relu(x)", name="r"), flatten, shape=(None, 3), in_spec="{}")
    plans = {"r": NodePlan(name="r", op="Relu", exec="int"), "f": NodePlan(name="f", op="Reshape", exec="follow")}
    plan = plan_of(x=stored(), y=stored(0.5, -128), z=stored(0.5, -128))
    return graph, replace(plan, nodes=plans)


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
    """The right results of the network: the output in floats, then integers by name."""
    codes = {k: np.array(v, np.int8) for k, v in CODES_OF.items()}
    floats = (np.array(CODES_OF["z"]) + 128) * np.float32(0.5)
    return {k: v for k, v in {"output": floats.astype(np.float32), **codes, **changes}.items() if v is not None}


def one_code_off():
    """Results of a device whose Relu makes its first integer too large by 1."""
    wrong = np.array(CODES_OF["y"], np.int8) + np.int8([[1, 0, 0], [0, 0, 0]])
    return result(y=wrong, z=wrong, output=(wrong.astype(np.float32) + 128) / 2)


def comparator(device, graph, plan, platform="ort_cpu", suffix=".onnx", model=None, **more) -> Comparator:
    declared = DeviceRuntime(suffix=suffix, kernels="litert_reference" if suffix == ".tflite" else None)
    return Comparator(graph, plan, load(platform), device, declared, model, Verification("chip", True), **more)


def compared(
    results, label=None, filed=(), model=None, x=X, groups=(), limit=None, times=1, in_float=()
) -> Verification:
    graph, plan = network()
    nodes = {k: replace(n, exec="float") if k in in_float else n for k, n in plan.nodes.items()}
    plan = replace(plan, nodes=nodes)
    found = comparator(
        Device(**results), graph, replace(plan, groups=groups), "tflite_int8", ".tflite", model,
        in_file=set(filed), end_to_end_samples=limit,
    )  # fmt: skip
    found.out.rows = [row("x", "Input"), row("y", "Relu"), row("z", "Reshape")]
    found.out.outputs = [comparisons.OutputComparison("output", "z", span=127.5)]
    with torch.inference_mode():
        for _ in range(times):
            found.add([x], label)
    return found.out


@pytest.mark.parametrize(
    "limit, label, own", [(0, None, 0), (1, None, 2), (3, None, 4), (None, None, 8), (0, ints(2, 0), 8)]
)
def test_behind_the_first_samples_without_labels_each_operator_is_compared_by_itself(limit, label, own):
    """Four batches of two samples, of three integers each."""
    found = compared(result(), label, limit=limit, times=4)
    assert (found.samples, found.end_to_end_samples) == (8, own) and found.exact
    assert [(r.elements, r.end_to_end_elements) for r in found.rows] == [(24, 3 * own)] * 3
    assert (found.outputs[0].elements, found.labelled) == (24, 0 if label is None else 8)
    assert found.accuracy.keys() == (set() if label is None else {"float", "integer", "device"})
    off = compared(one_code_off(), label, limit=limit, times=4)
    assert [(r.differing, r.op_differing) for r in off.rows] == [(0, 0), (own // 2, 4), (own // 2, 0)]
    assert off.outputs[0].gap == (0.5 if own else 0.0) and off.outputs[0].op_gap == 0
    assert not off.exact and "by itself" in off.summary()


MISSING = "missing from its results", "it is missing from the device's results"


@pytest.mark.parametrize(
    "name, filed, why, wrong",
    [("y", (), *MISSING), ("z", (), "elided by the runtime", ""), ("z", ("z",), *MISSING), ("x", (), *MISSING)],
)
def test_a_runtime_may_leave_out_only_what_computes_nothing(name, filed, why, wrong):
    found = compared(result(**{name: None}), filed=filed)
    (left_out,) = (r for r in found.rows if r.tensor == name)
    assert (left_out.why, left_out.wrong, left_out.missed, left_out.elements) == (why, wrong, 6, 0)


def test_a_runtime_may_leave_out_what_only_moves_values_though_it_is_planned_in_float():
    found = compared(result(z=None), in_float=["f"])
    assert [r.why for r in found.rows] == ["", "", "elided by the runtime"]


def test_what_lies_inside_a_fused_kernel_is_not_compared():
    found = compared(result(y=None), groups=(("r", "f"),))
    inside = ("inside a fused kernel", "", 0, 0)
    assert [(r.why, r.wrong, r.missed, r.elements) for r in found.rows] == [("", "", 0, 6), inside, ("", "", 0, 6)]
    assert found.exact


@pytest.mark.parametrize("runtime, platform", [("onnxruntime", "ort_cpu"), ("litert", "tflite_int8")])
def test_a_batch_is_cut_where_the_samples_end_that_run_on_their_own_results(runtime, platform):
    pytest.importorskip("ai_edge_litert" if runtime == "litert" else runtime)
    data = [randn(40, 4, seed=k) for k in range(2)]
    fit = quantized(nn.Linear(4, 3), data, platform)
    whole = runtime == "litert"  # its file has a fixed batch size
    cuts = [(END_TO_END_SAMPLES, 40 if whole else 16), (50, 80 if whole else 50), (0, 0), (80, 80), (None, 80)]
    for limit, own in cuts:
        found = fit.verify(data, end_to_end_samples=limit)
        assert (found.samples, found.end_to_end_samples) == (80, own) and found.sound
        assert {(r.elements, r.end_to_end_elements) for r in found.rows} == {
            (80 * n, own * n) for n in ((4, 3) if whole else (4,))
        }
    labelled = fit.verify([(x, torch.zeros(40, dtype=torch.long)) for x in data])
    assert (labelled.samples, labelled.end_to_end_samples, labelled.labelled) == (80, 80, 80)


def test_a_batch_whose_inputs_differ_in_size_or_are_fixed_is_not_cut():
    found, x = comparator(Device(), *network(), end_to_end_samples=4), randn(6, 3)
    assert [len(part[0]) for part, _ in found.parts([x], None)] == [4, 2]
    assert [len(part[0]) for part, _ in found.parts([x[:4]], None)] == [4]
    assert len(found.parts([x, x[:1]], None)) == 1 and len(found.parts([x[0, 0]], None)) == 1
    found.graph.values["x"] = replace(found.graph.values["x"], shape=(6, 3))
    assert len(found.parts([x], None)) == 1


@pytest.mark.parametrize("batches, samples", [(None, 9), (1, 2), (2, 5), (4, 9)])
def test_it_stops_after_as_many_batches_as_are_requested(batches, samples):
    data = [torch.randn(n, 4) for n in (2, 3, 4)]
    fit = quantized(nn.Linear(4, 3), data)
    assert fit.verify(data, batches=batches).samples == samples
    with pytest.raises(DataError, match="There are no data to verify on"):
        fit.verify(data, batches=0)


@pytest.mark.parametrize(("gain", "x", "samples"), [((), (3, 2), 3), ((3, 2), (), 3), ((), (), 1)])
def test_a_number_without_axes_has_no_samples(gain, x, samples):

    inputs = [torch.randn(gain), torch.randn(x)]
    graph = capture(model_of(lambda m, gain, x: gain * x), inputs)
    found = comparator(Device(output=(inputs[0] * inputs[1]).numpy()), graph, Plan())
    found.add(inputs, None)
    assert found.out.samples == samples


def test_an_error_of_a_runtime_is_an_unavailable_runtime_and_our_own_errors_are_ours():
    graph, _ = network()
    with pytest.raises(RuntimeUnavailable, match="cannot run the file on these inputs"):
        compared({"output": lambda inputs: np.zeros(2).reshape(3)})
    with pytest.raises(UnknownNameError):
        compared({"output": lambda inputs: graph.node("none")})


def test_integers_of_another_type_are_not_compared():
    found = compared(result(y=np.array(CODES_OF["y"], np.int16)))
    assert found.rows[1].why == "of another shape or type" and "int16" in found.rows[1].wrong
    assert found.rows[2].elements == 6


def test_a_device_that_returns_none_of_the_tensors_is_another():
    with pytest.raises(RuntimeUnavailable, match="returned none of the 3 tensors.*Got: output"):
        compared(result(x=None, y=None, z=None))


def test_right_answers_are_counted_for_each_side():
    """Labels 2 and 0: the float network says 2 and 1, and so does the device but for its second sample."""
    output = result()["output"].copy()
    output[1] = [9, 0, 0]

    class Model(torch.nn.Module):
        def run_flat(self, inputs):
            return [torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), torch.eye(3)[[2, 0]]]

    found = compared(result(output=output), torch.tensor([2, 0]), model=Model)
    assert found.accuracy == {"float": 0.5, "integer": 0.5, "device": 1.0, "simulated": 0.5} and found.labelled == 2
    assert compared(result(), torch.tensor([2])).accuracy == {}  # labels of another batch
    assert compared(result(), torch.tensor([[2], [1]])).accuracy["float"] == 1.0
    wide = compared(result(output=np.zeros((2, 4), np.float32)), torch.tensor([2, 1]))
    assert wide.accuracy.keys() == {"float", "integer"}


def test_a_batch_without_samples_is_empty_and_not_compared():
    none = {"output": np.zeros((0, 3), np.float32)} | {k: np.zeros((0, 3), np.int8) for k in "xyz"}
    found = compared(none, torch.zeros(0, dtype=torch.long), x=X[:0])
    assert [r.why for r in found.rows] == ["empty"] * 3 and found.samples == 0 and found.accuracy == {}


def test_unsigned_integers_of_16_bits_are_compared():
    """ONNX files hold them; torch, which compares, does not compute with that type."""
    pytest.importorskip("onnxruntime")
    platform = load("ort_cpu")
    wide = {k: f.model_copy(update={"bits": 16}) if k in ("u8", "s8") else f for k, f in platform.formats.items()}
    torch.manual_seed(0)
    model = sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    found = quantized(model, torch.randn(8, 3, 6, 6), platform.model_copy(update={"formats": wide}))
    grids = [t.grid for t in found.plan.tensors.values() if t.quantized and t.role == "activation"]
    assert {(g.bits, g.signed) for g in grids} == {(16, False)}
    proof = found.verify([torch.randn(4, 3, 6, 6)], runtime="onnxruntime")
    assert proof.integers == 4 * (3 * 36 + 4 * 16 + 4 + 4) and not proof.departures


@pytest.mark.parametrize("in_float", ["0", "2"])
def test_a_constant_of_parts_in_integers_and_of_parts_in_float_is_found_in_the_file(in_float):
    pytest.importorskip("ai_edge_litert")
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)).eval()
    *data, other = (torch.randn(8, 6, 16) for _ in range(3))
    result = chipfit.quantize(model, data, "tflite_int8", overrides={in_float: "float"}, progress=False)
    check = result.verify([other])
    assert check.exact and check.departures == []
