"""MCT's data generation: its options become those of `chipfit.generated`."""

import copy
import inspect
import itertools

import numpy as np
import pytest
import torch
from torch import nn

import chipfit as mct
from chipfit import data_generation as dg
from chipfit.errors import ChipfitError, ConfigError
from tests.build import keras_sequential, sequential, small_cnn


def network() -> nn.Module:
    """Return the network of MCT's documentation of this function."""
    torch.manual_seed(0)
    return sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2 * 6 * 6, 10)).eval()


def test_the_example_of_the_documentation_gives_one_tensor_an_image():
    config = mct.data_generation.get_pytorch_data_generation_config(n_iter=1, data_gen_batch_size=2)
    images = mct.data_generation.pytorch_data_generation_experimental(
        model=network(), n_images=4, output_image_size=8, data_generation_config=config
    )
    assert [tuple(x.shape) for x in images] == [(1, 3, 8, 8)] * 4
    limits = torch.tensor(
        [[-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225], [0.515 / 0.229, 0.544 / 0.224, 0.594 / 0.225]]
    )
    every = torch.cat(images)
    assert (every.amin((0, 2, 3)) >= limits[0] - 1e-5).all() and (every.amax((0, 2, 3)) <= limits[1] + 1e-5).all()


def test_images_calibrate_a_network():
    config = dg.get_pytorch_data_generation_config(n_iter=2, initial_lr=0.1, extra_pixels=2)
    images = dg.pytorch_data_generation_experimental(network(), 8, (8, 8), config)
    model, _ = mct.ptq.pytorch_post_training_quantization(network(), lambda: ([x] for x in images))
    assert model(images[0]).shape == (1, 10)


def test_the_seed_of_torch_repeats_images():
    def first() -> torch.Tensor:
        torch.manual_seed(3)
        config = dg.get_pytorch_data_generation_config(n_iter=1, extra_pixels=0)
        return dg.pytorch_data_generation_experimental(network(), 1, 8, config)[0]

    assert first().equal(first())


KINDS = [
    *itertools.product(["scheduler_type"], dg.SchedulerType),
    *itertools.product(["output_loss_type"], dg.OutputLossType),
    *itertools.product(["data_init_type"], dg.DataInitType),
    *itertools.product(["image_granularity"], dg.ImageGranularity),
    *itertools.product(["image_pipeline_type"], dg.ImagePipelineType),
    *itertools.product(["image_normalization_type"], dg.ImageNormalizationType),
    *itertools.product(["layer_weighting_type"], list(dg.BNLayerWeightingType)[:2]),
    ("extra_pixels", (1,)),
    ("extra_pixels", (1, 3)),
    ("output_loss_multiplier", 0),
]


@pytest.mark.parametrize(("option", "value"), KINDS, ids=str)
def test_every_value_of_an_option_makes_images(option, value):
    config = dg.get_pytorch_data_generation_config(n_iter=2, data_gen_batch_size=3, initial_lr=0.1, **{option: value})
    images = dg.pytorch_data_generation_experimental(network(), 5, (8,), config)
    assert len(images) == 5 and all(x.isfinite().all() for x in images)


@pytest.mark.parametrize("channels", [1, 4])
def test_images_of_keras_models_have_the_channels_of_the_input(channels):
    """They had three, so that models of grey images failed on them."""
    import keras  # noqa: TID251

    model = keras_sequential([8, 8, channels], keras.layers.Conv2D(3, 3), keras.layers.BatchNormalization())
    config = dg.get_keras_data_generation_config(n_iter=2)
    assert [x.shape for x in dg.keras_data_generation_experimental(model, 2, 8, config)] == [(1, 8, 8, channels)] * 2


def test_a_keras_model_of_sequences_gets_no_images():
    import keras  # noqa: TID251

    model = keras_sequential([40, 12], keras.layers.Conv1D(3, 3), keras.layers.BatchNormalization())
    with pytest.raises(ConfigError, match=r"Images cannot be generated.*\(None, 40, 12\).*chipfit.generated"):
        dg.keras_data_generation_experimental(model, 2, (40, 12), dg.get_keras_data_generation_config(n_iter=2))


