"""Quantizer classes of users in whole models: training, deployment, and their errors."""

import copy

import pytest
import torch
from torch import nn

from chipfit import trainable_infrastructure as ti
from chipfit.errors import UnsupportedError
from chipfit.plan.training import Training
from chipfit.target_platform import QuantizationMethod
from chipfit.trainable_infrastructure import pytorch_inferable_quantizers as iq
from tests.build import model_of, platform_of, quantized
from tests.mct.trainable.quantizers_of_a_user import OurActivations, OurWeights
from tests.training.small import DATA, train

CONV_RELU = {"chain": [["@conv", "Add"], ["Relu"]], "src": ["M"], "conf": "D"}
ARITHMETIC = {"kernels": "onnxruntime", "q_round": "half_even", "acc": [{"bits": 32}]}


def chip(w_range):
    """Return a platform of symmetric grids with weights of 4 bits."""
    grids = {"a8": {"bits": 8, "zero": 0, "signed": "auto"}, "b32": {"bits": 32, "per": "channel"}}
    grids["w4"] = {"bits": 4, "range": w_range, "per": "channel"}
    bias = {"mono": {"b": 1, "in0": -1, "w": -1}, "eq": 1}
    return platform_of(
        {"match": ["@conv", "Linear"], "use": [{"in": "a8", "w": "w4", "b": "b32", "out": "a8"}], "rules": [bias]},
        {"match": ["Add"], "use": [{"in": "a8", "out": "a8"}], "rules": [{"tie": ["ins", "out"]}]},
        {"match": ["@move"], "exec": "follow"},
        formats=grids,
        fuse=[CONV_RELU],
        math=ARITHMETIC | {"requant": {"form": "float", "round": "half_even"}},
        runtimes=["onnxruntime"],
    )


def forward(m, x):
    x = torch.relu(m.stem(x))
    return m.head(torch.flatten(torch.relu(m.body(x) + x), 1))


def net():
    torch.manual_seed(0)
    stem, body = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, groups=6)
    return model_of(forward, stem=stem, body=body, head=nn.Linear(6 * 64, 5))


@pytest.fixture(scope="module", params=["full", "narrow"])
def plain(request):
    return quantized(net(), DATA, chip(request.param))


def test_a_users_quantizers_train_a_model_that_is_exact_on_the_device(plain):
    result = plain.trains(Training(weights=OurWeights, activations=OurActivations.hosted()))
    model = result.model
    hosted = [n for n, _ in model.named_parameters() if n.endswith("_threshold")]
    tensors = [n for n, t in plain.plan.tensors.items() if t.quantized and t.role != "bias"]
    assert len(hosted) == len({id(model.quantizer_of(n)) for n in tensors})
    before = {n: model.get_parameter(n).detach().clone() for n in hosted}
    losses = train(model, 6, 0.02)
    assert losses[-1] < losses[0]
    assert any(not torch.equal(model.get_parameter(n), old) for n, old in before.items())
    twin = copy.deepcopy(model)
    assert torch.equal(twin(DATA[1]), model(DATA[1]))
    after = result.trained()
    learned = model.quantizer_of("stem.weight").algorithm.quantizer.convert2inferable().stored.scale
    assert torch.equal(after.plan["stem.weight"].scale, learned)
    torch.testing.assert_close(after.model(DATA[1]), model(DATA[1]))
    assert after.verify([DATA[1]]).exact


def test_wrappers_and_holders_contain_the_users_quantizers(plain):
    model = plain.trains(Training(weights=OurWeights, activations=OurActivations)).model
    wrappers = {n: m for n, m in model.named_modules() if isinstance(m, ti.PytorchQuantizationWrapper)}
    holders = [m for m in model.modules() if isinstance(m, ti.PytorchActivationQuantizationHolder)]
    assert set(wrappers) == {"stem", "body", "head"}
    assert holders and all(isinstance(h.activation_holder_quantizer, OurActivations) for h in holders)
    w = wrappers["head"].get_quantized_weights()["weight"]
    assert w.shape == (5, 384) and all(len(row.unique()) <= 16 for row in w)


def test_learned_rounding_is_deployed():
    """Weights that training rounds down are stored so, where ONNX Runtime adds two products of them in 16 bits."""

    @ti.mark_quantizer(ti.QuantizationTarget.Weights, [QuantizationMethod.SYMMETRIC], "down")
    class Down(OurWeights):
        def __init__(self, quantization_config: ti.TrainableQuantizerWeightsConfig):
            super().__init__(quantization_config)

        def __call__(self, inputs, training):
            step = self.get_quantizer_variable("threshold") / self.levels
            return torch.clamp(torch.floor(inputs / step), -self.levels, self.levels - 1) * step

    result = quantized(net(), DATA).trains({"weights": Down})
    after = result.trained()
    plan = after.plan["head.weight"]
    stored = plan.quantize(after.graph.weights["head.weight"]).float()
    expected = torch.floor(result.graph.weights["head.weight"] / plan.scale[:, None]).clamp(plan.grid.qmin, 127)
    pairs, found = expected.reshape(-1, 2), stored.reshape(-1, 2)
    fits = (pairs.prod(1) <= 0) | (pairs.sum(1).abs() <= 128)
    assert torch.equal(found[fits], pairs[fits]) and fits.float().mean() > 0.9
    assert bool((found[~fits].sum(1).abs() == 128).all())
    assert after.verify([DATA[1]]).exact


class OtherGrid(OurWeights):
    def convert2inferable(self):
        return iq.WeightsSymmetricInferableQuantizer(7, [1.0], False)


class OffTheGrid(OurWeights):
    def __call__(self, inputs, training):
        return super().__call__(inputs, training) * 1.5 + 0.001


class OtherShape(OurWeights):
    def __call__(self, inputs, training):
        return inputs.flatten()


@pytest.mark.parametrize(
    ("cls", "says"), [(OtherGrid, "of another grid"), (OffTheGrid, "off the grid"), (OtherShape, "another shape")]
)
def test_a_quantizer_that_contradicts_its_inferable_form_is_refused(cls, says, plain):
    marked = ti.mark_quantizer(ti.QuantizationTarget.Weights, [QuantizationMethod.SYMMETRIC], cls.__name__)(cls)
    result = plain.trains({"weights": marked})
    with pytest.raises(UnsupportedError, match=says):
        result.model(DATA[0]) if cls is OtherShape else result.trained()


def test_an_activation_quantizer_that_differs_from_its_inferable_form_is_refused(plain):
    @ti.mark_quantizer(ti.QuantizationTarget.Activation, [QuantizationMethod.SYMMETRIC], "wider")
    class Wider(OurActivations):
        def __init__(self, quantization_config: ti.TrainableQuantizerActivationConfig):
            super().__init__(quantization_config)

        def __call__(self, inputs, training):
            return super().__call__(inputs / 2, training) * 2

    says = r"Wider rounds differently from its inferable quantizer, -?[\d.]+ to -?[\d.]+ in place of"
    with pytest.raises(UnsupportedError, match=says):
        plain.trains({"activations": Wider}).trained()


def test_a_class_without_the_method_of_a_tensor_is_refused_by_name(plain):
    result = quantized(net(), DATA)  # affine activations
    says = "none of OurActivations quantizes activations of QuantizationMethod.UNIFORM"
    with pytest.raises(UnsupportedError, match=says):
        result.trains({"activations": OurActivations})
