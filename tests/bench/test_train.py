"""Training: learning rates, averages, checkpoints, and exact resumption."""

import math

import pytest
import torch
import yaml
from torch import nn

from chipfit.bench import data
from chipfit.bench.config import Rates, load, of
from chipfit.bench.run import calibrated_copy
from chipfit.bench.train import WorkerProcess, rate, train
from chipfit.errors import ConfigError, TrainingError
from tests.bench.tiny import config, net, quiet


class Interrupted(Exception):
    """A simulated crash."""


def start(asked):
    """Return a calibrated network and its data."""
    torch.manual_seed(0)
    sets = data.load(asked.data)
    return calibrated_copy(asked, net().eval(), sets), sets


def linear():
    """Return a linear classifier, without batch norms."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 10))


def trained(asked, folder, model=None, report=quiet):
    """Train a model, or a new calibrated network, and return it with its curves."""
    model, sets = start(asked) if model is None else (model, data.load(asked.data))
    return train(model, asked, sets, WorkerProcess(), folder, report)


def test_the_rate_rises_linearly_and_falls_by_a_cosine():
    rates = Rates(base_lr=0.004, warmup_lr=1e-4, warmup_steps=2500, max_iter=250_000)  # ResNet-18's
    assert rate(0, rates) == 1e-4 and rate(1250, rates) == pytest.approx((1e-4 + 0.004) / 2)
    assert rate(2500, rates) == 0.004 and rate(126_250, rates) == pytest.approx(0.002)
    assert rate(249_999, rates) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    "over",
    [
        {"ema": {"enable": True, "kwargs": {"decay": 0.9}}},
        {"dist": {"amp": True, "accumulate": 2}, "optimizer": {"type": "AdamW", "kwargs": {"weight_decay": 0.1}}},
        {"backend": "academic", "bnfold": None, "freeze_step": 6, "optimizer": {"no_wd": True}},
    ],
)
def test_an_interruption_changes_no_bit(tmp_path, over):
    asked = of(config(**over))
    whole, curves = trained(asked, tmp_path / "whole")

    def dies(text):
        if text.startswith("step 9"):
            raise Interrupted

    with pytest.raises(Interrupted):
        trained(asked, tmp_path / "other", report=dies)
    torch.manual_seed(99)
    model, _ = start(asked)
    for p in model.parameters():
        p.data.zero_()  # whatever a new process has made of them
    again, others = trained(asked, tmp_path / "other", model)
    assert others.loss[-4:] == curves.loss[-4:] and others.top1 == curves.top1
    for (name, a), (_, b) in zip(whole.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else str(a) == str(b), name


def test_configuration_and_seed_determine_the_losses(tmp_path):
    """From the file to the steps: the second time it is read as it was resolved the first time."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config()))
    asked = load(tmp_path / "config.yaml")
    resolved = of({n: v for n, v in asked.resolved.items() if n != "unified"})
    runs = enumerate((asked, resolved, of(config(seed=5))))
    losses = [trained(again, tmp_path / str(k))[1].loss for k, again in runs]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    assert losses[0] != losses[2]


def test_a_checkpoint_of_another_experiment_is_refused(tmp_path):
    asked = of(config())
    trained(asked, tmp_path)
    with pytest.raises(ConfigError, match="checkpoint cannot be read"):
        trained(asked, tmp_path, linear())
    (tmp_path / "checkpoint.pt").write_bytes(b"half")
    with pytest.raises(ConfigError, match="remove it"):
        trained(asked, tmp_path)


def test_accumulated_gradients_give_the_step_of_one_large_batch(tmp_path):
    """Without batch norms and with plain descent."""
    weights = []
    for size, often in ((100, 1), (50, 2)):
        rates = {"kwargs": {"base_lr": 0.1, "max_iter": 1}}
        sgd = {"kwargs": {"momentum": 0.0, "nesterov": False}}
        over = {"data": {**config()["data"], "batch_size": size}, "dist": {"accumulate": often}}
        asked = of(config(lr_scheduler=rates, optimizer=sgd, **over))
        model, _ = trained(asked, tmp_path / str(size), linear())
        weights.append(model[1].weight.detach())
    assert torch.allclose(*weights, atol=1e-6) and not torch.equal(weights[0], linear()[1].weight)


