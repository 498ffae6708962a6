"""Models in a hardware setting train and are deployed on an accelerator as on the CPU."""

import copy

import pytest
import torch
from torch import nn

import chipfit
from chipfit import quantize_fx as fx
from chipfit.errors import DataError, TrainingError
from tests.accelerators import chosen, tolerance
from tests.training.small import DATA, LABELS, Net


def prepared(device, method="lsq", net=None, **options):
    settings = {**fx.get_backend_params("tensorrt"), **options}
    net = copy.deepcopy(net or Net()).eval().to(device)
    return fx.prepare_qat_fx(net, {"": fx.get_qconfig(method, method, 8, **settings)})


def train(model, device, after=lambda k: None):
    optimizer = torch.optim.SGD(model.train().parameters(), 0.01)
    for k in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(DATA[k % 3].to(device)), LABELS.to(device)).backward()
        optimizer.step()
        after(k)
    return model.eval()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("lsq", {}),
        ("ema", {}),
        ("dorefa", {}),
        ("lsq_plus", {}),
        ("quantile", {}),
        ("lsq", {"w_observer": "MSE", "a_observer": "KL"}),
        ("lsq", {"w_observer": "ClipStd", "a_observer": "BatchMeanMax", "bnfold": 4}),
    ],
)
def test_every_method_trains_and_is_deployed_there(method, options, accelerator):
    here, there = prepared("cpu", method, **options), prepared(accelerator, method, **options)
    train(here, "cpu"), train(there, accelerator)
    for name, x in here.state_dict().items() if chosen.fake else ():  # training soon parts where sums differ
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            assert torch.allclose(x, there.state_dict()[name].cpu(), rtol=1e-3, atol=1e-5), name
    x = DATA[0].to(accelerator)
    result = chipfit.quantize_fx.deploy(there, [x.to(accelerator) for x in DATA], "tensorrt")
    assert next(result.model.parameters()).device == accelerator
    expected = fx.deploy(here, DATA, "tensorrt").model(DATA[0])
    assert torch.allclose(result.model(x).cpu(), expected, atol=tolerance(2e-2, 0.1))


@pytest.mark.parametrize("method", ["lsq", "ema"])
def test_a_step_waits_at_most_once_however_many_layers_there_are(method, fake):
    for layers in (2, 8):
        net = nn.Sequential(*(m for _ in range(layers) for m in (nn.Conv2d(3, 3, 1), nn.ReLU())), nn.Conv2d(3, 5, 8))
        model = prepared("fakegpu", method, nn.Sequential(net, nn.Flatten()))
        found = []

        def after(_, found=found):
            counts = fake.counts()
            found.append(counts["downloads"] + counts["scalars"])
            fake.reset()

        train(model, "fakegpu", after)
        assert max(found[1:]) <= 1


def calibrated(device, **quantizers):
    """Return a model of `prepare_by_platform` whose quantizers have observed data."""
    qscheme = {"bit": 4, "symmetry": True, "per_channel": True, "pot_scale": False}
    setting = {"w_observer": "MSEObserver", "a_observer": "EMAMSEObserver", **quantizers}
    setting |= {"w_qscheme": qscheme, "a_qscheme": {**qscheme, "per_channel": False}}
    net = copy.deepcopy(Net()).eval().to(device)
    model = fx.prepare_by_platform(net, fx.BackendType.Academic, {"extra_qconfig_dict": setting}).eval()
    fx.enable_calibration(model)
    with torch.no_grad():
        run(model, DATA, device)
    fx.enable_quantization(model)
    return model


LSQ = {"w_fakequantize": "FixedFakeQuantize", "a_fakequantize": "LearnableFakeQuantize"}


@pytest.mark.parametrize("place", ["there", "here"])
@pytest.mark.parametrize("kind", ["interaction", "standalone"])
def test_profiles_are_those_of_the_cpu_wherever_the_data_are(kind, place, accelerator):
    data = [x.to(accelerator) for x in DATA] if place == "there" else DATA
    found, want = (fx.profiling(calibrated(d, **LSQ), x, kind) for d, x in ((accelerator, data), ("cpu", DATA)))
    assert found == pytest.approx(want, abs=1e-3) and found.keys() == want.keys()


@pytest.mark.parametrize("place", ["there", "here"])
def test_rounding_is_learned_there_wherever_the_data_are(place, accelerator):
    data = [x.to(accelerator) for x in DATA] if place == "there" else DATA
    learned = {"w_fakequantize": "AdaRoundFakeQuantize", "a_fakequantize": "QDropFakeQuantize"}
    options = {"pattern": "block", "max_count": 4, "prob": 1.0, "warm_up": 0.2, "weight": 0.01, "b_range": [20, 2]}
    models = []
    for device, given in ((accelerator, data), ("cpu", DATA)):
        model = calibrated(device, **learned)
        torch.manual_seed(0)
        models.append(fx.ptq_reconstruction(model, given, {**options, "scale_lr": 4e-5}))
    for found, want in zip(*(m.parameters() for m in models), strict=True):
        assert found.device == accelerator
        torch.testing.assert_close(found.cpu(), want, rtol=0, atol=1e-2)


def test_platforms_of_a_model_there_are_those_of_the_cpu(accelerator):
    there, here = (fx.platforms_of(calibrated(d, **LSQ), DATA[0].to(d)) for d in (accelerator, "cpu"))
    assert there == here
    assert fx.platforms_of(prepared(accelerator), DATA[0]) == fx.platforms_of(prepared("cpu"), DATA[0].to(accelerator))


def run(model, batches, device):
    for x in batches:
        model(x.to(device))


@pytest.mark.parametrize("method", ["lsq", "ema"])
def test_nan_in_a_batch_that_is_observed_is_reported(method, accelerator):
    model = prepared(accelerator, method).train()
    batch = DATA[0].clone()
    batch[0, 0, 0, 0] = torch.nan
    with pytest.raises((TrainingError, DataError), match=r"In step 2 .* nan|Batch 1"):
        run(model, (batch, DATA[1], DATA[2]), accelerator)
