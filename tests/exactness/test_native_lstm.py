"""An LSTM becomes one operator of LiteRT and TensorFlow Lite Micro, whose every integer is the simulated one."""

import importlib.util

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit.engine.trees import batch_axes
from chipfit.errors import UnsupportedError
from chipfit.export.tflite.arena import arena
from chipfit.platform.load import load
from chipfit.streams import calls
from tests.build import model_of, randn, sqnr_db

pytest.importorskip("ai_edge_litert")
from ai_edge_litert import schema_py_generated as schema

MICRO = pytest.mark.skipif(importlib.util.find_spec("tflite_micro") is None, reason="tflite_micro is not installed")
RUNTIMES = [
    *(("tflite_int8", r) for r in ("litert", "litert_reference", "litert_optimized")),
    pytest.param("tflm_cmsis_nn", "tflm", marks=MICRO),
]
NATIVE = schema.BuiltinOperator.UNIDIRECTIONAL_SEQUENCE_LSTM


class Spotter(nn.Module):
    """A keyword spotter: an LSTM over frames, and a classifier of its last state, or of each."""

    def __init__(self, frames=10, size=16, each=False, **form):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.LSTM(frames, size, batch_first=True, **form)
        self.head, self.each = nn.Linear(size * (2 if form.get("bidirectional") else 1), 4), each
        for p in self.layer.parameters():
            p.data.mul_(2)

    def forward(self, x):
        y = self.layer(x)[0]
        return self.head(y if self.each else y[:, -1])


def sequences(samples=6, steps=12, features=10, seed=1):
    return torch.randn(samples, steps, features, generator=torch.Generator().manual_seed(seed))


def quantized(model, data, platform="tflm_cmsis_nn", **more):
    return chipfit.quantize(model.eval(), data, platform=platform, progress=False, **more)


def operators(file):
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(file.read_bytes(), 0))
    return [model.operatorCodes[o.opcodeIndex].builtinCode for o in model.subgraphs[0].operators]


def without_kernel(name="tflm_cmsis_nn"):
    """Return the platform without its rule for LSTM, which then becomes steps."""
    platform = load(name)
    return platform.model_copy(update={"ops": tuple(r for r in platform.ops if "LSTM" not in r.match)})


FORMS = {
    "last state": {},
    "all states": {"each": True},
    "two layers": {"num_layers": 2},
    "both directions": {"bidirectional": True, "each": True},
    "last of both directions": {"bidirectional": True},
    "no bias": {"bias": False},
}


@pytest.mark.parametrize(("platform", "runtime"), RUNTIMES)
@pytest.mark.parametrize("form", FORMS)
def test_an_lstm_is_one_operator_with_the_simulated_integers(form, platform, runtime, tmp_path):
    result = quantized(Spotter(**FORMS[form]), [sequences(), sequences(seed=2)], platform)
    file = result.export(tmp_path / "m.tflite")
    assert operators(file).count(NATIVE) == (2 if "two" in form or "both" in form else 1)
    check = result.verify([sequences(seed=3)], runtime=runtime)
    assert check.exact, check
    assert not check.float_ops and check.rows[-1].sqnr_db > 20
    assert any(r.op == "LSTM" and r.tensor.endswith(".2") for r in check.compared)  # the cell's state


