"""Common mistakes with input data: each is named, with what to write instead."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit.calibration.input_errors import expected_inputs, explain_error, layout_hint
from chipfit.errors import ChipfitError, DataError
from tests.build import model_of, quantized

NET = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()
X = torch.linspace(-1, 1, 4 * 3 * 8 * 8).reshape(4, 3, 8, 8)
Y = torch.arange(4)
SHAPE = "The inputs do not have the shape that the model takes."
SAMPLE = "Try: this is one sample: give batches, as sample[None], a DataLoader or dataset.batch(16) makes them."
LABELS = "Try: yield the inputs, or the inputs and one label behind them: (x, y)."
SCALE = "Try: convert and scale them as in training, for example x.float() / 255."
LAST = "Try: channels come last here and first in the model: x.permute(0, 3, 1, 2)."


NAMED = model_of(lambda m, image: m.net(image), net=NET)
#: does not say how many inputs it takes
ANY = model_of(lambda m, *images: NET(images[0]) if len(images) == 1 else images[0] / images[1])
LAST_HERE = "channels come last here and first in the model"
FIRST_HERE = "channels come first here and last in the model"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([X[0], X[1]], f"{SHAPE} Got: float32[3, 8, 8]. Allowed: ['batch', 3, 'any', 'any']. {SAMPLE}"),
        ([(X[0], 1)], f"{SHAPE} Got: float32[3, 8, 8]. Allowed: ['batch', 3, 'any', 'any']. {SAMPLE}"),
        (
            [{"pixels": X, "labels": Y}],
            "The names in the batches are not those of the model's inputs. Got: pixels, labels. Allowed: image. "
            "Try: rename them, or yield tuples in the order of the inputs.",
        ),
    ],
    ids=["samples", "sample and label", "dict"],
)
def test_slips_with_calibration_data(data, message):
    with pytest.raises(DataError) as e:
        chipfit.quantize(NAMED, data, progress=False)
    assert str(e.value) == message


@pytest.fixture(scope="module")
def result():
    return chipfit.quantize(NET, [X], progress=False)


@pytest.mark.parametrize(
    "data",
    [
        X,
        [X.double()],
        [X.double().numpy()],
        [(X, Y)],
        [(X, torch.eye(5)[:4])],
        [(X, Y.tolist())],
        [{"image": X, "labels": Y}],
    ],
    ids=["bare tensor", "float64", "float64 of NumPy", "labels", "one-hot labels", "list of labels", "dict"],
)
def test_what_looks_like_a_slip_and_is_none(data, result):
    made = chipfit.quantize(NAMED, data, progress=False)
    assert made.plan["net.0.weight"].scale.equal(result.plan["0.weight"].scale)


def test_a_model_that_fails_by_itself_keeps_its_own_error():
    broken = model_of(lambda m, x: m.conv(x) @ torch.ones(7, device=x.device), conv=nn.Conv2d(3, 4, 3))
    with pytest.raises(chipfit.errors.CaptureError, match="size mismatch|mat1|must match|shape"):
        quantized(broken, [X])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda y: y.transpose(0, 3, 1, 2),
            "Try: channels come first here and last in the model: x.permute(0, 2, 3, 1).",
        ),
        (lambda y: y[0], SAMPLE),
    ],
    ids=["channels first", "samples"],
)
def test_slips_with_a_keras_model(change, message):
    keras = pytest.importorskip("keras")
    x = keras.Input((8, 8, 3))
    model = keras.Model(x, keras.layers.Conv2D(4, 3)(x))
    with pytest.raises(DataError) as e:
        chipfit.quantize(model, [np.ascontiguousarray(change(X.permute(0, 2, 3, 1).numpy()))], progress=False)
    assert str(e.value).endswith(message)


@pytest.mark.parametrize(
    "forward, count",
    [
        (lambda x: x, 1),
        (lambda x, /, y, *, scale=1: x, 2),
        (lambda *xs: xs, None),
        (int.from_bytes, 2),
        (getattr, None),  # of C, without a signature: ValueError
        ("no function", None),  # TypeError
    ],
)
def test_a_model_takes_as_many_inputs_as_it_tells(forward, count):
    assert expected_inputs(SimpleNamespace(forward=forward)) == count
    assert expected_inputs(object()) is None


@pytest.mark.parametrize(
    "got, want, hint",
    [
        ((4, 8, 3), (None, 3, None), f"{LAST_HERE}: x.permute(0, 2, 1)"),
        ((4, 3, 8), (None, 8, 3), f"{LAST_HERE}: x.permute(0, 2, 1)"),  # of one axis both are the same
        ((4, 8, 9, 7, 3), (None, 3, None, None, None), f"{LAST_HERE}: x.permute(0, 4, 1, 2, 3)"),
        ((4, 3, 8, 9, 7), (None, 8, 9, 7, 3), f"{FIRST_HERE}: x.permute(0, 2, 3, 4, 1)"),
        ((4, 8, 8, 5), (None, 3, None, None), ""),
        ((3, 8, 8), (None, 3, None, None), SAMPLE.removeprefix("Try: ").removesuffix(".")),
        ((7,), (None, 3), ""),
        ((), (None, 3), ""),
    ],
)
def test_the_order_of_axes_that_a_model_wants_is_told_for_every_rank(got, want, hint):
    assert layout_hint(got, want) == hint
    order = [int(k) for k in re.findall(r"\d", hint.partition("permute")[2])]
    assert not order or all(w in (None, got[k]) for w, k in zip(want, order, strict=True))


def test_a_label_behind_the_input_of_a_model_that_takes_any_number_is_left_out():
    result = chipfit.quantize(ANY, [(X, Y)], progress=False)
    assert len(result.graph.inputs) == 1


# ---------------------------------------------------------------- the refusal of one example

REFUSAL = ChipfitError("the model's own words")
CONV2D = nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 3))


def told(model, *args, **kwargs):
    """What is said instead of a refusal; "" where the refusal stays."""
    error = explain_error(REFUSAL, model, args, kwargs)
    return "" if error is REFUSAL else str(error)


@pytest.mark.parametrize(
    "model, args, words",
    [
        (CONV2D, (X,), ""),
        (CONV2D, (X[0],), SAMPLE),
        (CONV2D, (X[:, :2],), ""),  # neither another layout nor a sample
        (CONV2D, (X[0, 0],), ""),
        (CONV2D, (X[:, 0],), SAMPLE),  # as many axes as a sample
        (CONV2D, (X.permute(0, 2, 3, 1),), "Got: float32[4, 8, 8, 3]. Allowed: ['batch', 3, 'any', 'any']. " + LAST),
        (CONV2D, (X.long(),), SCALE),
        (CONV2D, (X[0].long(),), SCALE),
        (CONV2D, (X[0, 0].long(),), ""),  # numbers of words, perhaps
        (CONV2D, (X, Y), "A batch holds 2 items, and the model takes 1. Got: float32[4, 3, 8, 8], int64[4]. " + LABELS),
        (CONV2D, (), ""),
        (CONV2D, (5,), ""),
        (nn.Sequential(nn.Linear(8, 2)), (X.long(),), ""),  # no convolution says what the input is
        (nn.Sequential(nn.Linear(8, 2)), (X[0],), ""),
        (nn.Conv1d(3, 4, 1), (torch.zeros(3, 8),), "Got: float32[3, 8]. Allowed: ['batch', 3, 'any']. " + SAMPLE),
        (nn.Conv3d(3, 4, 1), (X,), "Allowed: ['batch', 3, 'any', 'any', 'any']. " + SAMPLE),
        (nn.Conv2d(3, 4, 1), (X.half().permute(0, 2, 3, 1),), "Got: float16[4, 8, 8, 3]."),
    ],
)
def test_what_is_said_of_an_example_that_a_model_refuses(model, args, words):
    assert words in told(model, *args) and bool(told(model, *args)) is bool(words)


def test_the_first_tensor_of_several_inputs_is_looked_at():
    two = model_of(lambda m, scale, image: m.conv(image * scale), conv=nn.Conv2d(3, 4, 3))
    assert SAMPLE in told(two, 5, X[0]) and told(two, 5, X) == ""
    assert told(ANY, X, X, X) == ""  # takes any number


def test_names_that_are_not_the_models_are_told():
    words = (
        "The names in the batches are not those of the model's inputs. Got: pixels, 7. Allowed: {}. Try: rename them"
    )
    assert words.format("image") in told(NAMED, {"pixels": X, 7: Y})
    assert "Got: pixels. Allowed: image." in told(NAMED, pixels=X)
    assert told(NAMED, image=X, pixels=X) == told(NAMED, {"image": X}) == ""
    keras = SimpleNamespace(inputs=[1, 2], input_shape=[(None, 8), (None, 8)])
    assert words.format("2 inputs by position") in told(keras, {"pixels": X, 7: Y})
    assert "takes 2" in told(keras, X, X, X) and told(keras, X, X) == ""


@pytest.mark.parametrize(
    "shape, x, words",
    [
        ((None, 8, 8, 3), X, FIRST_HERE),
        ((None, 3, 8, 8), X, ""),
        ((None, 3, 8, 8), X[0], SAMPLE),
        ((None, 3, 8, 8), X.long(), SCALE),
        ((4, 8, 8, 3), X, ""),  # of a batch of one size nothing is known
        ([None, 8, 8, 3], X, ""),
        ((), X, ""),
        (None, X, ""),
    ],
)
def test_a_model_that_knows_the_shape_of_its_input_is_asked(shape, x, words):
    text = told(SimpleNamespace(inputs=[1], input_shape=shape), x)
    assert words in text and bool(text) is bool(words)


# ---------------------------------------------------------------- the values and the form of data


def test_an_error_of_the_users_own_data_is_passed_on_as_it_is():
    def broken():
        yield X
        raise TimeoutError("disk unplugged")

    with pytest.raises(TimeoutError, match="unplugged"):
        quantized(NET, broken())


def test_a_model_that_adds_the_batch_itself_takes_single_images():
    model = model_of(lambda m, image: m.net(image[None]), net=NET)
    result = quantized(model, [X[0], X[1]], "ort_cpu")
    assert torch.allclose(result.model(X[0]), NET(X[:1]), atol=0.01)
    with pytest.raises(DataError, match="one sample"):
        quantized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), [X[0], X[1]], "ort_cpu")


def test_data_of_another_model_are_told_from_a_sample_without_a_batch():
    model = nn.Sequential(nn.Conv1d(40, 8, 3), nn.ReLU()).eval()
    wanted = "these data have 2 axes, and the model takes 3: are they of another model"
    with pytest.raises(DataError, match=wanted):
        chipfit.quantize(model, [torch.randn(16, 13)], progress=False)
    with pytest.raises(DataError, match="this is one sample"):
        chipfit.quantize(model, [torch.randn(40, 13)], progress=False)
    result = chipfit.quantize(model, [torch.randn(4, 40, 13)], progress=False)
    with pytest.raises(DataError, match=wanted):
        result.verify([torch.randn(16, 13)])
