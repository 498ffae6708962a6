"""Everything that users do with a model on an accelerator gives what the CPU gives, wherever the batches are."""

import functools

import pytest
import torch
from torch import Tensor, nn

import chipfit
from tests import zoo
from tests.accelerators import CPU, chosen, moved, tolerance
from tests.build import images, mlp, model_of, randn, small_cnn

#: where the model and the batches are: "there" is the accelerator
PLACES = {"all there": ("there", "there"), "data here": ("there", "here"), "model here": ("here", "there")}
#: weights of 4 bits
W4 = {"Conv2D": {"bits": 4}, "Linear": {"bits": 4}}
LEARNED = {"rounding": "nearest", "reconstruct_steps": 10}
STEPS = {
    "gptq": {"rounding": "gptq"},
    "off": {"rounding": "off"},
    **{f"reconstruct {part}": {**LEARNED, "reconstruct": part} for part in ("layer", "block", "network")},
    "fisher": {**LEARNED, "reconstruct": "block", "reconstruct_fisher": True},
    "some floats": {**LEARNED, "reconstruct": "block", "reconstruct_float": 0.5},
    "equalize": {"equalize": True},
    "smooth": {"rounding": "off", "smooth": 0.5},
    **{name: {"rounding": "off", name: True} for name in ("correct_bias", "correct_second_moment")},
}


def cnn() -> nn.Module:
    return small_cnn(norm=True)


def batches() -> list[Tensor]:
    return [images(8, seed=k) for k in range(3)]


