"""The facades of MCT and the network editor on a device, with representative data there or on the CPU."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit import gptq
from chipfit.core import CoreConfig, DebugConfig, ResourceUtilization
from chipfit.core import network_editor as ne
from chipfit.qat import QATConfig, result_of
from tests.accelerators import moved

IMAGES = torch.randn(2, 8, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    """Return a classifier of images [N, 3, 8, 8] with 4 classes, on the CPU."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(body, nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)).eval()


def generator(device):
    """Return a function that yields lists of one batch on a device."""
    return lambda: iter([[x.to(device)] for x in IMAGES])


def assert_equal_plans(one, other):
    """Check that two results store each tensor with nearly the same scale."""
    assert one.plan.tensors.keys() == other.plan.tensors.keys()
    for name, t in one.plan.tensors.items():
        if t.stored is not None:
            torch.testing.assert_close(other.plan.tensors[name].stored.scale, t.stored.scale, rtol=1e-4, atol=0)


@pytest.fixture(params=["data there", "data on the CPU"])
def data(request, accelerator):
    return generator(accelerator if request.param == "data there" else "cpu")


def test_post_training_quantization_gives_the_plan_of_the_cpu(accelerator, data, tmp_path):
    quantized, found = chipfit.pytorch_post_training_quantization(moved(net(), accelerator), data)
    _, expected = chipfit.pytorch_post_training_quantization(net(), generator("cpu"))
    assert_equal_plans(expected.result, found.result)
    assert quantized(IMAGES[0].to(accelerator)).device == accelerator
    assert found.final_resource_utilization == expected.final_resource_utilization
    assert found.result.export(tmp_path / "m.onnx").exists()


def test_resources_under_limits_are_those_of_the_cpu(accelerator, data):
    limits, config = ResourceUtilization(weights_memory=1500), CoreConfig()
    resources = chipfit.core.pytorch_resource_utilization_data(moved(net(), accelerator), data)
    assert resources == chipfit.core.pytorch_resource_utilization_data(net(), generator("cpu"))
    model = moved(net(), accelerator)
    _, found = chipfit.pytorch_post_training_quantization(model, data, limits, config)
    _, expected = chipfit.pytorch_post_training_quantization(net(), generator("cpu"), limits, config)
    assert found.mixed_precision_cfg.tolist() == expected.mixed_precision_cfg.tolist()


@pytest.mark.filterwarnings("ignore:Learned rounding was not taken")  # two images decide, of an untrained network
def test_learned_rounding_runs_on_the_device(accelerator, data):
    config = gptq.get_pytorch_gptq_config(n_epochs=2)
    quantized, found = gptq.pytorch_gradient_post_training_quantization(
        moved(net(), accelerator), data, gptq_config=config
    )
    assert quantized(IMAGES[0].to(accelerator)).device == accelerator
    assert all(w.device.type == "cpu" for w in found.result.graph.weights.values())


def test_a_model_trains_on_the_device_and_is_finalized(accelerator, data):
    start = chipfit.pytorch_quantization_aware_training_init
    model, _ = start(moved(net(), accelerator), data, qat_config=QATConfig(), target_platform_capabilities="ort_cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model.train()
    for x in IMAGES:
        optimizer.zero_grad()
        model(x.to(accelerator)).square().mean().backward()
        optimizer.step()
    final = chipfit.pytorch_quantization_aware_training_finalize(model.eval())
    assert final(IMAGES[0].to(accelerator)).device == accelerator
    assert result_of(final).verify(list(IMAGES)).exact


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("float_there", [True, False])
def test_a_report_compares_models_that_lie_on_different_devices(float_there, changed, accelerator, data, tmp_path):
    compare, config = chipfit.xquant.xquant_report_pytorch_experimental, chipfit.xquant.XQuantConfig
    where, model = [accelerator, "cpu"] if float_there else ["cpu", accelerator], net()
    if changed:  # the network after the rewrites of quantization computes something else
        model[-1].bias.data += 1
    quantized, _ = chipfit.pytorch_post_training_quantization(moved(net(), where[1]), generator("cpu"))
    found = compare(moved(model, where[0]), quantized, data, data, config(str(tmp_path / "there")))
    quantized, _ = chipfit.pytorch_post_training_quantization(net(), generator("cpu"))
    want = compare(model, quantized, generator("cpu"), generator("cpu"), config(str(tmp_path / "here")))
    assert found["output_similarity_metrics_val"] == pytest.approx(want["output_similarity_metrics_val"], rel=1e-2)


def halved(weights, **attributes):
    return {k: v.numpy() / 2 for k, v in weights.items()}, attributes


def test_the_network_editor_replaces_layers_and_changes_ranges_there(accelerator, data):
    threshold = ne.ChangeQuantizationParamFunction(
        weights_quantization_params_fn=lambda sample, grid: {"threshold": sample.high}
    )
    linear = ne.NodeTypeFilter(nn.Linear)
    rules = [ne.EditRule(linear, ne.ReplaceLayer(nn.Linear, halved)), ne.EditRule(linear, threshold)]
    config = CoreConfig(debug_config=DebugConfig(network_editor=rules))
    quantized, found = chipfit.pytorch_post_training_quantization(moved(net(), accelerator), data, core_config=config)
    _, expected = chipfit.pytorch_post_training_quantization(net(), generator("cpu"), core_config=config)
    assert_equal_plans(expected.result, found.result)
    assert quantized(IMAGES[0].to(accelerator)).device == accelerator