@MICRO
def test_a_keyword_spotter_takes_a_fraction_of_the_memory_of_its_steps(tmp_path):
    model, data = Spotter(size=64), [sequences(16, 49), sequences(16, 49, seed=2)]
    native, steps = (
        quantized(model, data, p).export(tmp_path / f"{k}.tflite", io="int8").read_bytes()
        for k, p in enumerate(("tflm_cmsis_nn", without_kernel()))
    )
    assert len(native) < len(steps) / 3
    measured = chipfit.registry.entry("runtime", "tflm").thing.arena(native)
    assert abs(arena(native).total - measured) <= 0.05 * measured
    assert measured < arena(steps).total / 20


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_it_is_as_near_to_the_float_network_as_its_steps(spread):
    """Also where rows of weights, which share one scale in the native kernel, differ in size."""
    model, data, test = Spotter(), [sequences(16, 20), sequences(16, 20, seed=2)], sequences(32, 20, seed=3)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.layer.named_parameters():
        if "weight" in name:
            size = torch.exp(spread * torch.randn(len(p), 1, generator=generator))
            p.data.mul_(size / size.square().mean().sqrt())
    errors = []
    with torch.no_grad():
        for platform in ("tflm_cmsis_nn", without_kernel()):
            got = quantized(model, data, platform).device_model(test)
            errors.append(float((got - model(test)).square().mean()))
    assert errors[0] < errors[1]


def test_the_cell_state_has_the_range_of_all_steps():
    """A cell that fills up and empties again is large in the middle of the sequence only."""
    model = Spotter(frames=2, size=4)
    with torch.no_grad():
        w, r, b, rb = model.layer.parameters()
        for p in (w, r, b, rb):
            p.zero_()
        b[:4], b[8:12], b[12:] = 10.0, 10.0, 10.0  # every step adds 1
        w[4:8, 1], b[4:8] = -20.0, 10.0  # the second feature empties the cell
    x = torch.zeros(4, 30, 2)
    x[:, 25:, 1] = 1.0
    result = quantized(model, [x])
    (cell,) = (v for n in result.graph.nodes if n.op == "LSTM" for v in n.outputs[2:])
    assert float(result.plan[cell].scale) == 2.0**-10  # up to 25 needs 5 integer bits
    assert float(result.plan.tensors[cell].high) == pytest.approx(25, abs=0.1)


@pytest.mark.parametrize(("platform", "runtime"), RUNTIMES)
def test_one_step_keeps_its_states_in_tensors_that_are_inputs_and_outputs(platform, runtime, tmp_path):
    data = [sequences(4, 6), sequences(4, 6, seed=2)]
    step = quantized(Spotter(num_layers=2, each=True), data, platform).stream()
    file = step.export(tmp_path / "step.tflite", batch=1)
    assert operators(file).count(NATIVE) == 2
    graph = schema.ModelT.InitFromObj(schema.Model.GetRootAs(file.read_bytes(), 0)).subgraphs[0]
    assert [bool(graph.tensors[k].isVariable) for k in graph.inputs] == [False, True, True, True, True]
    check = step.verify(calls(step, data[:1]), runtime=runtime)
    assert check.exact, check
    assert len(check.compared) == len(check.rows)


def test_a_step_that_a_user_quantizes_is_native_too(tmp_path):
    data = [sequences(4, 6), sequences(4, 6, seed=2)]
    step = chipfit.streaming(Spotter(each=True).eval(), data[0])
    result = quantized(step.model, step.calls(data), states=step.states)
    assert operators(result.export(tmp_path / "step.tflite", io="int8", batch=1)).count(NATIVE) == 1
    assert result.verify(step.calls(data[:1])).exact
    assert min(chipfit.drift(result, data[:1]).outputs) > 20


class Given(nn.Module):
    """An LSTM with initial states, or whose last cell state is a result."""

    def __init__(self, start):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.start = nn.LSTM(4, 8, batch_first=True), start

    def forward(self, x):
        states = (x[None, :, 0].repeat(1, 1, 2), x[None, :, 1].repeat(1, 1, 2)) if self.start else None
        y, (_, c) = self.layer(x, states)
        return y if self.start else (y, c)


@pytest.mark.parametrize("start", [True, False])
def test_a_layer_whose_states_others_give_or_read_becomes_steps(start, tmp_path):
    data = [sequences(4, 5, 4), sequences(4, 5, 4, seed=2)]
    result = quantized(Given(start), data)
    assert NATIVE not in operators(result.export(tmp_path / "m.tflite"))
    assert result.verify(data[:1]).exact


