"""Sizes in which calibration batches differ stay open: in the model, its simulation, saved results and ONNX files."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.errors import CaptureError, DataError, UnsupportedError
from tests.build import model_of, quantized, sequential

PLACES = 24  #: rows of the table of positions


class Encoder(nn.Module):
    """A small transformer: words and positions, a mask of padding, one block, a mean over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Parameter(torch.randn(1, PLACES, 16))
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def heads(self, x):
        batch, length, _ = x.shape
        return x.view(batch, length, 2, 8).transpose(1, 2)

    def forward(self, ids, mask):
        batch, length = ids.shape
        x = self.words(ids) + self.places[:, :length]
        y = self.first(x)
        hidden = (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        scores = self.heads(self.q(y)) @ self.heads(self.k(y)).transpose(-1, -2) / 8**0.5 + hidden
        y = (scores.softmax(-1) @ self.heads(self.v(y))).transpose(1, 2).reshape(batch, length, 16)
        x = x + self.out(y)
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)


def sentences(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(1, 50, (batch, length))
    mask = (torch.arange(length) < torch.randint(2, length + 1, (batch, 1))).long()
    return words * mask, mask


@pytest.fixture(scope="module")
def encoder() -> nn.Module:
    torch.manual_seed(0)
    return Encoder().eval()


@pytest.fixture(scope="module")
def result(encoder: nn.Module) -> chipfit.Result:
    torch.manual_seed(1)
    return quantized(encoder, [sentences(4, 12), sentences(4, 12), sentences(3, 7), sentences(5, 20)])


FLOAT = {"Add", "Cast", "Div", "Gelu", "LayerNorm", "MatMul", "Mul", "Softmax", "Sum"}


def test_sentences_of_other_lengths_are_computed_as_onnx_runtime_does(encoder, result, tmp_path):
    result.save(tmp_path / "saved")
    for r in (result, chipfit.load(tmp_path / "saved")):
        for batch in (sentences(2, 9), sentences(1, 16), sentences(6, PLACES)):
            r.verify([batch]).require(FLOAT)
            with torch.no_grad():
                near = F.cosine_similarity(r.model(*batch), encoder(*batch), dim=1)
            assert near.min() > 0.99


class Pyramid(nn.Module):
    """A convolutional network for images of any size: strides, pools, a resize back, a skip, a head over all places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.up = nn.Sequential(nn.Upsample(scale_factor=4.0), nn.Conv2d(12, 8, 1))
        self.places, self.head = nn.Conv2d(8, 4, 1), nn.Linear(8, 5)

    def forward(self, image) -> dict[str, torch.Tensor]:
        x = self.stem(image)
        x = x + self.up(self.down(x))
        rows = self.places(x).flatten(2).transpose(1, 2)
        return {"places": rows, "label": self.head(x.mean((2, 3)))}


def test_images_of_other_heights_and_widths_are_computed_as_onnx_runtime_does(tmp_path):
    torch.manual_seed(0)
    model = Pyramid().eval()
    result = quantized(model, [torch.randn(4, 3, 16, 16), torch.randn(4, 3, 24, 16), torch.randn(2, 3, 16, 32)])
    result.save(tmp_path / "saved")
    for r in (result, chipfit.load(tmp_path / "saved")):
        for batch in (torch.randn(2, 3, 8, 40), torch.randn(1, 3, 20, 12)):
            r.verify([batch]).require({"Resize", "Reshape"})
            with torch.no_grad():
                got, want = r.model(batch), model(batch)
            assert all(F.cosine_similarity(got[k].flatten(1), want[k].flatten(1), dim=1).min() > 0.95 for k in want)


class Strided(nn.Module):
    """A network whose tail depends on the size of a strided or cropped feature map."""

    def __init__(self, tail) -> None:
        super().__init__()
        self.tail, self.stem, self.deep = tail, nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3)
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, image):
        return self.out(self.tail(F.relu(self.stem(image)), self))


def nonlocal_(x, m):
    batch, channels, height, width = x.shape
    return x + (x.flatten(2) @ (x.flatten(2).mT @ x.flatten(2) / 8).softmax(-1)).view(batch, channels, height, width)


def center(x, m):
    y = m.deep(x)
    edge = (x.shape[2] - y.shape[2]) // 2
    return x[:, :, edge : edge + y.shape[2], edge : edge + y.shape[3]] + y


STRIDED = {
    "global context": lambda x, m: x + F.interpolate(x.mean((2, 3), True), size=x.shape[2:], mode="bilinear"),
    "a pyramid of features": lambda x, m: x + F.interpolate(m.deep(x), size=x.shape[2:], mode="bilinear"),
    "a crop at the corner": lambda x, m: (y := m.deep(x)) + x[:, :, : y.shape[2], : y.shape[3]],
    "a crop at the center": center,
    "twice the size": lambda x, m: F.interpolate(x, size=(2 * x.shape[2], 2 * x.shape[3])),
    "attention over places": nonlocal_,
    "pixels in channels": lambda x, m: F.channel_shuffle(F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2), 2),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", STRIDED)
def test_sizes_of_inner_tensors_stay_open_behind_strides(name, tmp_path):
    torch.manual_seed(0)
    model = Strided(STRIDED[name]).eval()
    result = quantized(model, [torch.randn(8, 3, 32, 32), torch.randn(8, 3, 40, 24), torch.randn(8, 3, 24, 48)])
    result.save(tmp_path / "saved")
    for r, shape in ((result, (1, 3, 28, 56)), (chipfit.load(tmp_path / "saved"), (2, 3, 27, 45))):
        image = torch.randn(shape).clamp(-1, 1)
        assert r.verify([image]).sound
        with torch.no_grad():
            got, want = r.model(image), model(image)
        assert got.shape == want.shape and (got - want).abs().mean() < 0.05 * want.abs().max()


def cropped_to_skip(m, skip, up):
    return torch.cat([up[:, :, : skip.shape[2], : skip.shape[3]], skip], 1)


def cropped_to_smaller(m, skip, up):
    h, w = (min(a, b) for a, b in zip(skip.shape[2:], up.shape[2:], strict=True))
    return torch.cat([up[:, :, :h, :w], skip[:, :, :h, :w]], 1)


@pytest.mark.parametrize("join", [cropped_to_skip, cropped_to_smaller])
@pytest.mark.parametrize("sizes", [(17, 20), (16, 23, 20), (16, 24)])
def test_skip_connections_are_cropped_for_all_sizes_as_for_those_of_the_batches(join, sizes):
    """Torch leaves out a slice of all elements, so that calls of odd sizes alone show that there is one."""
    torch.manual_seed(0)

    def forward(m, x):
        skip = F.relu(m.first(x))
        return m.last(join(m, skip, m.up(F.relu(m.down(skip)))))

    layers = {"first": nn.Conv2d(3, 4, 3, padding=1), "down": nn.Conv2d(4, 4, 3, 2, 1), "last": nn.Conv2d(8, 2, 1)}
    model = model_of(forward, up=nn.ConvTranspose2d(4, 4, 2, 2), **layers)
    result = quantized(model, [torch.randn(2, 3, n, n) for n in sizes])
    odd_too = any(n % 2 for n in sizes)
    for n in (28, 29 if odd_too else 30):
        x = torch.randn(1, 3, n, n).clamp(-1, 1)
        assert result.verify([x]).sound
        want = model(x).detach()
        assert (result.model(x) - want).abs().max() < 0.1 * want.abs().max()
    assert odd_too or any("sizes that no batch has may fail" in note for note in result.plan.rewrites)


def test_data_of_one_size_leave_nothing_open_but_the_batch(encoder):
    result = quantized(encoder, [sentences(4, 12), sentences(3, 12)])
    assert [result.graph.shape(i) for i in result.graph.inputs] == [(None, 12), (None, 12)]
    with pytest.raises(DataError, match=r"wrong shape.*Allowed: \['batch', 12\]. Try: sizes stay dynamic"):
        result.verify([sentences(2, 9)])


def test_an_example_of_another_size_opens_it_too(encoder):
    result = quantized(encoder, [sentences(4, 12)], example=sentences(2, 5))
    assert [result.graph.shape(i) for i in result.graph.inputs] == [(None, None), (None, None)]
    result.verify([sentences(2, 9)]).require(FLOAT)


def test_data_that_can_be_read_once_are_of_one_size(encoder):
    with pytest.raises(DataError, match="to be read again"):
        quantized(encoder, iter([sentences(4, 12), sentences(4, 7)]), settings=chipfit.Settings(smooth="off"))
    kept = quantized(encoder, iter([sentences(4, 12), sentences(4, 7)]))  # to try smoothing
    assert kept.graph.shape("ids") == (None, None)
    assert quantized(encoder, lambda: iter([sentences(4, 12), sentences(4, 7)])).graph.shape("ids") == (None, None)


@pytest.mark.parametrize("lengths", [(0, 6), (6, 0), (0, 6, 4)], ids=str)
def test_a_batch_of_an_axis_without_elements_opens_nothing(lengths):
    data = [torch.randn(2, n, 3) for n in lengths]
    with pytest.raises(DataError, match="axis of size 0 holds nothing: leave such batches out"):
        quantized(sequential(nn.Linear(3, 4), nn.ReLU()), data)


def test_data_without_elements_are_no_data():
    with pytest.raises(DataError, match="The calibration data are empty"):
        quantized(sequential(nn.Linear(3, 4), nn.ReLU()), [torch.randn(2, 0, 3)] * 2)


def test_batches_without_samples_are_left_out_and_an_example_of_none_is_refused():
    model = sequential(nn.Linear(3, 4), nn.ReLU())
    full, none = [torch.randn(2, 4, 3), torch.randn(3, 5, 3)], torch.zeros(0, 3)
    for data in ([none, *full], [full[0], torch.zeros(0, 4, 3), full[1]], iter([none, full[0]])):
        result = quantized(model, data)
        assert result.stats[result.graph.inputs[0]].batches == len(full) - isinstance(data, Iterator)
    with pytest.raises(CaptureError, match="The example holds no sample. Allowed: a batch of one or more"):
        quantized(model, full, example=none)


def test_an_input_that_is_empty_yet_is_taken_as_one_of_zeros():
    data = [(torch.randn(2, 5, 3), torch.zeros(2, 0, 3)) for _ in range(2)]
    remembering = model_of(lambda m, x, past: m.linear(torch.cat([past, x], 1)), linear=nn.Linear(3, 4))
    result = quantized(remembering, data)
    assert (result.stats["past"].low, result.stats["past"].high) == (0, 0)
    assert result.verify(data).verdict == "exact"


def test_sentences_beyond_the_table_of_positions_are_refused_wherever_they_come_in(encoder, result):
    long = sentences(2, PLACES + 1)
    for act in (lambda: result.verify([long]), lambda: result.model(*long), lambda: result.device_model(*long)):
        with pytest.raises(DataError, match=f"range. Got: 0 to {PLACES}. Allowed: 0 to {PLACES - 1}"):
            act()
    with pytest.raises(DataError, match=r"'ids' has the wrong shape.*give batches of one size.*self.places"):
        quantized(encoder, [sentences(2, 9), long])


def test_a_tflite_file_has_one_size_and_says_so(result, encoder, tmp_path):
    with pytest.raises(
        UnsupportedError, match=r"Only the batch size.*'ids' \[None, None\].*quantize with batches of one size"
    ):
        result.export(tmp_path / "encoder.tflite")
    images = [torch.randn(2, 3, s, s) for s in (16, 24, 20)]
    with pytest.raises(UnsupportedError, match="Only the batch size"):
        quantized(Pyramid(), images[:2], "tflite_int8").verify(images[2:])


def between_layers(function):
    """A network that computes a function of [N, T, 4] between two linear layers."""
    torch.manual_seed(0)
    return model_of(lambda m, x: m.second(function(m.first(x))), first=nn.Linear(4, 4), second=nn.Linear(4, 4))


FIXED = {
    "a choice by the size": lambda x: x if x.shape[1] < 10 else -x,
    "one size in a choice": lambda x: x if x.shape[1] != 17 else -x,
    "an even size": lambda x: x if x.shape[1] % 2 == 0 else -x,
    "a part of the size": lambda x: x[:, : x.shape[1] // 3] * 2,
    "a size as a number in Python": lambda x: x * float(x.shape[1]),
    "a pooled size that is rounded": lambda x: (
        x * 2 if 2 * F.max_pool1d(x.mT, 2).shape[2] == x.shape[1] else x + F.max_pool1d(x.mT, 2).shape[2]
    ),
    "a root of the size": lambda x: x / x.shape[1] ** 0.5,
    "a loop over the size": lambda x: torch.stack([x[:, k] * (k + 1) for k in range(x.shape[1])], 1),
}


@pytest.mark.parametrize("name", FIXED)
def test_what_does_not_follow_a_size_is_refused_with_the_line(name):
    model, data = between_layers(FIXED[name]), [torch.randn(2, n, 4) for n in (8, 12)]
    with pytest.raises(
        DataError, match=r"wrong shape. Got: \[2, \d+, 4\].*give batches of one size.*something else for other sizes"
    ):
        quantized(model, data)
    assert quantized(model, data[:1]).verify(data[:1]).sound


FOLLOW = {
    "places by number": lambda x: x + (torch.arange(x.shape[1])[None, :, None] * 1.0).sin(),
    "a mask of what is before": lambda x: (x @ x.mT + torch.ones(x.shape[1], x.shape[1]).triu(1) * -9).softmax(-1) @ x,
    "a token in front": lambda x: torch.cat([torch.ones(1, 1, 4).expand(x.shape[0], -1, -1), x], 1),
    "zeros of the same size": lambda x: torch.cat([x.new_zeros(x.shape[0], x.shape[1], 4), x], 2)[..., 2:6],
    "all words as one row": lambda x: x.reshape(x.shape[0] * x.shape[1], 4).relu().view(x.shape[0], x.shape[1], 4),
    "the number of words": lambda x: x.sum(1, keepdim=True) / x.shape[1] + x,
    "heads": lambda x: x.view(x.shape[0], -1, 2, 2).transpose(1, 2).flatten(1, 2).view(len(x), -1, 4),
    "neighbours": lambda x: x[:, 1:] - x[:, :-1],
    "twice as many": lambda x: F.interpolate(x.mT, scale_factor=2.0).mT,
    "as many as the other": lambda x: F.interpolate(F.max_pool1d(x.mT, 2), size=x.shape[1]).mT,
    "a size that is several": lambda x: x * 2 if x.shape[1] > 1 and x.shape[1] - 2 < x.shape[1] else x,
    "normalised": lambda x: F.group_norm(x.mT, 2).mT + F.instance_norm(x.mT).mT,
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", FOLLOW)
def test_what_follows_a_size_is_computed_as_onnx_runtime_does(name):
    model = between_layers(FOLLOW[name])
    result = quantized(model, [torch.randn(99, n, 4) for n in (8, 12)])
    for shape in ((2, 10, 4), (1, 6, 4), (5, 18, 4)):
        x = torch.randn(shape).clamp(-1, 1)
        assert result.verify([x]).sound, result.verification.departures
        with torch.no_grad():
            want = model(x)
            assert (result.model(x) - want).abs().max() < 0.1 * want.abs().max()


def test_weights_are_rounded_over_all_lengths(encoder):
    data = [sentences(4, 12), sentences(4, 7), sentences(3, 20)]
    result = quantized(encoder, data, settings=chipfit.Settings(rounding="gptq"))
    result.verify([sentences(2, 9)]).require(FLOAT)


def test_a_model_may_return_the_size_of_its_input_which_follows_the_batch():
    """What the model returns beside its tensors is an int of Python, as users of MCT measure sizes."""
    model = model_of(lambda m, x: (F.relu(m.conv(x)), x.shape), conv=nn.Conv2d(3, 4, 3))
    result = quantized(model, torch.randn(4, 3, 8, 8))
    for count in (2, 5):
        x = torch.randn(count, 3, 8, 8)
        made, size = result.model(x)
        assert tuple(size) == (count, 3, 8, 8) and made.shape == (count, 4, 6, 6)
