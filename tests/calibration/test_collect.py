"""What calibration keeps of a tensor, against numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from chipfit.calibration.collect import Need, TensorStats, collect, padding_mask, with_channel_stats
from chipfit.calibration.histogram import BINS, without_outliers
from chipfit.errors import DataError
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.ir import Graph, Value
from chipfit.quantizers.grids import Grid
from chipfit.ranges import choose
from tests.build import graph_of, mlp, model_of, node, randn

BATCHES = [
    torch.tensor([-1.0, 0.0, 2.0, 3.0]),
    torch.tensor([-4.0, 1.0, 1.0, 0.5]),
    torch.tensor([0.0, 7.0, 2.0, -2.0]),
]


def seen(batches=BATCHES, need=None):
    stats = TensorStats("x")
    for b in batches:
        stats.update(b, need or Need())
    return stats


@pytest.mark.parametrize("batches", [BATCHES, BATCHES[::-1]], ids=["greatest last", "greatest first"])
def test_the_range_is_that_of_all_batches(batches):
    s = seen(batches)
    assert (s.low, s.high, s.count, s.batches) == (-4.0, 7.0, 12, 3)


def test_moving_averages_take_a_tenth_of_each_new_batch():
    """-1; 0.9 (-1) + 0.1 (-4) = -1.3; 0.9 (-1.3) + 0.1 (-2) = -1.37. 3; 2.8; 0.9 2.8 + 0.1 7 = 3.22."""
    s = seen()
    assert s.smooth_low == pytest.approx(-1.37) and s.smooth_high == pytest.approx(3.22)


def test_the_histogram_counts_what_numpy_counts():
    """The reach is the next power of two above 7, so 8."""
    h = seen().histogram
    want, edges = np.histogram(torch.cat(BATCHES).numpy(), BINS, (-8, 8))
    assert h.reach == 8 and h.zeros == 2
    np.testing.assert_array_equal(h.counts.numpy(), want)
    np.testing.assert_allclose(h.edges.numpy(), edges, atol=1e-12)
    np.testing.assert_allclose(h.centers.numpy(), (edges[1:] + edges[:-1]) / 2, atol=1e-12)


def test_a_shift_moves_every_bin_and_both_ends():
    s = seen(need=Need(channel_axis=0))
    moved = s.shifted(2.0)
    assert (moved.low, moved.high) == (-2.0, 9.0)
    assert moved.smooth_low == pytest.approx(0.63) and moved.smooth_high == pytest.approx(5.22)
    want, _ = np.histogram(torch.cat(BATCHES).numpy() + 2.0, BINS, (-16, 16))
    np.testing.assert_array_equal(moved.histogram.counts.numpy(), want)
    np.testing.assert_allclose(moved.mean, s.mean + 2.0)
    down = s.shifted(-3.0).histogram
    want, _ = np.histogram(torch.cat(BATCHES).numpy() - 3.0, BINS, (-8, 8))
    np.testing.assert_array_equal(down.counts.numpy(), want)


@pytest.mark.parametrize("axis", [1, -1])
def test_means_are_those_of_each_channel(axis):
    batches = [torch.randn(2, 3, 4), torch.randn(5, 3, 4)]
    got = seen(batches, Need(histogram=False, channel_axis=axis))
    rows = torch.cat([b.double().movedim(axis, 0).flatten(1) for b in batches], 1)
    torch.testing.assert_close(got.mean, rows.mean(1), rtol=1e-6, atol=1e-6)
    assert got.histogram is None and got.channels.squares is None
    got = seen(batches, Need(histogram=False, channel_axis=axis, squares=True))
    torch.testing.assert_close(got.channels.squares, rows.square().sum(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 3), (600, 20, 4)])
def test_a_histogram_of_weighed_channels_counts_what_numpy_counts(shape):
    """Of large tensors blocks of 32 of every 353 numbers."""
    torch.manual_seed(0)
    batches, weights = [torch.randn(shape).relu(), torch.randn(shape)], 0.1 + torch.rand(shape[-1])
    h = seen(batches, Need(weights=weights)).histogram
    counted, zeros = np.zeros(BINS), 0.0
    for b in batches:
        flat, each = b.flatten(), weights.expand(shape).flatten()
        if flat.numel() > 2**14:
            flat, each = (v[: len(v) // 353 * 353].view(-1, 353)[:, :32].flatten() for v in (flat, each))
        counted += np.histogram(flat.numpy(), BINS, (-h.reach, h.reach), weights=each.double().numpy())[0]
        zeros += float(each[flat == 0].sum())
    np.testing.assert_allclose(h.counts.numpy(), counted, rtol=1e-5)  # added in float32
    assert h.zeros == pytest.approx(zeros) and zeros > 0


def test_channels_that_are_moved_and_scaled_have_the_statistics_of_the_new_tensor():
    batches, need = [torch.randn(2, 3, 4), torch.randn(5, 3, 4)], Need(histogram=False, channel_axis=1, squares=True)
    plus, times = torch.tensor([1.0, -2.0, 0.0]).double(), torch.tensor([0.5, 3.0, 1.0]).double()
    got = seen(batches, need).by_channel(plus, times)
    want = seen([((b.double() + plus.view(1, 3, 1)) * times.view(1, 3, 1)).float() for b in batches], need)
    for name in ("total", "low", "high", "peak", "squares"):
        torch.testing.assert_close(getattr(got.channels, name), getattr(want.channels, name), rtol=1e-5, atol=1e-5)
    assert (got.low, got.high) == pytest.approx((want.low, want.high)) and got.histogram is None
    with pytest.raises(ValueError, match="Channel statistics of 'x' were not collected"):
        seen(batches).by_channel(0.0, 1.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_refused(bad):
    with pytest.raises(ValueError, match="NaN or infinite"):
        seen([torch.tensor([0.0, bad])])
    graph = capture(mlp(2, 2), (torch.ones(2, 2),))
    with pytest.raises(DataError, match="Batch 1 holds NaN or infinite values for input"):
        collect(graph, [[torch.ones(2, 2)], [torch.full((2, 2), bad)]], tensors={graph.inputs[0]: Need()})


@pytest.mark.parametrize("centers, counts", [([-9, 0, 1, 30], [1, 96, 2, 1]), ([0, 4, 10], [2, 5, 1])])
def test_outliers_are_what_lies_beyond_so_many_standard_deviations(centers, counts):
    """Of the first the mean is 0.23, the deviation 3.134: 9.2 and 29.8 lie beyond 2 of them."""
    centers, counts = torch.tensor(centers).double(), torch.tensor(counts).double()
    x = np.repeat(centers.numpy(), counts.numpy().astype(int))
    for z in (1.0, 2.0, 3.0, 20.0):
        want = np.where(np.abs(centers.numpy() - x.mean()) <= z * x.std(), counts.numpy(), 0)
        np.testing.assert_array_equal(without_outliers(centers, counts, z).numpy(), want)
    assert without_outliers(torch.tensor([-1.0, 1.0]).double(), torch.tensor([1.0, 1.0]).double(), 0.1).sum() == 2


def balanced(mean=0.0):
    """Of means of what a normalisation over the same axes has made: 0 but for rounding."""
    norm, x = nn.InstanceNorm2d(3, affine=True), randn(4, 3, 16, 16) * 3 + 1
    nn.init.constant_(norm.bias, mean)

    def forward(m, x):
        y = torch.relu(m.norm(x).mean((2, 3)).neg())
        return m.head(y), y

    graph = capture(model_of(forward, norm=norm, head=nn.Linear(3, 2)), (x,))
    names = [v for n in graph.nodes for v in n.outputs]
    stats = collect(graph, [(x,)], tensors={v: Need(channel_axis=1) for v in names})
    return {n.op: stats[n.outputs[0]] for n in graph.nodes}


def test_means_of_terms_that_cancel_are_zeros_whatever_rounding_left_of_them():
    seen = balanced()
    assert seen["InstanceNorm"].peak > 2
    for op in ("GlobalAvgPool", "Reshape", "Neg", "Relu"):  # the others hold what the mean does
        s = seen[op]
        assert (s.low, s.high, s.smooth_low, s.smooth_high, s.peak) == (0, 0, 0, 0, 0), op
        assert s.count == 12 and s.histogram.zeros and s.histogram.counts.sum() == s.histogram.counts[BINS // 2]
        assert not s.channels.peak.any() and not s.mean.any()
    assert seen["Linear"].low < seen["Linear"].high, "its biases"


def test_rounding_errors_padded_with_another_number_than_zero_are_data():
    def forward(m, x):
        return m.head(torch.nn.functional.pad(m.norm(x).mean((2, 3)), (0, 1), value=1.5))

    x = randn(4, 3, 16, 16) * 3 + 1
    graph = capture(model_of(forward, norm=nn.InstanceNorm2d(3), head=nn.Linear(4, 2)), (x,))
    pad = next(n.output for n in graph.nodes if n.op == "Pad")
    assert collect(graph, [(x,)], tensors={v: Need() for n in graph.nodes for v in n.outputs})[pad].high == 1.5


def test_a_small_mean_is_data():
    """2^-17 of the greatest term is 64 times as much as rounding leaves."""
    seen = balanced(mean=-4 * 2.0**-17)
    assert 2e-5 < seen["GlobalAvgPool"].peak < 4e-5 and seen["Relu"].high == seen["GlobalAvgPool"].peak


@pytest.mark.parametrize("x, ends", [([-3.0, -1.0], (-3.0, -1.0)), ([1.0, 3.0], (1.0, 3.0)), ([2.0], (2.0, 2.0))])
def test_a_range_need_not_hold_zero(x, ends):
    s = seen([torch.tensor(x)])
    assert (s.low, s.high) == (s.smooth_low, s.smooth_high) == ends


@pytest.mark.parametrize(
    "size, counted", [(1 << 14, lambda k: k >= 0), (353 * 50, lambda k: k % 353 < 32), (353 * 50 + 352, None)]
)
def test_of_a_large_tensor_32_of_each_353_elements_are_counted(size, counted):
    k = torch.arange(size)
    marked = counted(k) if counted else (k % 353 < 32) & (k < 353 * 50)  # what is left over at the end is not
    h = seen([marked.float()]).histogram
    largest = float(marked.float().mean()) if size > 1 << 14 else 0  # the 1 itself is counted as a share of it
    assert h.zeros == 0 and h.counts.sum() == pytest.approx(float(marked.sum()) + largest, rel=1e-5)


@pytest.mark.parametrize("size, every", [(353 * 2048, 353), (353 * 2049, 709), (2819 * 300, 709), (2819 * 2048, 2819)])
def test_of_a_larger_tensor_fewer_elements_are_counted(size, every):
    """No more than 65,536 in a batch, as far as periods reach."""
    marked = torch.arange(size) % every < 32
    h = seen([marked.float()]).histogram
    assert int(h.counts.sum()) == size // every * 32 <= 1 << 16
    assert h.zeros == 0


def test_a_range_in_many_bits_holds_the_peak_of_a_large_tensor_that_is_not_among_the_counted_elements():
    """A peak 0.5 beyond 4 costs more than steps twice as wide: 0.25 / 40,000 against (8 / 32768)^2 / 12."""
    x = randn(40_000).clamp(-3.9, 3.9)
    x[200] = 4.5  # in a period of 353, the first 32 are counted
    grid = Grid(bits=16, qmin=-32768, qmax=32767, pot=True)
    assert float(choose(seen([x]), grid, rule="mse").scale) == 8 / 32768


def test_every_batch_counts_and_one_that_does_not_run_is_told_by_its_number_and_shape():
    net, batches = mlp(3, 2), [randn(4, 3), randn(2, 3, seed=1) * 5]
    graph = capture(net, (batches[0],))
    x, y = graph.inputs[0], graph.nodes[0].output
    found = collect(graph, [[b] for b in batches], tensors={x: Need(), y: Need()})
    for name, want in ((x, torch.cat(batches)), (y, net(torch.cat(batches)).detach())):
        s = found[name]
        assert (s.low, s.high) == pytest.approx((float(want.min()), float(want.max())), rel=1e-6)
        assert s.batches == 2 and s.count == want.numel()
    with pytest.raises(DataError, match="empty"):
        collect(graph, [], tensors={})
    with pytest.raises(DataError) as e:
        collect(graph, [[torch.randn(2, 3)], [torch.randn(4, 5)]], tensors={x: Need()})
    text = str(e.value)
    assert text.startswith("Batch 1 does not run through the model: mat1 and mat2")
    assert f"Got: [4, 5]. Allowed: {x} ['batch', 3]. Try: give batches of the shape" in text


def test_the_layer_that_makes_what_is_no_number_is_named():
    graph = capture(mlp(3, 2), (torch.randn(2, 3),))
    graph.weights["0.weight"] = torch.full((2, 3), 1e38)
    result = graph.nodes[0].output
    with pytest.raises(DataError, match=r"Batch 0 makes NaN or infinite values in layer '0' \(Linear\)") as e:
        collect(graph, [[torch.full((2, 3), 1e38)]], tensors={result: Need()})
    assert e.value.where == graph.nodes[0].source and "check the weights of that layer" in e.value.hint


def test_channels_are_added_to_what_is_asked_for_already():
    needs = {"a": Need(), "b": Need(histogram=False)}
    assert with_channel_stats(needs, {"a": 1, "c": -1}) == {
        "a": Need(histogram=True, channel_axis=1),
        "b": Need(histogram=False),
        "c": Need(histogram=False, channel_axis=-1),
    }
    both = with_channel_stats(with_channel_stats(needs, {"a": 1}, squares=True), {"a": 1})
    assert both == {"a": Need(channel_axis=1, squares=True), "b": Need(histogram=False)}
    assert needs == {"a": Need(), "b": Need(histogram=False)}


def test_a_tensor_without_elements_counts_as_one_zero():
    graph = capture(model_of(lambda m, x: (x[:, 3:] * 2, x + 1)), (torch.randn(2, 3),))
    names = [o for n in graph.nodes for o in n.outputs]
    found = collect(graph, [[torch.ones(2, 3)]], tensors={n: Need() for n in names})
    assert sorted((s.count, s.low, s.high) for s in found.values()) == [(1, 0, 0), (1, 0, 0), (6, 2, 2)]


@pytest.mark.parametrize(
    "inputs, found",
    [
        ({"ids": ((None, 4), "int64"), "attention_mask": ((None, 4), "int64")}, "attention_mask"),
        ({"ids": ((None, 4), "int64"), "Mask": ((None, 4), "bool")}, "Mask"),
        ({"ids": ((None, 4), "int64")}, None),
        ({"mask": ((None, 4), "float32")}, None),  # added to scores
        ({"mask": ((None, 1, 4), "int64")}, None),
        ({"mask": ((None,), "int64")}, None),
        ({"mask": ((None, 4), "int64"), "other_mask": ((None, 4), "int64")}, None),  # one of them
    ],
)
def test_a_padding_mask_is_the_one_input_of_integers_for_each_place_that_is_called_so(inputs, found):
    values = {name: Value(name, shape, dtype) for name, (shape, dtype) in inputs.items()}
    assert padding_mask(Graph([], list(inputs), [], values, {})) == found


def test_only_places_with_words_count_and_all_do_where_a_mask_holds_none():
    """[N, T, C] and [N, T, 1] of which the second is a number for each place, the mask again perhaps."""
    total = node("y = Sum(x)", {"axes": (2,), "keepdims": True})
    shapes = {"mask": (None, 2), "x": (None, 2, 2), "y": (None, 2, 1), "z": (None, 2, 2)}
    how = {"inputs": ["mask", "x"], "outputs": ["y", "z"], "shapes": shapes, "dtypes": {"mask": "int64"}}
    graph = graph_of(total, "z = Neg(x)", **how)
    x = torch.tensor([[[1.0, 2.0], [8.0, 9.0]], [[3.0, 4.0], [5.0, 6.0]]])
    tensors = {v: Need() for v in "xyz"}
    for mask, ends in (([[1, 0], [1, 1]], (1, 6)), ([[0, 0], [0, 0]], (1, 9)), ([[0, 2], [0, 0]], (8, 9))):
        found = collect(graph, [[torch.tensor(mask), x]], tensors=tensors)
        assert (found["x"].low, found["x"].high) == ends == (-found["z"].high, -found["z"].low)
        assert (found["y"].low, found["y"].high, found["y"].count) == (3, 17, 4)
    alone = collect(graph, [[torch.tensor([[1]]), x[:1, :1]]], tensors=tensors)["x"]  # one place of one sample
    assert (alone.low, alone.high) == (1, 2)
