"""LiteRT's kernels, one operator with numbers chosen by hand: ties, both sides of bounds, shapes that tell axes."""

import pytest
import torch
import torch.nn.functional as F

from chipfit.graph.ir import Node
from chipfit.simulate.litert import fused_bounds, quantize_dynamic_by_row, quantize_dynamic_xnnpack
from tests.simulate.one_operator import LITERT, Codes, drawn, every, one, pairs, square
from tests.simulate.test_rounding import proved, quantized, restored

A, B = pairs()
#: kernels that saturate where optimised ones wrap around
SATURATING = ("litert_reference", "litert")
ONE = 0.1  #: scale of results


# ---------------------------------------------------------------- sums, products, slopes, other scales

TIES = [(0.05, 0.07), (0.07, 0.05), (0.5, 0.75), (0.03, 0.05)]  #: over 0.1 or 1: sums half way between two codes


@pytest.mark.parametrize("op", ["Add", "Sub"])
@pytest.mark.parametrize("scales", TIES)
def test_every_pair_of_codes_is_added_as_the_kernels_add(tmp_path, op, scales):
    result = 1.0 if max(scales) > 0.5 else ONE
    one(op, [Codes(A, scales[0], 3), Codes(B, scales[1], -7)], Codes(A, result, 5)).prove(tmp_path)


