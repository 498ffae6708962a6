"""A batch of large values runs in parts, and its statistics are those of the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chipfit.calibration import batch_parts
from chipfit.calibration.collect import Need, collect
from chipfit.engine.run import run
from chipfit.frameworks.torch.capture import capture
from tests.build import images, model_of, randn, small_cnn
from tests.zoo import Fire, Functional, InvertedResidual, Residual, UNet, padded, split

#: networks, of images [N, 3, 8, 8], whose samples are known to be apart
APART = {
    "residual": Residual,
    "inverted": InvertedResidual,
    "fire": Fire,
    "u-net": UNet,
    "split": split,
    "functional": Functional,
    "padded": padded,
    "softmax": lambda: model_of(lambda m, x: x.softmax(1).amax((2, 3)) - x[:, :, 0].mean(2)),
    "transposed": lambda: model_of(lambda m, x: m.line(x.permute(0, 2, 3, 1)).flatten(2), line=nn.Linear(3, 4)),
}
#: networks that compute a sample from others, or move samples
MIXED = {
    "mean": lambda x: x - x.mean(0, keepdim=True),
    "all": lambda x: x - x.amax(),
    "softmax": lambda x: x.softmax(0),
    "negative axis": lambda x: x.softmax(-4),
    "sum": lambda x: x.cumsum(0),
    "flipped": lambda x: x.flip(0) + x,
    "rolled": lambda x: x.roll(1, 0) + x,
    "shifted in time": lambda x: x.reshape(-1, 2, *x.shape[1:]).mean(1),
    "flat": lambda x: x.reshape(-1, 64).softmax(-1),
    "products": lambda x: x.flatten(1) @ x.flatten(1).T,
    "moved": lambda x: x.transpose(0, 1).softmax(1).transpose(0, 1),
    "joined": lambda x: torch.cat([x, x + 1], 0),
    "padded": lambda x: F.pad(x, (0, 0, 0, 0, 0, 0, 1, 1)),
    "outer": lambda x: x.mean((1, 2, 3))[:, None] - x.mean((1, 2, 3))[None],
    "steps": lambda x: x[::2],
    "drawn": lambda x: x + torch.rand_like(x),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(batch_parts, "LARGE", 1024)
    monkeypatch.setattr(batch_parts, "LEAST", 1)


def graph_with(model: nn.Module):
    torch.manual_seed(0)
    return capture(model.eval(), (images(8),))


@pytest.mark.parametrize("name", APART)
def test_a_part_has_the_results_that_its_samples_have_in_the_batch(name):
    torch.manual_seed(0)
    graph, x = graph_with(APART[name]()), images(8)
    parts = batch_parts.batch_parts(graph, [x])
    assert len(parts) > 1 and torch.equal(torch.cat([p for (p,) in parts]), x)
    whole = run(graph, [x], keep=graph.values)
    several = [run(graph, p, keep=graph.values) for p in parts]
    for v in graph.values:
        torch.testing.assert_close(torch.cat([s[v] for s in several]), whole[v])


@pytest.mark.parametrize("name", MIXED)
def test_a_batch_whose_samples_depend_on_each_other_stays_whole(name):
    graph, x = graph_with(model_of(lambda m, x: MIXED[name](m.conv(x)), conv=nn.Conv2d(3, 3, 1))), images(8)
    assert [len(p) for (p,) in batch_parts.batch_parts(graph, [x])] == [8]


def test_inputs_of_several_lengths_stay_whole():
    graph = capture(model_of(lambda m, x, y: (x * 2, y + 1)), (randn(8, 300), randn(8, 300)))
    assert len(batch_parts.batch_parts(graph, [randn(8, 300), randn(8, 300)])) == 8
    assert len(batch_parts.batch_parts(graph, [randn(8, 300), randn(4, 300)])) == 1


def test_an_input_without_axes_is_calibrated():
    graph = capture(model_of(lambda m, gain, x: gain * x), (torch.tensor(2.0), randn(8, 300)))
    stats = collect(graph, [[torch.tensor(2.0), randn(8, 300)]], tensors={v: Need() for v in graph.values})
    assert stats[graph.outputs[0]].peak == pytest.approx(2 * float(randn(8, 300).abs().max()))


@pytest.mark.parametrize("size", [8, 40], ids=["all elements", "some elements"])
def test_statistics_of_parts_are_those_of_the_batch(monkeypatch, size):
    graph = capture(small_cnn(size=size), (images(12, size),))
    needs = {v: Need(channel_axis=1 if k % 2 else None, squares=k % 4 == 1) for k, v in enumerate(graph.values)}
    data = [[images(12, size, seed=k) * (k + 1)] for k in range(3)]
    assert len(batch_parts.batch_parts(graph, data[0])) > 2
    parts = collect(graph, data, tensors=needs)
    monkeypatch.setattr(batch_parts, "LARGE", 1 << 40)
    for name, want in collect(graph, data, tensors=needs).items():
        got = parts[name]
        assert (got.count, got.batches, got.histogram.reach) == (want.count, want.batches, want.histogram.reach)
        for field in ("low", "high", "smooth_low", "smooth_high"):
            assert getattr(got, field) == pytest.approx(getattr(want, field), rel=1e-5)
        assert float(got.histogram.counts.sum()) == pytest.approx(float(want.histogram.counts.sum()), rel=0.2)
        if size == 8:
            assert (got.histogram.counts - want.histogram.counts).abs().sum() <= 4  # rounding moves a few
        for sums in ("total", "peak", "squares") if want.channels is not None else ():
            torch.testing.assert_close(getattr(got.channels, sums), getattr(want.channels, sums), rtol=1e-4, atol=1e-4)


def test_padding_of_a_large_batch_is_left_out():
    def forward(m, features, mask):
        return m.line(features), mask + 1

    x, mask = randn(8, 20, 4), torch.arange(20) < torch.arange(8)[:, None] + 5
    x[~mask] = 100.0
    graph = capture(model_of(forward, line=nn.Linear(4, 4)), (x, mask.long()))
    stats = collect(graph, [[x, mask.long()]], tensors={graph.inputs[0]: Need()})
    assert stats[graph.inputs[0]].high == float(x[mask].max())