def test_keras_models_give_arrays_with_channels_last():
    import keras  # noqa: TID251

    layers = [keras.layers.Conv2D(3, 3), keras.layers.BatchNormalization(), keras.layers.GlobalAveragePooling2D()]
    model = keras_sequential([8, 8, 3], *layers, keras.layers.Dense(4))
    config = dg.get_keras_data_generation_config(n_iter=2, optimizer=keras.optimizers.Adam, extra_pixels=1)
    images = dg.keras_data_generation_experimental(model, 3, (8, 8), config)
    assert [x.shape for x in images] == [(1, 8, 8, 3)] * 3 and all(isinstance(x, np.ndarray) for x in images)


def test_defaults_are_those_of_mct():
    def defaults(function) -> dict:
        return {k: getattr(p.default, "name", p.default) for k, p in inspect.signature(function).parameters.items()}

    torchs, kerass = map(defaults, (dg.get_pytorch_data_generation_config, dg.get_keras_data_generation_config))
    assert (torchs["n_iter"], torchs["initial_lr"], torchs["output_loss_multiplier"]) == (500, 16, 1e-5)
    assert (torchs["image_granularity"], kerass["image_granularity"]) == ("AllImages", "BatchWise")
    assert (kerass["initial_lr"], kerass["output_loss_multiplier"], kerass["image_clipping"]) == (1, 1e-3, False)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: dg.pytorch_data_generation_experimental(small_cnn(), 1, 8, c()), "at least one BatchNorm layer"),
        (lambda c: dg.pytorch_data_generation_experimental(network(), 1, (8, 8, 8), c()), "height and a width"),
        (lambda c: dg.pytorch_data_generation_experimental(network(), 1, 8, {}), "get_pytorch_data_generation_config"),
        (lambda c: c(layer_weighting_type=dg.BNLayerWeightingType.GRAD).to_generation(), "GRAD"),
        (lambda c: c(output_loss_type="none"), "output_loss_type"),
        (lambda c: c(n_iter=0), "n_iter"),
    ],
)
def test_what_is_wrong_is_named(call, words):
    with pytest.raises(ChipfitError, match=words):
        call(dg.get_pytorch_data_generation_config)


def generated_with(model: nn.Module, **options: object) -> torch.Tensor:
    torch.manual_seed(3)
    config = dg.get_pytorch_data_generation_config(n_iter=3, extra_pixels=0, **options)
    return torch.cat(dg.pytorch_data_generation_experimental(model, 4, 8, config))


def test_statistics_count_of_the_chosen_classes_of_batch_norms():
    """The second batch norm has other statistics; only as a chosen class does it change the images."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.BatchNorm1d(144), nn.Linear(144, 5)
    one = sequential(*layers).eval()
    two = copy.deepcopy(one)
    two[3].running_mean += 3
    none = {"output_loss_type": dg.OutputLossType.NONE}
    first = {"bn_layer_types": [nn.BatchNorm2d], **none}
    assert generated_with(one, **first).equal(generated_with(two, **first))
    assert not generated_with(one, **none).equal(generated_with(two, **none))
    both = {"bn_layer_types": [nn.BatchNorm2d, nn.BatchNorm1d], **none}
    assert generated_with(two, **both).equal(generated_with(two, **none))


def test_the_last_layer_is_that_of_the_chosen_classes():
    spread = {"output_loss_type": dg.OutputLossType.REGULARIZED_MIN_MAX_DIFF, "output_loss_multiplier": 1.0}
    last = generated_with(network(), **spread)
    assert generated_with(network(), last_layer_types=[nn.Linear], **spread).equal(last)
    assert not generated_with(network(), last_layer_types=[nn.Conv2d], **spread).equal(last)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"bn_layer_types": [nn.BatchNorm3d]}, "of these classes. Got: BatchNorm3d. Allowed: BatchNorm2d"),
        ({"bn_layer_types": ["BatchNorm2d"]}, "must be classes. Got: 'BatchNorm2d'"),
        (
            {"last_layer_types": [nn.Conv3d], "output_loss_type": dg.OutputLossType.REGULARIZED_MIN_MAX_DIFF},
            "of these classes. Got: Conv3d. Allowed: layers of Conv2d, Linear",
        ),
    ],
)
def test_classes_that_the_model_lacks_are_named(option: dict[str, object], message: str):
    with pytest.raises(ChipfitError, match=message):
        generated_with(network(), **option)