@pytest.mark.parametrize(
    "op, ratio, runtimes",
    [
        *((op, r * 2.0**-10, SATURATING) for op in ("Add", "Sub") for r in (1.0, 0.99, 1.01)),
        *(("Sub", r, ("litert",)) for r in (256.0, 255.9, 100.0)),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_xnnpack_adds_where_scales_lie_within_ten_bits_below_and_eight_above(tmp_path, op, ratio, runtimes, first):
    a, b = (ratio, 0.5) if first else (0.5, ratio)
    sum_ = one(op, [Codes(A, a * ONE, 3), Codes(B, b * ONE, -7)], Codes(A, ONE, 5))
    sum_.prove(tmp_path, runtimes=runtimes)


#: -70 * 0.05 - 125 * 0.07 is 122.5 steps of 0.1 below zero: vector instructions give -122, scalar code -123
SHAPES = {
    "17": ((1, 17), (1, 17), "v" * 16 + "s"),
    "15": ((1, 15), (1, 15), "s" * 15),
    "3 x 11": ((3, 11), (3, 11), "v" * 32 + "s"),
    "3 x 1 x 20": ((3, 1, 20), (1, 2, 20), ("v" * 16 + "ssss") * 6),
    "2 x 3 x 40 and a row of each": ((2, 3, 40), (2, 1, 40), ("v" * 32 + "s" * 8) * 6),
    "a row first": ((2, 1, 40), (2, 3, 40), ("v" * 32 + "s" * 8) * 6),
    "one of each row": ((3, 40), (3, 1), "s" * 120),
    "three blocks of axes": ((2, 1, 3, 1, 17), (1, 2, 1, 3, 17), "s" * 612),
    "a first axis": ((1, 3, 20), (2, 3, 20), ("v" * 48 + "s" * 12) * 2),
    "fewer axes": ((2, 1, 40), (40,), ("v" * 32 + "s" * 8) * 2),
    "fewer axes first": ((3, 40), (2, 3, 40), ("v" * 112 + "s" * 8) * 2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_an_optimised_sum_takes_16_at_once_along_what_both_operands_have(tmp_path, name):
    first, second, how = SHAPES[name]
    sum_ = one("Add", [Codes(torch.full(first, -70), 0.05), Codes(torch.full(second, -125), 0.07)], Codes(A, ONE))
    sum_.prove(tmp_path)
    got = sum_.simulated("tflite_int8", "litert_optimized").reshape(-1).tolist()
    assert "".join({-122: "v", -123: "s"}[v] for v in got) == how


IMAGE, ROW = (1, 3, 5, 7), (1, 5, 15)
#: where a sum stands -> a network of two inputs that makes it, and their shapes
PLACES = {
    "no image": (lambda x, y: x + y, IMAGE, IMAGE),
    "an image": (lambda x, y: F.max_pool2d(x, 3, 1, 1) + y, IMAGE, IMAGE),
    "an image and its channels": (lambda x, y: F.max_pool2d(x, 3, 1, 1) + y, (1, 20, 5, 7), (1, 20, 1, 1)),
    "an image and its columns": (lambda x, y: F.max_pool2d(x, 3, 1, 1) + y, (1, 3, 5, 20), (1, 1, 1, 20)),
    "a row": (lambda x, y: F.max_pool1d(x, 3, 1, 1) + y, ROW, ROW),
    "a row and its channels": (lambda x, y: F.max_pool1d(x, 3, 1, 1) + y, (1, 20, 15), (1, 20, 1)),
    "channels moved last": (lambda x, y: F.max_pool2d(x, 3, 1, 1).permute(0, 2, 3, 1) + y, IMAGE, (1, 5, 7, 3)),
    "an image turned": (lambda x, y: F.max_pool2d(x, 3, 1, 1).transpose(2, 3) + y, IMAGE, (1, 3, 7, 5)),
    "an image cut anew": (lambda x, y: F.max_pool2d(x, 3, 1, 1).reshape(-1, 5, 3, 7) + y, IMAGE, (1, 5, 3, 7)),
}


@pytest.mark.parametrize("name", PLACES)
def test_which_elements_an_optimised_sum_takes_16_at_once_follows_how_the_file_holds_them(name):
    """Codes as above, of which vector instructions and scalar code make different sums, in networks of every layout."""
    f, first, second = PLACES[name]
    result = quantized(f, (torch.randn(first), torch.randn(second)), "tflite_int8")
    (add,) = (n for n in result.graph.nodes if n.op == "Add")
    scales = dict.fromkeys(result.graph.values, 0.05) | {result.graph.inputs[1]: 0.07, add.inputs[1]: 0.07}
    scales |= {add.output: ONE}
    result = restored(result, {v: (s, 0) for v, s in scales.items() if result.plan.quantized(v)})
    data = torch.full(first, -70 * 0.05), torch.full(second, -125 * 0.07)
    proved(result, data, runtime="litert_optimized")
    sums = result.verify([data], runtime="litert_reference").rows[-1]
    assert sums.elements > 16 and sums.differing == 0


def test_an_optimised_change_of_scale_takes_16_at_once(tmp_path):
    """-131 * 0.37 is -48.47: by 0.74 it is -97, whose half is -48 in vector instructions and -49 in scalar code."""
    scaled = one("Requantize", [Codes(torch.full((1, 37), -128), ONE * 0.37, 3)], Codes(A, ONE))
    scaled.prove(tmp_path)
    assert scaled.simulated("tflite_int8", "litert_optimized").tolist() == [[-48] * 32 + [-49] * 5]


@pytest.mark.parametrize("ratio", [2.0**-16, 2.0**-16 * 0.99, 0.5, 0.0123, 255.9, 256.0])
def test_every_pair_of_codes_is_multiplied_as_the_kernels_multiply(tmp_path, ratio):
    """Where the product's scale is below 2^-16 or from 2^8 on, XNNPACK leaves it to LiteRT."""
    runtimes = LITERT if ratio < 1 else SATURATING[:1]
    one("Mul", [Codes(A, 0.25, 3), Codes(B, 0.5, -7)], Codes(A, 0.125 / ratio, 5)).prove(tmp_path, runtimes=runtimes)


#: scales of operand and square with which a square lies just beside the middle between two codes
NEAR_TIES = [(0.0044157849624753, 0.0028892531991004944), (0.021449919790029526, 0.06664863228797913), (0.25, 0.125)]


@pytest.mark.parametrize("scale, result", NEAR_TIES)
def test_xnnpack_squares_by_a_table_of_floats(tmp_path, scale, result):
    square(Codes(every(), scale), Codes(A, result, -128)).prove(tmp_path)


SLOPES = [0.3, -0.3, 2.0**-8, 2.0**-8 * 0.99, -(2.0**-8), -(2.0**-8) * 0.99, -0.25, -0.5, 0.0, 1.7]
SLOPES = [(slope / ratio, ratio, ONE, -4) for slope in SLOPES for ratio in (1.0, 0.37)]
SLOPES += [(0.9, ratio, ONE, -4) for ratio in (2.0**-8, 2.0**-8 * 0.99, 128.0, 128.5)]  # the ends of XNNPACK's range
SLOPES += [(s, 1.0, ONE / 256, -4) for s in (128.0, 128.5, -127.99609375, -128.0, -128.4995)]


@pytest.mark.parametrize("slope, ratio, scale, zero", [*SLOPES, (127.5015, 1.0, ONE / 256, 4)])
def test_every_code_of_a_slope(tmp_path, slope, ratio, scale, zero):
    slope_ = one("LeakyRelu", [Codes(every(), scale * ratio, 3)], Codes(A, scale, zero), {"negative_slope": slope})
    slope_.prove(tmp_path)


@pytest.mark.parametrize("ratio", [2.0**-8, 2.0**-8 * 0.99, 128.0, 128.4985, 128.5, 0.37, 1.5, 0.5])
def test_every_code_at_another_scale(tmp_path, ratio):
    one("Requantize", [Codes(every(), ONE * ratio, 3)], Codes(A, ONE, -4)).prove(tmp_path)
    if ratio < 1:
        wide = Codes(drawn(0, 9, 99, bits=16), ONE * ratio, 0, 16)
        one("Requantize", [wide], Codes(A, ONE, 0, 16)).prove(tmp_path, "tflite_int16x8")


UNARY = {op: {} for op in "Relu Relu6 Abs HardSwish Exp Sigmoid Tanh".split()}
UNARY |= {
    "Clamp": {"min": -1.0, "max": 1.0},
    "Clamp below": {"min": 0.0, "max": None},
    "Gelu": {"approximate": "none"},
    "Gelu by tanh": {"approximate": "tanh"},
}


@pytest.mark.parametrize("ratio", [0.5, 0.731, 1.0, 1.7, 0.01, 40.0])
@pytest.mark.parametrize("name", UNARY)
def test_every_code_of_a_function_of_one_operand(tmp_path, name, ratio):
    op = name.split()[0]
    result = {"Sigmoid": Codes(A, 1 / 256, -128), "Tanh": Codes(A, 1 / 128)}.get(op, Codes(A, ONE / 2, -4))
    one(op, [Codes(every(), ONE * ratio / 2, 3)], result, UNARY[name]).prove(tmp_path)


@pytest.mark.parametrize("platform, runtimes", [("tflite_int8", LITERT[1:]), ("tflm_cmsis_nn", ["tflm"])])
@pytest.mark.parametrize("op, attrs", [("Elu", {"alpha": 1.0}), ("HardSwish", {})])
@pytest.mark.parametrize("scale", [1e-8, 6e-8, 1e-12])
def test_every_code_of_a_curve_of_tiny_numbers(tmp_path, platform, runtimes, op, attrs, scale):
    """HardSwish divides 16-bit integers by more than 2^16, and exp(x) - 1 loses what expm1(x) keeps."""
    one(op, [Codes(every(), scale, 3)], Codes(A, scale, -4), attrs).prove(tmp_path, platform, runtimes)


@pytest.mark.parametrize("scale", [0.016811072826385498, 0.04053322598338127, 0.0161430686712265])
def test_xnnpack_adds_the_zero_point_of_a_sigmoid_in_float32(tmp_path, scale):
    """A number just below the middle between two codes is rounded to it when 128 is subtracted."""
    one("Sigmoid", [Codes(every(), scale)], Codes(A, 1 / 256, -128)).prove(tmp_path)


# ---------------------------------------------------------------- layers, means, windows

CONV = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
ROUGH = (0.5, 0.25, 0.3, 0.7, 0.5, 0.1, 0.25, 0.9, 0.35, 0.6, 0.5, 0.5)  #: scales of a weight's channels


def weight(bits: int, *shape: int, channels: int) -> Codes:
    return Codes(drawn(1, *shape, bits=bits).clamp(min=1 - (1 << bits - 1)), ROUGH[:channels], 0, bits)


LAYERS = {
    "Conv2D": ((2, 4, 5, 6), (6, 4, 2, 3), {**CONV, "stride": (2, 1), "padding": ((1, 0), (0, 2))}),
    "Conv2D in groups": ((2, 4, 5, 6), (6, 2, 2, 2), {**CONV, "groups": 2}),
    "DepthwiseConv2D": ((2, 4, 5, 6), (12, 1, 2, 3), {**CONV, "groups": 4}),
    "Conv1D": ((2, 4, 7), (3, 4, 2), {"stride": (2,), "padding": ((1, 0),), "dilation": (1,), "groups": 1}),
    "Linear": ((9, 6), (4, 6), {}),
    "Linear of odd rows": ((9, 5), (4, 5), {}),
}


@pytest.mark.parametrize("bits, wide", [(8, False), (5, False), (4, False), (8, True)])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_scales_for_each_output(tmp_path, name, bits, wide):
    op, (x, w, attrs) = name.partition(" ")[0], LAYERS[name]
    scales = [0.5 * s for s in ROUGH[: w[0]]]
    bias = Codes(drawn(2, w[0], bits=10), scales, 0, 40 if wide else 32)
    data = Codes(drawn(0, *x, bits=16 if wide else 8), 0.5, 0 if wide else 7, 16 if wide else 8)
    result = Codes(A, 6.0 if bits < 6 else 60.0, 0 if wide else -3, 16 if wide else 8)
    b = None if bits == 4 else bias
    one(op, [data, weight(bits, *w, channels=w[0]), b], result, attrs).prove(
        tmp_path, "tflite_int16x8" if wide else "tflite_int8"
    )


@pytest.mark.parametrize("ratio", [0.5, 0.37])
@pytest.mark.parametrize("op, x, w", [("Linear", (40, 6), (4, 6)), ("Conv2D", (2, 4, 5, 6), (6, 4, 2, 3))])
def test_a_layer_with_one_scale(tmp_path, op, x, w, ratio):
    operands = [Codes(drawn(0, *x), ratio, 7), Codes(drawn(1, *w).clamp(min=-127), 0.5), None]
    one(op, operands, Codes(A, 64.0, 5), CONV if op == "Conv2D" else {}).prove(tmp_path)


@pytest.mark.parametrize("stride, kernel", [((2, 3), (2, 3)), ((3, 2), (2, 2)), ((1, 1), (3, 2)), ((2, 2), (4, 2))])
@pytest.mark.parametrize("channels", [3, 12])
def test_a_transposed_convolution(tmp_path, stride, kernel, channels):
    attrs = {**CONV, "stride": stride, "output_padding": (0, 0)}
    w = Codes(drawn(1, 4, channels, *kernel).clamp(min=-127), ROUGH[:channels])
    x = Codes(drawn(0, 2, 4, 3, 5), 0.5, 7)
    one("TransposeConv2D", [x, w, None], Codes(A, 60.0, -3), attrs).prove(tmp_path)


@pytest.mark.parametrize("zero", [0, 5])
@pytest.mark.parametrize("wide", [False, True])
def test_a_product_of_two_values(tmp_path, zero, wide):
    bits, zeros = (16, (0, 0, 0)) if wide else (8, (3, zero, -2))
    a = Codes(drawn(0, 2, 3, 4, 5, bits=bits), 0.5, zeros[0], bits)
    b = Codes(drawn(1, 2, 3, 5, 6, bits=bits), 0.25, zeros[1], bits)
    result = Codes(A, 2048.0 * 9 if wide else 30.0, zeros[2], bits)
    one("MatMul", [a, b], result).prove(tmp_path, "tflite_int16x8" if wide else "tflite_int8")


@pytest.mark.parametrize("ratio", [0.5, 0.37])
def test_a_slope_for_each_channel(tmp_path, ratio):
    x, slopes = Codes(drawn(0, 3, 5, 4, 7), ratio, 7), Codes(torch.tensor([-127, -5, 0, 9, 127]), 1 / 64)
    one("PRelu", [x, slopes], Codes(A, 0.5, -9)).prove(tmp_path)


@pytest.mark.parametrize(
    "op, shape, attrs",
    [
        ("Mean", (3, 17, 5, 6), {"axes": (2, 3), "keepdims": True}),
        ("Mean", (3, 17, 5, 6), {"axes": (-1, -2), "keepdims": False}),
        ("Mean", (3, 4, 5, 7), {"axes": (1,), "keepdims": True}),
        ("Mean", (3, 4, 7), {"axes": (2,), "keepdims": True}),
        ("Mean", (3, 4, 7), {"axes": (1,), "keepdims": False}),
        ("GlobalAvgPool", (3, 17, 5, 6), {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("ratio, zero", [(0.5, -128), (0.37, 20), (1.0, 3)])
def test_a_mean(tmp_path, op, shape, attrs, ratio, zero):
    # the optimised kernel sums rows and columns that lie channels last, which images do only beside spatial operators
    runtimes = SATURATING if attrs.get("axes") == (2, 3) else LITERT
    one(op, [Codes(drawn(0, *shape), ratio, zero)], Codes(A, 0.5, -9), attrs).prove(tmp_path, runtimes=runtimes)
    wide = Codes(drawn(0, *shape, bits=16), ratio, 0, 16)
    one(op, [wide], Codes(A, 0.5, 0, 16), attrs).prove(tmp_path, "tflite_int16x8")


@pytest.mark.parametrize("axis", [1, 2, -1])
@pytest.mark.parametrize("scale", [0.02, 0.3])
def test_softmax_and_its_logarithm_along_any_axis(tmp_path, axis, scale):
    x = Codes(drawn(0, 4, 5, 7), scale, 5)
    x.q.view(-1)[:2] = torch.tensor([-128, 127])  # as far from each other as two codes are
    one("Softmax", [x], Codes(A, 1 / 256, -128), {"axis": axis}).prove(tmp_path)
    one("LogSoftmax", [x], Codes(A, 1 / 16, 127), {"axis": axis}).prove(tmp_path)
    wide = Codes(drawn(0, 4, 5, 7, bits=16), scale / 256, 0, 16)
    one("Softmax", [wide], Codes(A, 1 / 32768, 0, 16), {"axis": axis}).prove(tmp_path, "tflite_int16x8")


POOLS = [((2, 3), (2, 1), ((0, 0), (0, 0)), True), ((3, 3), (1, 1), ((1, 1), (1, 1)), False),
         ((3, 3), (2, 1), ((1, 1), (1, 1)), True)]  # fmt: skip


@pytest.mark.parametrize("kernel, stride, padding, counted", POOLS)
def test_an_average_rounds_halves_away_from_zero_of_its_codes(tmp_path, kernel, stride, padding, counted):
    attrs = {"kernel": kernel, "stride": stride, "padding": padding, "ceil_mode": False, "count_include_pad": counted}
    x = Codes(drawn(0, 2, 3, 6, 5), 0.5, 7)
    one("AvgPool", [x], x, attrs, "follow").prove(tmp_path)


SIZES = [((5, 6), (8, 9)), ((5, 6), (3, 11)), ((3, 3), (7, 1)), ((4, 5), (1, 2)), ((2, 7), (2, 13)), ((2, 5), (4, 13))]


@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize("before, after", SIZES)
def test_interpolation_between_codes(tmp_path, before, after, corners):
    attrs = {"mode": "linear", "size": after, "scale": None, "align_corners": corners}
    x = Codes(drawn(0, 2, 3, *before), 0.5, 7)
    one("Resize", [x], x, attrs, "follow").prove(tmp_path)
    row = Codes(drawn(0, 2, 3, before[1]), 0.5, 7)
    one("Resize", [row], row, {**attrs, "size": after[1:]}, "follow").prove(tmp_path)


# ---------------------------------------------------------------- positions, codes of the moment, clips


def test_rows_are_rounded_to_a_range_of_the_moment():
    x = torch.tensor([[1.0, -2.0, 0.5, 2.54], [0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 5.1], [-1.0, -2.55, -0.3, -2.0]])
    q, s, z = quantize_dynamic_by_row(x)
    assert q.tolist() == [[50, -100, 25, 127], [0] * 4, [25, 50, 75, 127], [-50, -127, -15, -100]]
    assert torch.allclose(s[:, 0], torch.tensor([2.54, 127.0, 5.1, 2.55]) / 127) and not z.any()
    q, s, z = quantize_dynamic_xnnpack(x)
    assert torch.allclose(s[:, 0], torch.tensor([4.54 / 255, 1.0, 5.1 / 255, 2.55 / 255]))
    assert z[:, 0].tolist() == [-16.0, -128.0, -128.0, 127.0] or z[1, 0] in (-128.0, 127.0)
    assert q[2].tolist() == [-78, -28, 22, 127] and q[3].tolist() == [27, -128, 97, -73]
    assert ((q - z) * s - x).abs().max() <= s.max() / 2 + 1e-6
    q, _, z = quantize_dynamic_xnnpack(torch.tensor([[-1.5, 253.5]]))  # both are rounded up
    assert q.tolist() == [[-128, 127]] and z.tolist() == [[-126]]
    x = torch.tensor([[0.0, 15.9375, 0.5 / 16, 0.500001 / 16]])  # a sum with the zero point would lose the last digits
    q, s, z = quantize_dynamic_xnnpack(x, readers={"DepthwiseConv2D"})
    assert q.tolist() == [[-128, 127, -127, -127]] and s.tolist() == [[1 / 16]] and z.tolist() == [[-128]]


@pytest.mark.parametrize(
    "op, attrs, zero, ends",
    [("Relu", {}, -5, (-5, 127)), ("Relu6", {}, -128, (-128, -113)), ("Clamp", {"min": -1.0, "max": 1.0}, 3, (0, 6)),
     ("Clamp", {"min": None, "max": 1.0}, 3, (-128, 6)), ("Clamp", {"min": None, "max": None}, 3, None),
     ("Clamp", {"min": -999.0, "max": 999.0}, 3, (-128, 127)), ("Clamp", {"min": 999.0, "max": 999.0}, 3, (127, 127)),
     ("Clamp", {"min": -999.0, "max": -999.0}, 3, (-128, -128)), ("Tanh", {}, 0, None)],
)  # fmt: skip
def test_a_fused_activation_clips_between_codes(op, attrs, zero, ends):
    """Steps of 0.4: 6 is 15 of them, 1 is 2.5, which rounds away from zero."""
    stored = Codes(A, 0.4, zero).stored()
    assert fused_bounds(Node("n", op, ("x",), ("y",), attrs), stored) == ends


# ---------------------------------------------------------------- 16-bit codes


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**-11, 2.0**-10, 2.0**-13, 3e-4, 7.7e-5, 2.6e-3, 1 / 12288])
@pytest.mark.parametrize("op", ["Sigmoid", "Tanh"])
def test_every_16_bit_code_of_a_curve_in_each_scale_that_kernels_tell_apart(tmp_path, op, scale):
    """A power of two that a shift makes 2^-12 is taken in fixed point, others by a table."""
    x = torch.arange(-32768, 32768).reshape(1, -1)
    one(op, [Codes(x, scale, 0, 16)], Codes(x, 2.0**-15, 0, 16)).prove(tmp_path, "tflite_int16x8")


@pytest.mark.parametrize("op, attrs", [("Add", {}), ("Sub", {}), ("Mul", {}), ("LeakyRelu", {"negative_slope": -0.3})])
@pytest.mark.parametrize("second", [(3, 40), (3, 1)])
def test_16_bit_operands_of_equal_and_of_other_shapes(tmp_path, op, attrs, second):
    operands = [Codes(drawn(0, 3, 40, bits=16), 0.05, 0, 16), Codes(drawn(1, *second, bits=16), 0.07, 0, 16)]
    result = Codes(A, {"Mul": 40.0}.get(op, ONE), 0, 16)
    one(op, operands[: 1 if op == "LeakyRelu" else 2], result, attrs).prove(tmp_path, "tflite_int16x8")


def test_a_row_of_zeros_has_the_code_of_its_zero_point():
    """Scale 1, and both ends miss by as little: the upper one is taken."""
    q, s, z = quantize_dynamic_xnnpack(torch.zeros(2, 3))
    assert torch.equal(q, z.expand(2, 3)) and s.unique().tolist() == [1.0] and z.unique().tolist() == [127.0]
