"""The model's device decides where networks run; decisions, files and the proof are on the CPU."""

import copy

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import CaptureError
from tests.accelerators import assert_same_plan, chosen, moved
from tests.build import model_of, randn, sequential, small_cnn

IMAGES = [randn(8, 3, 8, 8, seed=k) for k in range(3)]
CPU = torch.device("cpu")


def quantized(model, data, platform="ort_cpu", **options):
    return chipfit.quantize(model, data, platform, progress=False, **options)


def step_of_a_code(result: chipfit.Result) -> float:
    """Return the largest scale of a result: outputs differ by so much where scales differ in their last digits."""
    return max(float(t.stored.scale.max()) for t in result.plan.tensors.values() if t.stored is not None)


def positions() -> nn.Module:
    """Return a network that makes tensors of its own: positions, and a mask."""

    def forward(m, x):
        steps = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        hidden = torch.triu(torch.ones(5, 5, device=x.device), 1).bool()
        y = m.fc(x + 0.1 * steps[:, None])
        return (y @ y.mT).masked_fill(hidden, -9.0)

    torch.manual_seed(0)
    return model_of(forward, fc=nn.Linear(6, 6))


def test_weights_and_plan_are_on_the_cpu_and_the_simulation_where_the_model_was(accelerator):
    result = quantized(moved(small_cnn(norm=True)), IMAGES)
    tensors = [*result.graph.weights.values(), *result.graph.example]
    tensors += [x for t in result.plan.tensors.values() if t.quantized for x in (t.scale, t.zero_point)]
    assert {x.device for x in tensors} == {CPU} and result.graph.device == accelerator
    assert {p.device for p in result.model.parameters()} == {accelerator}
    assert result.model(IMAGES[0].to(accelerator)).device == accelerator
    assert result.edit({"0": "float"}).graph.device == accelerator


def test_tensors_that_a_model_makes_follow_it(accelerator):
    batches = [randn(4, 5, 6, seed=k) for k in range(2)]
    want, result = quantized(positions(), batches), quantized(moved(positions()), batches)
    assert_same_plan(result.plan, want.plan)
    got = result.model(batches[0].to(accelerator)).cpu()
    torch.testing.assert_close(got, want.model(batches[0]), rtol=0, atol=1e-4)
    assert result.verify(moved(batches)).exact


def test_tied_weights_stay_tied(accelerator):
    net = moved(model_of(lambda m, x: m.b(m.a(x).relu()), a=nn.Linear(6, 6), b=nn.Linear(6, 6)))
    net.b.weight = net.a.weight
    result = quantized(net, [randn(8, 6)])
    assert result.graph.weights["a.weight"] is result.graph.weights["b.weight"]
    assert result.model.a.weight is result.model.b.weight


def test_a_saved_result_names_no_device_and_loads_on_the_cpu(accelerator, tmp_path):
    result = quantized(moved(positions()), [randn(4, 5, 6)])
    result.save(tmp_path / "saved")
    assert not [p.name for p in (tmp_path / "saved").glob("*.json") if str(accelerator) in p.read_text()]
    loaded = chipfit.load(tmp_path / "saved")
    assert loaded.graph.device == CPU and {p.device for p in loaded.model.parameters()} == {CPU}
    assert loaded.verify([randn(4, 5, 6).to(accelerator)]).exact
    loaded.model.to(accelerator)(randn(4, 5, 6).to(accelerator))


def test_the_device_model_answers_where_it_is_asked(accelerator):
    device_model = quantized(moved(small_cnn()), IMAGES).device_model
    there = device_model(IMAGES[0].to(accelerator))
    assert there.device == accelerator and torch.equal(there.cpu(), device_model(IMAGES[0]))


def test_accuracy_is_measured_wherever_model_and_labels_are(accelerator):
    labelled = [(x, torch.arange(8) % 4) for x in IMAGES]
    there = quantized(moved(small_cnn()), moved(labelled))
    here = quantized(small_cnn(), labelled)
    here.model.to(accelerator)
    found = [r.verify(data).accuracy for r in (there, here) for data in (labelled, moved(labelled))]
    assert found[1:] == found[:1] * 3 and found[0].keys() == {"float", "simulated", "integer", "device"}


