"""Words of padding and their numbers, by hand and against the sizes that Keras gives."""

import itertools
import math

import numpy as np
import pytest

from chipfit.frameworks.keras.padding import numbers, same_padding, trim, word

keras = pytest.importorskip("keras")


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "dilation", "pairs"),
    [
        ((8,), (3,), (1,), (1,), ((1, 1),)),
        ((8,), (4,), (1,), (1,), ((1, 2),)),  # the odd one behind
        ((8,), (3,), (1,), (2,), ((2, 2),)),
        ((8, 7), (3, 3), (2, 2), (1, 1), ((0, 1), (1, 1))),
        ((9,), (2,), (3,), (1,), ((0, 0),)),  # windows with gaps need none
        ((7,), (2,), (3,), (1,), ((0, 1),)),
        ((10,), (5,), (3,), (1,), ((2, 2),)),
        ((None,), (3,), (1,), (3,), ((3, 3),)),
        ((None, 7), (2, 3), (1, 2), (1, 1), ((0, 1), (1, 1))),
        ((1,), (1,), (1,), (1,), ((0, 0),)),
    ],
)
def test_zeros_of_same_padding_by_hand(size, kernel, stride, dilation, pairs):
    assert same_padding(size, kernel, stride, dilation) == numbers("same", size, kernel, stride, dilation) == pairs
    assert word(pairs, size, kernel, stride, dilation) == ("same" if any(map(any, pairs)) else "valid")


@pytest.mark.parametrize("k, s", [(1, 2), (2, 2), (4, 2), (6, 2), (1, 3), (2, 3)])
def test_zeros_along_a_strided_axis_of_unknown_size_do_for_every_size(k, s):
    ((lo, hi),) = same_padding((None,), (k,), (s,), (1,))
    for n in range(1, 3 * s + 2):
        assert lo == same_padding((n,), (k,), (s,), (1,))[0][0]
        assert (n + lo + hi - k) // s + 1 == math.ceil(n / s)


def test_zeros_in_front_that_depend_on_an_unknown_size_are_not_known():
    assert same_padding((None,), (3,), (2,), (1,)) is None
    assert same_padding((7, None), (3, 3), (1, 2), (1, 1)) is None
    assert word(((1, 1),), (None,), (3,), (2,), (1,)) == ""


@pytest.mark.parametrize("n, k, s, d", [*itertools.product((5, 6, 11), (1, 2, 4), (1, 2, 3), (1, 2))])
def test_same_padding_gives_as_many_windows_as_steps_fit(n, k, s, d):
    ((lo, hi),) = same_padding((n,), (k,), (s,), (d,))
    span = d * (k - 1) + 1
    assert hi - lo in (0, 1) and lo >= 0
    assert lo + hi == max((math.ceil(n / s) - 1) * s + span - n, 0)


def test_words_and_numbers_belong_together():
    both = (9, 8), (3, 2), (1, 1), (2, 3)
    assert numbers("valid", *both) == ((0, 0), (0, 0)) and numbers("causal", *both) == ((4, 0), (3, 0))
    assert numbers("reflect", *both) is None
    assert word([[0, 0], [0, 0]], *both) == "valid" and word([(2, 2), (1, 2)], *both) == "same"
    assert word([(2, 2), (2, 1)], *both) == "" and word([(4, 0), (3, 0)], *both) == ""


@pytest.mark.parametrize(
    ("span", "stride", "mode", "extra", "cut"),
    [
        (3, 2, "valid", None, (0, 0)),
        (2, 3, "valid", None, (0, -1)),
        (3, 2, "valid", 1, (0, -1)),
        (3, 2, "same", None, (0, 1)),
        (3, 1, "same", None, (1, 1)),
        (4, 1, "same", None, (1, 2)),
        (5, 2, "same", None, (1, 2)),
        (4, 2, "same", None, (1, 1)),
        (2, 3, "same", None, (0, -1)),
        (3, 2, "same", 0, (1, 1)),
        (3, 2, "same", 1, (0, 1)),
        (4, 2, "same", 0, (2, 2)),
        (4, 2, "same", 1, (1, 2)),
        (5, 3, "same", 2, (1, 1)),
    ],
)
def test_what_is_cut_from_a_transposed_convolution_by_hand(span, stride, mode, extra, cut):
    assert trim(span, stride, mode, extra) == cut


@pytest.mark.parametrize("kernel, stride", [*itertools.product((1, 2, 3, 4, 5), (1, 2, 3))])
def test_transposed_convolutions_are_as_long_as_keras_says(kernel, stride):
    for mode, extra in itertools.product(("valid", "same"), (None, *range(stride))):
        layer = keras.layers.Conv1DTranspose(2, kernel, stride, padding=mode, output_padding=extra)
        length = layer.compute_output_shape((1, 6, 3))[1]
        assert 5 * stride + kernel - sum(trim(kernel, stride, mode, extra)) == length, (mode, extra)


def test_where_one_number_goes_is_where_keras_puts_it():
    """One 1 at place 2 of 6, kernel 1, 2, 3 ...: the full result begins at 2 strides."""
    for kernel, stride, mode in itertools.product((2, 3, 4, 5), (1, 2, 3), ("valid", "same")):
        layer = keras.layers.Conv1DTranspose(1, kernel, stride, padding=mode, use_bias=False)
        layer.build((1, 6, 1))
        layer.set_weights([np.arange(1.0, kernel + 1).reshape(kernel, 1, 1)])
        x = np.zeros((1, 6, 1), "float32")
        x[0, 2] = 1
        got = keras.ops.convert_to_numpy(layer(x)).ravel()
        before, behind = trim(kernel, stride, mode, None)
        full = np.zeros(5 * stride + kernel + max(-behind, 0))
        full[2 * stride : 2 * stride + kernel] = np.arange(1.0, kernel + 1)
        np.testing.assert_allclose(got, full[before : len(full) - max(behind, 0)], atol=1e-6)
