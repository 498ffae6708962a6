"""Models train on an accelerator as on the CPU, which waits for it at most once a step."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import chipfit
from chipfit.errors import TrainingError
from chipfit.training import EMA, Distillation, Oscillations, dampening, reestimate
from tests.accelerators import tolerance
from tests.training.small import DATA, LABELS, Net, NormedNet

PLATFORMS = ("ort_cpu", "tflite_int8")


def on_cpu(net, data, platform="ort_cpu", **options):
    """Return a result whose model is on the CPU."""
    return chipfit.quantize(net.eval(), data, platform, progress=False, **options)


@pytest.fixture(scope="module")
def plain():
    return {name: on_cpu(Net(), DATA, name) for name in (*PLATFORMS, "imx500", "nnie")}


@pytest.fixture(scope="module")
def normed():
    return on_cpu(NormedNet(), DATA)


def train(model, device, steps=3, rate=0.01, after=lambda: None, forward=None):
    """Train on a device, and return the losses, which are read at the end."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy((model if forward is None else forward)(DATA[0].to(device)), LABELS.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        after()
    model.eval()
    return torch.stack(losses).cpu()


def run_twice(model, x):
    model(x)
    model(x)


def waits(fake):
    """Return how often a device was awaited."""
    counts = fake.counts()
    return counts["downloads"] + counts["scalars"]


def close(a, b):
    """Check that parameters and buffers agree, up to the order of sums."""
    for name, x in a.state_dict().items():
        y = b.state_dict()[name].cpu()
        assert torch.allclose(x, y, rtol=tolerance(2e-3, 0.05), atol=tolerance(1e-6, 2e-3)), (name, x, y)


ALGORITHMS = [
    ("ort_cpu", "ste"),
    ("ort_cpu", "lsq"),
    ("tflite_int8", "lsq"),
    ("ort_cpu", "lsq_plus"),
    ("ort_cpu", "dsq"),
    ("ort_cpu", "tqt"),
    ("ort_cpu", "dorefa"),
    ("ort_cpu", {"weights": "dorefa", "activations": "pact"}),
    ("ort_cpu", {"weights": "qil"}),
    ("tflite_int8", {"weights": "n2uq"}),
    ("nnie", "nnie_log"),
    ("imx500", {"weights": "lsq", "activations": "lsq"}),
]


@pytest.mark.parametrize(("platform", "algorithm"), ALGORITHMS)
def test_every_algorithm_trains_and_is_deployed_as_on_the_cpu(platform, algorithm, plain, accelerator):
    here, there = plain[platform].trains(algorithm), plain[platform].trains(algorithm)
    there.model.to(accelerator)
    assert torch.allclose(train(here.model, "cpu"), train(there.model, accelerator), rtol=1e-3)
    close(here.model, there.model)
    a, b = here.trained(), there.trained()
    for name, t in a.plan.tensors.items():
        if t.stored is not None:
            assert torch.allclose(t.stored.scale, b.plan[name].scale, rtol=tolerance(2e-3, 0.2)), name
    for name, w in a.graph.weights.items():
        assert torch.allclose(w, b.graph.weights[name], atol=tolerance(1e-5, 2e-3)), name
    x = DATA[1].to(accelerator)
    assert torch.allclose(there.model(x), b.model.to(accelerator)(x), atol=1e-5)


@pytest.mark.parametrize("bn_fold", [1, 2, 3, 4])
def test_batch_norms_fold_there(bn_fold, normed, accelerator):
    training = {"weights": "lsq", "bn_fold": bn_fold}
    here, there = normed.trains(training), normed.trains(training)
    there.model.to(accelerator)
    train(here.model, "cpu"), train(there.model, accelerator)
    close(here.model, there.model)
    for result, device in ((here, "cpu"), (there, accelerator)):
        reestimate(result, [x.to(device) for x in DATA])
    close(here.model, there.model)
    there.trained()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_step_waits_at_most_once_however_many_layers_there_are(platform, fake):
    def net(layers):
        torch.manual_seed(0)
        return nn.Sequential(*(m for _ in range(layers) for m in (nn.Conv2d(3, 3, 1), nn.ReLU())), nn.Flatten())

    for layers in (2, 8):
        result = on_cpu(net(layers), DATA, platform, training="lsq")
        model = result.model.to("fakegpu").train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-4)
        average, x = EMA(model), DATA[0].to("fakegpu")
        for k in range(3):
            fake.reset()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            average.step()
            if k:
                assert waits(fake) <= 1 and fake.counts()["uploads"] == 0


