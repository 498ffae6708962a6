"""Calibration data that a network's batch norms describe."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit import Generation
from chipfit.errors import ChipfitError, ConfigError, DataError
from tests.build import keras_sequential, model_of, quantized, randn, sequential, small_cnn

SHORT = Generation(steps=30, batch=16)
#: what sizes an image has; its values do not matter
EXAMPLE = torch.zeros(2, 3, 8, 8)


def learned(model: nn.Module, data: torch.Tensor) -> nn.Module:
    """Return a model whose batch norms know the statistics of data, as torch itself measures them."""
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.momentum = 1.0
    with torch.no_grad():
        model.train()(data)
    return model.eval()


def network(scale: float = 1.0) -> nn.Module:
    """Return a small network whose batch norms know smooth images around 0.3, times `scale`."""
    wide = torch.nn.functional.interpolate(randn(64, 3, 4, 4), size=(8, 8), mode="bilinear")
    return learned(small_cnn(norm=True), scale * (wide * 0.5 + 0.3))


def distance(model: nn.Module, data: torch.Tensor) -> float:
    """Return how far the statistics of data are from the learned ones [root mean square, in deviations]."""
    own = {k: v.clone() for k, v in model.state_dict().items()}
    other = learned(model, data).state_dict()
    apart = []
    for k in own:
        if k.endswith("running_mean"):
            variance = k.replace("mean", "var")
            apart.append((other[k] - own[k]) / own[variance].sqrt())
            apart.append((other[variance] / own[variance]).sqrt() - 1)
    model.load_state_dict(own)
    return float(torch.cat(apart).square().mean().sqrt())


def made(model: nn.Module, n: int = 16, options: Generation = SHORT, **more) -> torch.Tensor:
    return torch.cat(chipfit.generated(model, n, **{"example": EXAMPLE, "progress": False, **more}, options=options))


def test_generated_images_have_the_statistics_that_batch_norms_learned():
    model = network()
    assert distance(model, made(model)) < 0.1 < 0.3 < distance(model, randn(16, 3, 8, 8))


@pytest.mark.parametrize(
    "options",
    [
        {"statistics": "all", "batch": 4},
        {"distance": "absolute"},
        {"schedule": "plateau_with_reset", "start": "diverse"},
        {"output": "regularized_spread", "output_weight": 1e-4},
        {"extra_pixels": (2, 3), "first_weight": 10.0, "optimizer": torch.optim.RAdam, "rate": 0.5},
    ],
    ids=str,
)
def test_every_form_of_the_loss_brings_statistics_nearer_than_noise(options):
    model = network()
    images = made(model, options=Generation(**{"steps": 40, "batch": 16, **options}))
    assert images.shape == (16, 3, 8, 8) and distance(model, images) < 0.6 * distance(model, randn(16, 3, 8, 8))


def test_statistics_of_each_image_make_images_alike():
    images = made(network(), options=Generation(steps=30, statistics="image"))
    assert images.mean((2, 3)).std(0).max() < 0.5 * made(network()).mean((2, 3)).std(0).max()


def test_the_output_term_spreads_the_scores():
    model = network()
    spreads = []
    for output in ("none", "spread"):
        with torch.no_grad():
            scores = model(made(model, options=Generation(steps=20, output=output, output_weight=0.1)))
        spreads.append(float((scores.amax(1) - scores.amin(1)).mean()))
    assert spreads[1] > 1.2 * spreads[0]


def test_the_same_seed_makes_the_same_images():
    model = network()
    first, again, other = (made(model, seed=s) for s in (5, 5, 6))
    assert first.equal(again) and not first.equal(other)


def test_inputs_of_pixels_from_0_to_255_are_found():
    images = made(network(scale=128.0))
    assert 20 < images.mean() < 60 and distance(network(scale=128.0), images) < 0.2


def test_images_keep_bounds_of_each_channel():
    low, high = [-0.5, -0.4, 0.0], [0.5, 1.0, 0.6]
    images = made(network(), options=Generation(steps=5, bounds=(low, high)))
    assert images.amin((0, 2, 3)).ge(torch.tensor(low)).all() and images.amax((0, 2, 3)).le(torch.tensor(high)).all()


def test_models_of_vectors_and_of_several_inputs_are_served():
    vectors = learned(sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), randn(64, 6) + 2)
    assert made(vectors, example=torch.zeros(2, 6)).mean() > 0.5

    def forward(m, x, y):
        return m.norm(m.conv(x) * y[:, :, None, None])

    two = model_of(forward, conv=nn.Conv2d(3, 4, 1), norm=nn.BatchNorm2d(4)).eval()
    batches = chipfit.generated(two, 6, example=(EXAMPLE, torch.zeros(2, 4)), options=SHORT, progress=False)
    assert [tuple(x.shape) for x in batches[0]] == [(6, 3, 8, 8), (6, 4)]
    assert quantized(two, batches).verify(batches).differing == 0


def test_inputs_have_the_structure_of_the_models_call():
    def forward(m, inputs):
        return m.norm(inputs["image"]) * inputs["mask"]

    model, example = model_of(forward, norm=nn.BatchNorm2d(3)), {"image": EXAMPLE, "mask": torch.zeros(2, 1, 8, 8)}
    data = chipfit.generated(model.eval(), 4, example=[example], options=SHORT, progress=False)
    assert {k: tuple(x.shape) for k, x in data[0].items()} == {"image": (4, 3, 8, 8), "mask": (4, 1, 8, 8)}
    assert data.notes[0] in quantized(model, data).plan.rewrites


def test_a_plan_warns_that_its_data_were_generated():
    model = network()
    data = chipfit.generated(model, 24, example=EXAMPLE, options=SHORT, progress=False)
    assert [len(b) for b in data] == [16, 8]
    warnings = [n for n in quantized(model, data[1:]).plan.rewrites if n.startswith("warning: ")]
    assert "24 inputs generated from 2 batch norms (30 steps)" in warnings[0] and "accuracy" in warnings[0]


def test_statistics_of_an_untrained_network_are_named():
    data = chipfit.generated(small_cnn(norm=True), 4, example=EXAMPLE, options=Generation(steps=1), progress=False)
    assert "untrained network" in data.notes[0]


def test_keras_models_give_the_images_of_their_torch_twin():
    import keras  # noqa: TID251

    layers = [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(epsilon=1e-5), keras.layers.ReLU()]
    model = keras_sequential([8, 8, 3], *layers, keras.layers.Flatten(), keras.layers.Dense(3))
    twin = sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    twin = learned(twin, randn(64, 3, 8, 8) * 0.5 + 0.3)
    weight, bias, *norm = (twin.state_dict()[k] for k in twin.state_dict() if "tracked" not in k)
    model.layers[1].set_weights([weight.permute(2, 3, 1, 0).numpy(), bias.numpy()])
    model.layers[2].set_weights([t.numpy() for t in norm])
    data = chipfit.generated(model, 8, options=SHORT, progress=False)
    assert [tuple(batch.shape) for batch in data] == [(8, 8, 8, 3)]
    torch.testing.assert_close(data[0].permute(0, 3, 1, 2), made(twin, 8), rtol=1e-3, atol=1e-3)
    assert data.notes[0] in quantized(model, data, "tflite_int8").plan.rewrites


def test_the_callers_switches_and_generators_are_left_alone():
    model = network()
    before = torch.get_rng_state()
    with torch.inference_mode():
        made(model, 2, options=Generation(steps=1))
    assert torch.get_rng_state().equal(before) and all(p.grad is None for p in model.parameters())


def test_sizes_that_a_model_itself_tells_are_used():
    model = network()
    model.default_cfg = {"input_size": (3, 8, 8)}  # as models of timm have it
    assert made(model, 2, example=None).shape == (2, 3, 8, 8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: made(small_cnn()), r"at least one BatchNorm layer.*no batch norm.*real calibration data"),
        (lambda: made(network(), example=None), r"the shape of the inputs is unknown.*example=torch.zeros"),
        (lambda: made(network(), options=Generation(steps=3, rate=1e25)), "diverged.*lower learning rate"),
        (lambda: made(network(), 0), r"whole number above 0.*Got: 0"),
        (lambda: made(network(), options={"steps": 3}), r"'options' must be a .*Generation. Got: dict"),
        (lambda: Generation(steps=0), "steps"),
        (lambda: Generation(step=3), "step.*Try: 'steps'"),
        (lambda: Generation(output="max"), "output"),
    ],
)
def test_what_cannot_be_generated_is_refused(call, words):
    with pytest.raises(ChipfitError, match=f"(?s){words}"):
        call()


def test_numbers_of_words_cannot_be_generated():
    model = sequential(nn.Embedding(9, 4), nn.Flatten(), nn.BatchNorm1d(20), nn.Linear(20, 2))
    with pytest.raises(DataError, match=r"Input 'input' cannot be generated.*int64.*floats"):
        made(model.eval(), example=torch.zeros(2, 5, dtype=torch.long))


def test_a_range_that_is_not_understood_is_refused():
    with pytest.raises(ConfigError, match="bounds"):
        Generation(bounds=(0.0,))