def test_a_layer_of_more_steps_than_are_unrolled_is_native():
    data = [sequences(2, 600, 4)]
    result = quantized(Spotter(frames=4, size=8), data)
    assert [n.op for n in result.graph.nodes] == ["LSTM", "Linear"]
    assert result.verify(data).exact


def test_a_file_for_several_samples_has_states_for_each(tmp_path):
    result = quantized(Spotter(), [sequences(), sequences(seed=2)], "tflite_int8")
    file = result.export(tmp_path / "m.tflite", batch=3)
    x = sequences(3, seed=4)
    graph = schema.ModelT.InitFromObj(schema.Model.GetRootAs(file.read_bytes(), 0)).subgraphs[0]
    assert sorted(list(t.shape) for t in graph.tensors if t.isVariable) == [[3, 16], [3, 16]]
    interpreter = chipfit.registry.entry("runtime", "litert").thing(file)
    (got,) = interpreter.run([x.numpy()]).values()
    np.testing.assert_array_equal(got, result.device_model(x).detach().numpy())


def test_trained_scales_that_differ_within_a_gate_are_refused_by_name(tmp_path):
    result = quantized(Spotter(), [sequences(), sequences(seed=2)])
    weight = next(n.weight for n in result.graph.nodes if n.op == "LSTM")
    planned = result.plan.tensors[weight]
    scale = planned.scale.clone()
    scale[3] *= 2
    result.plan.tensors[weight] = planned.with_(scale=scale)
    with pytest.raises(UnsupportedError, match="rows of a gate of 'layer.weight_ih_l0' have several scales"):
        result.export(tmp_path / "m.tflite")


def test_an_lstm_stays_in_float_by_request(tmp_path):
    data = [sequences(), sequences(seed=2)]
    result = quantized(Spotter(), data, "tflite_int8", overrides={"layer": "float"})
    written = operators(result.export(tmp_path / "m.tflite"))
    assert NATIVE in written and schema.BuiltinOperator.DEQUANTIZE in written  # of what the kernel reads, in float
    assert result.verify(data[:1]).exact


def test_a_cell_beyond_the_range_of_the_kernel_saturates(tmp_path):
    model = Spotter(frames=2, size=4)
    with torch.no_grad():
        for p in model.layer.parameters():
            p.zero_()
        model.layer.bias_ih_l0[:] = 10.0  # every step adds 1
    data = [torch.randn(4, 90, 2, generator=torch.Generator().manual_seed(0))]
    result = quantized(model, data, "tflite_int8")
    (cell,) = (v for n in result.graph.nodes if n.op == "LSTM" for v in n.outputs[2:])
    assert float(result.plan[cell].scale) == 2.0**-9
    assert result.verify(data).exact


@pytest.mark.parametrize("algorithm", ["lsq", {"weights": "dorefa", "activations": "pact"}])
def test_training_keeps_one_scale_for_each_gate(algorithm):
    data = [sequences(), sequences(seed=2)]
    result = quantized(Spotter(), data, "tflite_int8", training=algorithm)
    before = result.model(data[0]).detach()
    optimizer = torch.optim.SGD(result.model.parameters(), 0.05)
    for x in data * 2:
        optimizer.zero_grad()
        result.model(x).square().mean().backward()
        optimizer.step()
    assert (result.model(data[0]) != before).any()
    assert result.trained().verify(data[:1]).exact


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_sequences_whose_steps_come_first_are_samples_on_axis_1(kind, platform):
    model = model_of(lambda m, x: m.head(m.layer(x)[0]), layer=kind(4, 6), head=nn.Linear(6, 3))
    batches = [randn(7, 5, 4, seed=k) for k in range(4)]
    result = quantized(model, batches, platform)
    assert batch_axes(result.graph) == {"x": 1} and result.verify(batches).exact
    x = randn(7, 2, 4, seed=9)
    assert sqnr_db(model(x).detach(), result.device_model(x)) > 28