def test_a_model_on_several_devices_is_refused_before_data_are_read(accelerator):
    net = sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].to(accelerator)
    with pytest.raises(CaptureError) as e:
        quantized(net, (1 / 0 for _ in range(1)))
    assert f"'0.weight' on cpu, '1.weight' on {accelerator}" in str(e.value) and "model.cpu()" in str(e.value)


def test_a_buffer_elsewhere_is_the_models_own_affair(accelerator):
    net = model_of(lambda m, x: m.fc(x) * m.gain.to(x.device), fc=nn.Linear(4, 4))
    net.register_buffer("gain", torch.linspace(0.5, 2, 4))
    plain, net = copy.deepcopy(net), moved(net)
    net.gain = net.gain.cpu()
    assert_same_plan(quantized(net, [randn(8, 4)]).plan, quantized(plain, [randn(8, 4)]).plan)


def test_float64_batches_calibrate_a_float32_model(accelerator):
    batches = [x.double() for x in IMAGES]
    result = quantized(moved(small_cnn()), batches, example=batches[0])
    assert_same_plan(result.plan, quantized(small_cnn(), IMAGES).plan)
    assert result.verify(batches).exact


def test_batches_may_come_from_several_devices(accelerator):
    result = quantized(moved(small_cnn()), [IMAGES[0], moved(IMAGES[1]), IMAGES[2].numpy()])
    assert_same_plan(result.plan, quantized(small_cnn(), IMAGES).plan)


@pytest.mark.parametrize("there", [0, 1])
def test_inputs_of_one_batch_may_lie_on_several_devices(there, accelerator):
    net = model_of(lambda m, x, y: m.fc(x) * y + m.fc(y), fc=nn.Linear(4, 4))
    batches = [(randn(8, 4, seed=k), randn(8, 4, seed=k + 5)) for k in range(3)]
    mixed = [tuple(moved(x) if k == there else x for k, x in enumerate(pair)) for pair in batches]
    result, want = quantized(moved(net), mixed, rule="hmse"), quantized(net, batches, rule="hmse")
    assert_same_plan(result.plan, want.plan)
    assert (
        result.verify(mixed).exact
        and result.sensitivity(mixed).losses.keys() == want.sensitivity(batches).losses.keys()
    )
    got, expected = result.device_model(*mixed[0]).cpu(), want.device_model(*batches[0])
    torch.testing.assert_close(got, expected, rtol=0, atol=step_of_a_code(want) * (not chosen.fake))


def test_a_default_device_changes_nothing(accelerator):
    def forward(m, x):
        return m.fc(x) + torch.arange(4) * 0.1

    net, batches = model_of(forward, fc=nn.Linear(4, 4)), [randn(8, 4)]
    want = quantized(net, batches)
    with torch.device(accelerator):
        result = quantized(moved(net), batches)
        assert_same_plan(result.plan, want.plan)
        assert result.verify(batches).exact and result.report.to_dict() and result.sensitivity(batches)
        got = result.model(batches[0].to(accelerator))
    torch.testing.assert_close(got.cpu(), want.model(batches[0]), rtol=0, atol=1e-5)


def test_autocast_around_the_call_changes_nothing(accelerator):
    want = quantized(small_cnn(), IMAGES)
    with torch.autocast(accelerator.type, torch.bfloat16):
        result = quantized(moved(small_cnn()), IMAGES)
    assert_same_plan(result.plan, want.plan)


def test_a_model_that_draws_on_the_device_is_told_apart(accelerator):
    net = model_of(lambda m, x: m.fc(x) + 0.1 * torch.randn(x.shape, device=x.device), fc=nn.Linear(4, 4))
    notes = quantized(moved(net), [randn(8, 4)]).plan.rewrites
    assert any("it returns other numbers in every call" in note for note in notes)