def recurrent(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model_of(lambda m, x: m.head(m.layer(x)[0][:, -1]), layer=kind(4, 6, batch_first=True), head=nn.Linear(6, 3))


def sequences() -> list[Tensor]:
    return [randn(8, 5, 4, seed=k) for k in range(2)]


def settings(**given) -> dict:
    return {"settings": chipfit.Settings(**given)}


#: without tied networks, whose weights torch unties when it moves them there
#: name -> (model, batches, platform, options of `quantize`)
QUANTIZED: dict[str, tuple] = {
    **{name: (cnn, batches, name, {}) for name in "tflite_int8 imx500 coreml tflite_dynamic k210 nnie".split()},
    "ort_cpu": (cnn, batches, "ort_cpu", {}),
    "ort_dynamic": (lambda: mlp(6, 16, 3), lambda: [randn(16, 6, seed=k) for k in range(2)], "ort_dynamic", {}),
    "tflite_int16x8": (cnn, batches, "tflite_int16x8", {}),
    **{f"zoo: {name}": (name, None, "ort_cpu", {}) for name in ("attention_fused", "dict_out", "dataclass_out")},
    **{
        f"zoo: {name}": (name, None, "tflite_int8", {})
        for name in ("residual_hardswish", "functional", "unet_bilinear", "shapes")
    },
    **{
        f"range: {rule}": (cnn, batches, "ort_cpu", {"rule": rule, "weight_rule": rule})
        for rule in ("minmax", "mse", "lp", "kl", "percentile", "hmse")
    },
    **{
        f"4 bits: {name}": (cnn, batches, "tflite_int8", {"overrides": W4, **settings(**s)})
        for name, s in STEPS.items()
    },
    "limits": (cnn, batches, "tflite_int8", {"limits": chipfit.Limits(weights="60%")}),
    **{
        f"recurrent: {kind.__name__}": (lambda kind=kind: recurrent(kind), sequences, platform, {})
        for kind, platform in ((nn.LSTM, "ort_cpu"), (nn.GRU, "tflm_cmsis_nn"), (nn.RNN, "tflite_int8"))
    },
    "half precision": (lambda: cnn().half(), lambda: [x.half() for x in batches()], "ort_cpu", {}),
}


def setup(model, data) -> tuple[nn.Module, list]:
    if data is None:
        net, batch = zoo.make(model)
        return net, [batch, zoo.unseen(batch)]
    return model().eval(), data()


def on(place: str, x):
    return moved(x, chosen.device if place == "there" else CPU)


def scales(result: chipfit.Result) -> dict[str, Tensor]:
    return {name: t.stored.scale for name, t in result.plan.tensors.items() if t.stored is not None}


def same(result: chipfit.Result, want: chipfit.Result, rtol: float = 2e-3) -> None:
    """Check that plan and weights are on the CPU and those of the CPU's result."""
    got, wanted = scales(result), scales(want)
    assert got.keys() == wanted.keys() and {s.device for s in got.values()} <= {CPU}
    assert {w.device for w in result.graph.weights.values()} == {CPU}
    # of steps and ranges with nearly equal errors, a real device may take another one
    for name, scale in got.items():
        most = tolerance(rtol, 0.5)
        torch.testing.assert_close(scale, wanted[name], rtol=most, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    differ = torch.cat([(s / wanted[name] - 1).abs().flatten() for name, s in got.items()]) > rtol
    assert differ.float().mean() <= tolerance(0, 0.5)


def quantize(model, data, platform="ort_cpu", **options) -> chipfit.Result:
    return chipfit.quantize(model, data, platform, progress=False, **options)


@functools.cache
def on_cpu(name: str) -> chipfit.Result:
    model, data, platform, options = QUANTIZED[name]
    return quantize(*setup(model, data), platform, **options)


def place(name: str, where: str) -> tuple:
    """Return model, batches, platform and options of a use where they shall be."""
    model, data, platform, options = QUANTIZED[name]
    net, given = setup(model, data)
    of_model, of_data = PLACES[where]
    return on(of_model, net), [on(of_data, b) for b in given], platform, options


QUICK = {"ort_cpu", "tflite_int8", "zoo: attention_fused"}


def each_use() -> list:
    return [
        pytest.param(n, w, id=f"{n}-{w}", marks=() if n in QUICK and w != "model here" else pytest.mark.slow)
        for n in QUANTIZED
        for w in PLACES
    ]


@pytest.mark.parametrize("name, where", each_use())
def test_a_plan_is_that_of_the_cpu(name, where, accelerator):
    model, data, platform, options = place(name, where)
    result = quantize(model, data, platform, **options)
    same(result, on_cpu(name))
    home = next(model.parameters()).device
    assert {p.device for p in result.model.state_dict().values()} == {home}


@pytest.fixture
def result(accelerator):
    """Return a result of a model on the accelerator, and its data there."""
    model, data, *_ = place("ort_cpu", "all there")
    return quantize(model, data), data


def test_a_model_of_the_result_runs_and_trains_there(result, accelerator):
    quantized, data = result
    out = quantized.model(data[0])
    torch.testing.assert_close(out.cpu(), on_cpu("ort_cpu").model(data[0].cpu()), rtol=1e-3, atol=1e-3)
    out.square().sum().backward()
    assert out.device == accelerator


def test_files_reports_and_proofs_are_those_of_the_cpu(result, tmp_path):
    quantized, data = result
    quantized.export(tmp_path / "net.onnx")
    assert quantized.verify(data).exact and quantized.verify([x.cpu() for x in data]).exact
    loaded = chipfit.load(quantized.save(tmp_path / "saved"))
    same(loaded, quantized, 0)
    assert next(iter(loaded.model.state_dict().values())).device == CPU  # a file names no device
    assert quantized.report.save(tmp_path / "report.html")


def test_files_are_measured_and_verified_on_data_of_a_device(result, tmp_path):
    quantized, data = result
    timing = quantized.time(data, seconds=0.01)
    assert timing.batch == len(data[0]) and timing.operators == quantized.time(batches(), seconds=0.01).operators
    path = quantized.export(tmp_path / "net.onnx")
    found, want = chipfit.verify_file(path, data, batches=1), chipfit.verify_file(path, batches(), batches=1)
    assert found.exact and found.rows == want.rows and found.warnings == want.warnings


def test_the_device_model_returns_where_its_input_is(result, accelerator):
    quantized, data = result
    there, here = quantized.device_model(data[0]), quantized.device_model(data[0].cpu())
    assert there.device == accelerator and torch.equal(there.cpu(), here)


@pytest.mark.parametrize("place", ["there", "here"])
@pytest.mark.parametrize("study", ["sensitivity", "pareto"])
def test_studies_of_a_result_are_those_of_the_cpu(study, place, result):
    quantized, data = result
    found = getattr(quantized, study)([on(place, x) for x in data])
    want = getattr(on_cpu("ort_cpu"), study)(batches())
    key = (lambda s: [r["tensor"] for r in s.rows()]) if study == "sensitivity" else lambda s: len(s.points)
    assert key(found) == key(want)


def test_an_edited_result_is_that_of_the_cpu(result):
    edit = {"0": {"bits": 8, "rule": "minmax"}}
    same(result[0].edit(edit), on_cpu("ort_cpu").edit(edit))


ALGORITHMS = "ste lsq lsq_plus dsq tqt dorefa".split()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_training_there_gives_weights_to_a_result_on_the_cpu(algorithm, accelerator, tmp_path):
    model, data, *_ = place("ort_cpu", "all there")
    result = quantize(model, data, training=algorithm)
    optimizer = torch.optim.SGD(result.model.parameters(), 1e-3)
    for x in data:
        optimizer.zero_grad()
        result.model(x).square().mean().backward()
        optimizer.step()
    trained = result.trained()
    assert {w.device for w in trained.graph.weights.values()} == {CPU}
    trained.export(tmp_path / "net.onnx")
    assert trained.verify(data).exact


def test_an_index_that_does_not_exist_is_an_error_of_torch(accelerator):
    with pytest.raises(RuntimeError):
        cnn().to(f"{accelerator.type}:{torch.accelerator.device_count()}")


def test_a_network_that_draws_on_the_device_leaves_the_callers_generators(accelerator):
    noisy = model_of(lambda m, x: m.fc(x + 0.01 * torch.randn(x.shape[-1], device=x.device)), fc=nn.Linear(6, 3))
    data = [randn(8, 6, seed=k).to(accelerator) for k in range(2)]
    torch.manual_seed(3)
    want = torch.randn(4, device=accelerator).cpu(), torch.randn(4)
    torch.manual_seed(3)
    result = quantize(noisy.to(accelerator), data)
    assert torch.equal(torch.randn(4, device=accelerator).cpu(), want[0])
    x = data[0]
    torch.manual_seed(1)
    one, other = result.model(x), result.model(x)
    assert not torch.equal(one.cpu(), other.cpu())  # noise was captured as an operator, not as numbers


@pytest.mark.parametrize("kind, place", [(nn.LSTM, "there"), (nn.GRU, "here")])
def test_a_network_of_one_step_runs_where_the_network_over_sequences_was(kind, place, accelerator):
    net, data = moved(recurrent(kind)), [on(place, x) for x in sequences()]
    step, on_cpu = chipfit.streaming(net, data[0]), chipfit.streaming(recurrent(kind), sequences()[0])
    calls = step.calls(data)
    assert {x.device for call in calls for x in call} == {accelerator}
    assert step.model(*calls[0])[0].device == accelerator
    result = quantize(step.model, calls, "tflm_cmsis_nn", states=step.states)
    want = quantize(on_cpu.model, on_cpu.calls(sequences()), "tflm_cmsis_nn", states=step.states)
    same(result, want)
    lost, expected = chipfit.drift(result, data), chipfit.drift(want, sequences())
    assert lost.outputs == pytest.approx(expected.outputs, abs=0.5)
    want.model.to(accelerator)
    assert chipfit.drift(want, data).states == pytest.approx(expected.states, abs=0.5)
    assert result.verify(calls[:2]).exact


@pytest.mark.parametrize(
    "options",
    [{}, {"bounds": (0.0, (0.5, 1.0, 1.5)), "output": "regularized_spread"}, {"statistics": "all", "start": "diverse"}],
    ids=["plain", "in bounds", "of all batches"],
)
def test_data_are_generated_where_the_model_is(options, accelerator):
    model, how = cnn(), chipfit.Generation(steps=3, batch=8, **options)
    example = torch.zeros(2, 3, 8, 8)
    here = chipfit.generated(model, 16, example=example, options=how, progress=False)
    there = chipfit.generated(moved(model), 16, example=moved(example), options=how, progress=False)
    assert {x.device for x in there} == {CPU} and there.notes == here.notes
    for x, y in zip(here, there, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-2, atol=1e-2)  # Adam divides by what gradients are


def test_a_network_is_pruned_where_it_is(accelerator):
    model = cnn()
    limits = chipfit.Limits(bops="60%")
    there, here = (chipfit.prune(moved(model, d), batches(), limits=limits, progress=False) for d in (accelerator, CPU))
    assert {p.device for p in there.model.parameters()} == {accelerator}
    assert {k: m.tolist() for k, m in there.masks.items()} == {k: m.tolist() for k, m in here.masks.items()}
    x = images(8, seed=9)
    torch.testing.assert_close(moved(there.model(moved(x)), CPU), here.model(x), rtol=1e-2, atol=1e-3)