def test_mixed_precision_computes_in_bfloat16_and_keeps_weights_in_float(tmp_path):
    losses = []
    for amp in (False, True):
        asked, seen = of(config(dist={"amp": amp})), set()
        model, sets = start(asked)
        model.register_forward_hook(lambda m, x, y, to=seen: to.add((m.training, y.dtype)))
        model, curves = train(model, asked, sets, WorkerProcess(), tmp_path / str(amp), quiet)
        losses.append(curves.loss)
        assert (True, torch.bfloat16 if amp else torch.float32) in seen and (False, torch.float32) in seen
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert losses[0] != losses[1] and losses[0][-1][1] == pytest.approx(losses[1][-1][1], abs=0.1)


def test_no_wd_exempts_parameters_with_one_axis(tmp_path):
    for no_wd in (False, True):  # from a rate of nothing but decay: gradients are 0 where the images are
        optimizer = {"kwargs": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.5}, "no_wd": no_wd}
        asked = of(config(optimizer=optimizer, lr_scheduler={"kwargs": {"base_lr": 1.0, "max_iter": 1}}))
        model = linear()
        with torch.no_grad():
            model[1].weight.zero_()
            model[1].bias.fill_(100.0)  # all classes alike: softmax is even, its gradients are below 1
        model, _ = trained(asked, tmp_path / str(no_wd), model)
        assert model[1].bias.detach().mean() == pytest.approx(100.0 if no_wd else 50.0, abs=1e-4)


def test_save_many_keeps_every_checkpoint(tmp_path):
    asked = of(config(saver={"val_freq": 4, "save_many": True}))
    trained(asked, tmp_path)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == [f"step-{k}.pt" for k in (12, 4, 8)]


def test_synchronized_batch_norms_that_fold_are_refused(tmp_path):
    asked = of(config(dist={"sync": True}))
    with pytest.raises(ConfigError, match="dist.sync is not supported here.*batch norms that fold"):
        trained(asked, tmp_path)


def test_the_moving_average_is_returned(tmp_path):
    """For a bias with gradient g in each of two steps at rate 1: b1 = b - g1, b2 = b1 - g2; mean 0.5 b1 + 0.5 b2."""
    sgd = {"kwargs": {"momentum": 0.0, "nesterov": False}}
    over = {"optimizer": sgd, "lr_scheduler": {"kwargs": {"base_lr": 1.0, "min_lr": 1.0, "max_iter": 2}}}
    results = []
    for ema in (False, True):
        asked = of(config(ema={"enable": ema, "kwargs": {"decay": 0.5}}, saver={"val_freq": 9}, **over))
        model = linear()
        seen = []
        if not ema:
            model[1].bias.register_hook(lambda g, m=model, to=seen: to.append(m[1].bias.detach().clone()))
        out, _ = trained(asked, tmp_path / str(ema), model)
        results.append((out[1].bias.detach(), seen))
    (last, seen), (mean, _) = results
    assert torch.allclose(mean, 0.5 * seen[1] + 0.5 * last, atol=1e-6) and not torch.equal(mean, last)


def test_statistics_are_frozen_at_freeze_step(tmp_path):
    asked = of(config(freeze_step=4, backend="academic", bnfold=None))
    model, _ = start(asked)
    seen = []
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    norm.register_forward_hook(lambda m, *_: seen.append((m.training, m.running_mean.clone())))
    trained(asked, tmp_path, model)
    means = [mean for training, mean in seen if training]
    assert len(means) == 4 and torch.equal(norm.running_mean, means[-1])


def test_an_infinite_loss_stops_training_and_names_the_step(tmp_path):
    asked = of(config(lr_scheduler={"kwargs": {"base_lr": 1e3, "warmup_lr": 1e3, "max_iter": 12}}))
    model = linear()
    model[1].weight.data.fill_(math.inf)
    with pytest.raises(TrainingError, match="step 0"):
        trained(asked, tmp_path, model)


def test_invalid_optimizer_options_and_too_few_images_are_refused(tmp_path):
    model = linear()
    asked = of(config(optimizer={"type": "Adam", "kwargs": {"nesterov": True}}))
    with pytest.raises(ConfigError, match=r"optimizer.kwargs"):
        trained(asked, tmp_path, model)
    asked = of(config(data={**config()["data"], "batch_size": 500}))
    with pytest.raises(ConfigError, match="do not fill one step.*at least 500"):
        trained(asked, tmp_path, model)
