"""Statistics estimated again are those of torch's own `update_bn` on the network with rounded weights."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from chipfit.errors import DataError, UnsupportedError
from chipfit.training import reestimate
from tests.build import quantized
from tests.training.small import DATA, NormedNet, set_share, train


@pytest.fixture(scope="module")
def plain():
    return quantized(NormedNet(), DATA)


def rounded(model):
    """The user's network with the weights that the model rounds, as torch computes it."""
    net = NormedNet()
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("quant")}
    net.load_state_dict(state, strict=False)
    for layer, bn in (("stem", "bn1"), ("body", "bn2"), ("up", "bn3"), ("fc", "bn4")):
        norm = model.normalized_layer(f"{layer}.weight").norm
        k = norm.gamma / torch.sqrt(norm.var + norm.eps)
        k = torch.where(k == 0, 1 / torch.sqrt(norm.var + norm.eps), k)
        shape = (1, -1, 1, 1) if layer == "up" else (-1, *[1] * (model.weight(f"{layer}.weight").dim() - 1))
        w = model.weight(f"{layer}.weight")
        if f"{layer}.weight" in model._rounded:
            w = model.quantizer_of(f"{layer}.weight")(w * k.reshape(shape)) / k.reshape(shape)
        getattr(net, layer).weight.data.copy_(w)
        assert getattr(net, bn).momentum == 0.1
    return net


@pytest.mark.parametrize("bn_fold", [1, 2, 3, 4])
def test_it_is_what_torch_does(bn_fold, plain):
    result = plain.trains({"weights": "lsq", "bn_fold": bn_fold, "bn_momentum": 0.01})
    model = result.model
    train(model, 4, 0.2)
    own = {k: v.clone() for k, v in model.state_dict().items()}
    net = rounded(model)
    update_bn(DATA, net)
    for m in model._quant.children():
        if getattr(m, "tensor", "") not in model._rounded or "weight" not in m.tensor:
            m.share = 0.0  # torch rounds no activations
    reestimate(result, DATA)
    set_share(model, 1.0)
    for k in range(1, 5):
        for name in (f"bn{k}.running_mean", f"bn{k}.running_var"):
            torch.testing.assert_close(model.weight(name), net.state_dict()[name], rtol=1e-4, atol=1e-5)
            assert not torch.allclose(model.weight(name), own[name], rtol=1e-3)
    others = {k: v for k, v in model.state_dict().items() if "running" not in k}
    assert all(torch.equal(v, own[k]) for k, v in others.items())
    assert model.bn_fold == bn_fold and not model.training
    assert result.trained().verify([2 * DATA[1]]).exact


def test_what_cannot_be_estimated_is_refused_and_changes_nothing(plain):
    with pytest.raises(UnsupportedError, match="No batch norm of this model trains"):
        reestimate(plain.trains("lsq"), DATA)
    result = plain.trains({"method": "lsq", "bn_fold": 4})
    before = {k: v.clone() for k, v in result.model.state_dict().items()}
    with pytest.raises(DataError, match="no batch"):
        reestimate(result, [])
    with pytest.raises(DataError, match="more than one number"):
        reestimate(result, [DATA[0], DATA[0][:1]])
    assert all(torch.equal(v, before[k]) for k, v in result.model.state_dict().items())
    assert result.model.bn_momentum == 0.1 and not result.model.training
    assert isinstance(result.model, nn.Module)
