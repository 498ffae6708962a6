"""Structured pruning under MCT's names: one group of channels for a limit that is one group below the whole."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import chipfit as mct
from chipfit.errors import ConfigError, PruningError, UnsupportedError
from chipfit.mct.target_platform.configs import QuantizationConfigOptions
from chipfit.mct.target_platform.model import TargetPlatformModel
from tests.build import randn, sequential


def data():
    yield [randn(4, 3, 8, 8).numpy()]
    yield [randn(4, 3, 8, 8, seed=1).numpy()]


def network(act: nn.Module | None = None) -> nn.Sequential:
    layers = [nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), act or nn.ReLU(), nn.Conv2d(8, 6, 2), nn.Conv2d(6, 2, 3)]
    return sequential(*layers)


def chip(simd: int):
    """Return MCT's default chip with another SIMD width."""
    model = mct.get_target_platform_capabilities("pytorch", "imx500").tp_model
    config = model.default_qco.base.clone_and_edit(simd_size=simd)
    return TargetPlatformModel(QuantizationConfigOptions([config]), name="simd", operator_set=[])


def numbers(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters()) + sum(b.numel() for b in model.buffers() if b.dim())


@pytest.mark.parametrize("simd", [1, 2])
@pytest.mark.parametrize("act", [nn.ReLU(), nn.Softmax(1), nn.PReLU(), nn.PReLU(8)], ids=str)
def test_one_group_of_channels_goes_for_one_parameter(act, simd):
    model = network(act)
    limit = mct.core.ResourceUtilization(weights_memory=(numbers(model) - simd) * 4)
    config = mct.pruning.PruningConfig(num_score_approximations=2)
    small, info = mct.pruning.pytorch_pruning_experimental(model, limit, data, config, chip(simd))
    gone = [a.out_channels - b.out_channels for a, b in ((model[0], small[0]), (model[3], small[3]))]
    assert sorted(gone) == [0, simd]
    mask = info.pruning_masks["0" if gone[0] else "3"]
    assert int((1 - mask).sum()) == simd and set(mask.tolist()) == {0, 1}
    first, kept = (model[0], small[0]) if gone[0] else (model[3], small[3])
    assert torch.equal(kept.weight, first.weight[torch.from_numpy(mask).bool()])
    assert small(randn(2, 3, 8, 8)).shape == model(randn(2, 3, 8, 8)).shape


def test_what_goes_matters_less_than_what_stays():
    model = network()
    limit = mct.core.ResourceUtilization(weights_memory=numbers(model) * 4 * 0.6)
    small, info = mct.pruning.pytorch_pruning_experimental(model, limit, data, target_platform_capabilities=chip(1))
    assert numbers(small) <= 0.6 * numbers(model)
    for layer, mask in info.pruning_masks.items():
        scores, stays = info.importance_scores[layer], mask.astype(bool)
        assert stays.all() or scores[~stays].max() <= scores[stays].min()


def test_scores_are_those_of_the_label_free_hessian():
    """Trace of the Hessian of a channel's weights x squared norm / number of weights, for a net with one output.

    The output is a Gaussian mean: its Fisher information is 2 / E[y^2] dy/dw dy/dw', and dy/dw is the input here.
    """
    model = sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False))
    x = randn(64, 3)
    limit = mct.core.ResourceUtilization()
    config = mct.pruning.PruningConfig(num_score_approximations=64)
    _, info = mct.pruning.pytorch_pruning_experimental(model, limit, lambda: [[x]] * 1, config, chip(1))
    w, v = (layer.weight.detach().double() for layer in model)
    slopes = v[0].square() * x.double().square().sum()  # sum over samples of |dy/dw|^2, of each channel
    want = slopes * w.square().mean(1)
    scores = torch.from_numpy(info.importance_scores["0"]).double()
    ratio = scores / want
    assert float(ratio.max() / ratio.min()) == pytest.approx(1, rel=1e-4)


def test_the_default_chip_removes_whole_instructions():
    model = sequential(nn.Conv2d(3, 96, 3), nn.ReLU(), nn.Conv2d(96, 8, 3))
    limit = mct.core.ResourceUtilization(weights_memory=numbers(model) * 4 * 0.7)
    small, _ = mct.pruning.pytorch_pruning_experimental(model, limit, data)
    assert small[0].out_channels == 64


def test_keras_models_lose_channels_too():
    keras = pytest.importorskip("keras")
    layers = keras.layers
    first, second = layers.Conv2D(8, 1, name="first"), layers.Conv2D(6, 2, name="second")
    model = keras.Sequential([layers.Input((8, 8, 3)), first, layers.BatchNormalization(), layers.ReLU(), second])
    limit = mct.core.ResourceUtilization(weights_memory=(model.count_params() - 1) * 4)
    small, info = mct.pruning.keras_pruning_experimental(
        model, limit, lambda: [[np.float32(randn(4, 8, 8, 3))]], target_platform_capabilities=chip(1)
    )
    assert [type(x) for x in small.layers] == [type(x) for x in keras.Model(model.inputs, model.outputs).layers]
    assert small.get_layer("first").filters == 7 and int(info.pruning_masks["first"].sum()) == 7
    assert small.output_shape == model.output_shape


def test_what_mct_has_not_is_refused():
    limit = mct.core.ResourceUtilization
    prune = mct.pruning.pytorch_pruning_experimental
    with pytest.raises(UnsupportedError, match="no limit on bops"):
        prune(network(), limit(weights_memory=100, bops=5), data)
    with pytest.raises(PruningError, match="limit on parameters cannot be kept"):
        prune(network(), limit(weights_memory=10), data)
    with pytest.raises(ConfigError, match="pruning_config"):
        prune(network(), limit(weights_memory=math.inf), data, "lfh")
    with pytest.raises(ConfigError, match="num_score_approximations"):
        mct.pruning.PruningConfig(num_score_approximations=0)


def test_information_holds_what_it_is_given():
    masks, scores = {"Layer1": np.array([1, 0, 1])}, {"Layer1": np.array([0.5, 0.3, 0.7])}
    info = mct.pruning.PruningInfo(masks, scores)
    assert info.pruning_masks == masks and info.importance_scores == scores