def test_oscillations_and_dampening_wait_no_more_than_a_step(plain, fake):
    result = plain["ort_cpu"].trains("lsq")
    model = result.model.to("fakegpu")
    seen = Oscillations(model, threshold=0.5)
    found = []

    def after():
        seen.step()
        dampening(model)
        found.append(waits(fake))
        fake.reset()

    fake.reset()
    train(model, "fakegpu", after=after, rate=1e-6)
    assert max(found[1:]) <= 1
    assert seen.frozen["body.weight"].device.type == "fakegpu"


def test_numbers_that_are_none_end_training_with_the_step_that_made_them(plain, accelerator):
    """Nothing waits for the device where no bound may be violated: the error comes a step later and names the step."""
    model = plain["ort_cpu"].trains("ste").model.to(accelerator).train()
    model(DATA[0].to(accelerator))
    with torch.no_grad():
        model.weight("body.weight")[0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"step 2 of training, 'body.weight' holds NaN.*Where: body"):
        run_twice(model, DATA[0].to(accelerator))
    copy.deepcopy(model).to("cpu")


def test_numbers_of_the_last_step_are_checked_too(plain, accelerator):
    model = plain["ort_cpu"].trains("ste").model.to(accelerator).train()
    with torch.no_grad():
        model.weight("body.weight")[0, 0] = float("inf")
    model(DATA[0].to(accelerator))
    with pytest.raises(TrainingError, match=r"step 1 of training, 'body.weight' holds NaN"):
        model.eval()


def test_checkpoints_move_between_devices(plain, accelerator, tmp_path):
    here, there = plain["ort_cpu"].trains("lsq"), plain["ort_cpu"].trains("lsq")
    average = EMA(there.model.to(accelerator))
    train(there.model, accelerator, after=average.step)
    torch.save({"model": there.model.state_dict(), "ema": average.state_dict()}, tmp_path / "checkpoint")
    on_cpu, on_device = (torch.load(tmp_path / "checkpoint", map_location=d) for d in ("cpu", accelerator))
    here.model.load_state_dict(on_cpu["model"])
    EMA(here.model).load_state_dict(on_cpu["ema"])
    close(here.model, there.model)
    here.model.load_state_dict(on_device["model"])  # copied across devices
    assert next(here.model.parameters()).device.type == "cpu"
    there.model.load_state_dict(on_cpu["model"])
    x = DATA[1]
    assert torch.allclose(here.model(x), there.model(x.to(accelerator)).cpu(), atol=1e-5)


def test_autocast_gradient_checkpointing_and_compilation_work_there(plain, accelerator):
    with torch.autocast(accelerator.type, torch.bfloat16):
        losses = train(plain["ort_cpu"].trains("lsq").model.to(accelerator), accelerator)
    assert losses.isfinite().all()
    one, parts = (plain["ort_cpu"].trains("lsq").model.to(accelerator) for _ in range(2))
    parts.segments = 3
    assert torch.allclose(train(one, accelerator), train(parts, accelerator), rtol=1e-3)
    eager, compiled = (plain["ort_cpu"].trains("lsq").model.to(accelerator) for _ in range(2))
    step = torch.compile(compiled, backend="eager")
    expected, found = train(eager, accelerator), train(compiled, accelerator, forward=step)
    assert torch.allclose(expected, found, rtol=1e-3)


def test_a_teacher_follows_the_student(plain, accelerator):
    losses = []
    for device in ("cpu", accelerator):
        result = plain["ort_cpu"].trains("lsq")
        both = Distillation(result, temperature=2.0).to(device).train()
        _, loss = both(DATA[0].to(device))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=tolerance(0, 1e-6))


def test_bounds_on_sums_hold_there(accelerator):
    """65,536 inputs of a layer whose accumulator is narrow: the sum of codes is bounded."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(70_000, 2, bias=False))
    data = [torch.randn(2, 70_000, 1) for _ in range(2)]
    result = on_cpu(net, data, "ethos_u", training={"weights": "lsq"})
    model = result.model.to(accelerator).train()
    for _ in range(2):
        model(data[0].to(accelerator)).square().mean().backward()
    result.trained()
