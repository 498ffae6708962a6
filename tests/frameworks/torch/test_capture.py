"""Models that cannot be captured are refused, with the line that is at fault and what to write instead."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import CaptureError
from chipfit.frameworks.torch.capture import capture
from tests.build import images, model_of, quantized, sequential

X = images(4)
MODEL = sequential(nn.Conv2d(3, 4, 3), nn.ReLU())


def test_branching_on_values_names_the_users_line(capfd):
    def forward(m, x):
        y = m.l(x)
        return y.relu() if y.sum() > 0 else y

    with pytest.raises(CaptureError, match=r"test_capture.py:\d+, in forward.*torch.where"):
        quantized(model_of(forward, l=nn.Linear(8, 8)), torch.randn(2, 8))
    assert capfd.readouterr().err == ""  # torch.export would print what it has traced


def test_control_flow_is_refused_by_the_users_line_and_the_model_still_runs():
    def forward(m, x):
        y = m.l(x)
        return torch.cond(y.sum() > 0, lambda v: v.relu(), lambda v: v * 2, (y,))

    x, model = torch.randn(2, 8), model_of(forward, l=nn.Linear(8, 8))
    for changed in (model, model_of(forward, l=nn.Linear(8, 8)).half()):
        with pytest.raises(CaptureError, match=r"control-flow operator 'cond'.*test_capture.py:\d+"):
            quantized(changed, x.to(changed.l.weight.dtype))
    with torch.no_grad():
        y = model.l(x)
        assert torch.equal(model(x), y.relu() if y.sum() > 0 else y * 2)


def test_a_model_that_fails_by_itself_is_reported_as_that():
    with pytest.raises(CaptureError, match="fails on the example input"):
        capture(MODEL, (torch.randn(2, 5, 8, 8),))


def test_a_single_argument_may_stand_by_itself():
    assert [n.op for n in chipfit.capture(MODEL, X).nodes] == ["Conv2D", "Relu"]


def test_a_class_is_not_a_model():
    with pytest.raises(CaptureError, match="instance"):
        quantized(nn.Linear, X)


@pytest.mark.parametrize(
    "model, words",
    [
        (nn.LazyLinear(2), "not seen its input.*'weight'.*call the model once"),
        (nn.Linear(4, 2, device="meta"), "to_empty"),
    ],
)
def test_a_model_without_numbers_is_refused(model, words):
    with pytest.raises(CaptureError, match=words):
        chipfit.quantize(model, [X], progress=False)


def test_a_module_that_is_quantized_already_is_refused():
    with pytest.raises(CaptureError, match=r"quantized already.*ReLU6.*float model"):
        quantized(nn.Sequential(MODEL, torch.ao.nn.quantized.ReLU6()), X)


@pytest.mark.parametrize("made", ["model", "device_model"])
def test_the_simulation_of_a_result_is_quantized_already(made):
    result = quantized(MODEL, X)
    with pytest.raises(CaptureError, match=r"quantized already.*(Quantizer|DeviceModel).*result.edit"):
        quantized(getattr(result, made), X)


def test_a_layer_named_with_half_a_character_is_refused():
    model = nn.Sequential()
    model.add_module("\ud800", nn.Linear(4, 4))
    with pytest.raises(CaptureError, match="half a character"):
        quantized(model, torch.randn(4, 4))


def test_a_model_may_change_the_dictionary_that_it_is_given():
    """As the detectors of MQBench's tests do; the caller's dictionary has more keys afterwards."""

    def detect(m, given):
        given.update({"found": {"boxes": m.conv(given["image"])}})
        return given

    model, image = model_of(detect, conv=nn.Conv2d(3, 2, 3)), torch.randn(2, 3, 6, 6)
    result = chipfit.quantize(model, [({"image": image},)], platform="ort_cpu", progress=False)
    out = result.model({"image": image})
    assert set(out) == {"image", "found"} and result.verify([({"image": image},)]).exact
    torch.testing.assert_close(out["found"]["boxes"], model.conv(image), rtol=0, atol=0.1)


def test_a_program_of_torch_export_is_a_model():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)).eval()
    x = torch.randn(2, 3, 8, 8)
    program = torch.export.export(model, (x,))
    own, other = (chipfit.quantize(m, [x], platform="ort_cpu", progress=False) for m in (model, program))
    assert [str(t) for t in own.plan.tensors.values()] == [str(t) for t in other.plan.tensors.values()]
    assert set(dict(own.model.named_parameters())) == set(dict(other.model.named_parameters()))
    assert other.verify(x).exact
    assert len(chipfit.lint(program, x).rows) == 4


def test_sizes_that_the_tracer_reads_belong_to_no_layer():
    def diagonal(m, x):
        return m.f(x.mean((2, 3))) @ torch.ones(6, x.shape[0]) * torch.eye(x.shape[0])

    graph = capture(model_of(diagonal, f=nn.Linear(3, 6)), (X,))
    sizes = [n for n in graph.nodes if n.op == "Size"]
    assert sizes and all(n.layer == "" and n.display_name == n.name for n in sizes)


@pytest.mark.usefixtures("process_group")
def test_a_wrapper_that_trains_on_several_devices_is_read_as_the_module_inside():
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()).eval()
    for wrapper in (nn.parallel.DistributedDataParallel(inner).eval(), nn.DataParallel(inner)):
        graph = capture(wrapper, (torch.randn(3, 4),))
        assert [n.layer for n in graph.nodes] == ["module.0", "module.1", "module.2"]
        assert torch.equal(graph.weights["module.0.weight"], inner[0].weight)
