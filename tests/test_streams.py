"""A network of one step keeps its states as inputs and outputs of one scale, and computes what the sequence does."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import DataError, UnsupportedError
from chipfit.streams import calls
from tests.build import model_of, sqnr_db
from tests.onnx_models import onnx_node, onnx_of
from tests.passes.test_recurrent import KINDS


class Network(nn.Module):
    """A layer of each step, two recurrent ones, and a classifier of each step."""

    def __init__(self, kind, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.norm = nn.Linear(3, 6), nn.LayerNorm(6)
        self.layers = kind(6, 8, num_layers=2, batch_first=True, **settings)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return torch.softmax(self.head(self.layers(self.norm(torch.relu(self.inside(x))))[0]), -1)


X = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_give_what_the_sequence_gives(kind):
    model = Network(kind).eval()
    step = chipfit.streaming(model, X)
    assert len(step.states) == (4 if kind is nn.LSTM else 2)
    data = step.calls([X])
    assert len(data) == X.shape[1]
    with torch.no_grad():
        outputs = torch.stack([step.model(*call)[0] for call in data], 1)
        torch.testing.assert_close(outputs, model(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("platform", ["tflm_cmsis_nn", "tflite_int8"])
def test_states_and_their_next_values_share_a_scale_and_the_file_is_exact(platform, tmp_path):
    step = chipfit.streaming(Network(nn.LSTM).eval(), X)
    data = step.calls([X])
    result = chipfit.quantize(step.model, data, platform=platform, states=step.states, progress=False)
    for name, following in zip(step.states, result.graph.outputs[-4:], strict=True):
        assert result.plan[name].same_numbers(result.plan[following])
    result.export(tmp_path / "step.tflite", batch=1, io="int8" if platform == "tflm_cmsis_nn" else None)
    assert result.verify(data).exact
    loaded = chipfit.load(result.save(tmp_path / "saved"))
    assert chipfit.drift(loaded, [X]) == chipfit.drift(result, [X])


def test_the_drift_is_what_the_steps_lose_on_their_own_states():
    step = chipfit.streaming(Network(nn.GRU).eval(), X)
    result = chipfit.quantize(step.model, step.calls([X]), platform="tflite_int8", states=step.states, progress=False)
    found = chipfit.drift(result, [X])
    states, floats = [torch.zeros(4, 8)] * 2, [torch.zeros(4, 8)] * 2
    with torch.no_grad():
        for t in range(6):
            got, *states = result.model(X[:, t], *states)
            want, *floats = step.model(X[:, t], *floats)
            assert found.outputs[t] == pytest.approx(sqnr_db(want, got), abs=0.3)  # biases are corrected
    assert "step   outputs    states  [dB]" in str(found)


def test_a_cell_of_the_user_has_states_too(tmp_path):
    def forward(m, x, memory):
        memory = m.cell(x, memory)
        return m.head(memory), memory

    data = [(torch.randn(4, 3), torch.rand(4, 5) - 0.5) for _ in range(3)]
    cell = model_of(forward, cell=nn.GRUCell(3, 5), head=nn.Linear(5, 2))
    result = chipfit.quantize(cell, data, platform="tflm_cmsis_nn", states=["memory"], progress=False)
    assert result.plan["memory"].same_numbers(result.plan[result.graph.outputs[1]])
    result.export(tmp_path / "cell.tflite", io="int8", batch=1)
    assert result.verify(data).exact


def test_an_onnx_file_becomes_a_network_of_one_step(tmp_path):
    """ONNX has steps first, and an axis of directions."""
    draw = np.random.default_rng(0)
    sizes = {"W": (1, 24, 3), "R": (1, 24, 6), "B": (1, 48)}
    constants = {k: draw.normal(0, 0.4, s).astype("f4") for k, s in sizes.items()} | {"one": np.array([1], "i8")}
    nodes = [
        onnx_node("x = Transpose(steps/in)", perm=[1, 0, 2]),
        onnx_node("y = LSTM(x, W, R, B)", hidden_size=6),
        "z = Squeeze(y, one)",
        onnx_node("out = Transpose(z)", perm=[1, 0, 2]),
    ]
    made = onnx_of(*nodes, inputs={"steps/in": ["n", 6, 3]}, outputs=["out"], constants=constants)
    onnx.save(made, tmp_path / "m.onnx")
    step = chipfit.streaming(tmp_path / "m.onnx", X)
    with torch.no_grad():
        outputs = torch.stack([step.model(*call)[0].flatten(1) for call in step.calls([X])], 1)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (want,) = session.run(None, {"steps/in": X.numpy()})
    np.testing.assert_allclose(outputs.numpy(), want, rtol=1e-4, atol=1e-6)
    assert step.graph.inputs[0] == "steps_in"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Network(nn.GRU, bidirectional=True), "runs from the last step to the first"),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU()), "no recurrent layer"),
        (lambda: nn.Sequential(nn.Softmax(1), nn.GRU(3, 4, batch_first=True)), "along the axis of steps"),
        (lambda: nn.Sequential(nn.Conv1d(6, 2, 1), nn.GRU(3, 4, batch_first=True)), "Conv1D '0'"),
    ],
)
def test_what_joins_several_steps_is_refused_by_name(make, why):
    model = make().eval()
    if isinstance(model, Network):
        model.head = nn.Linear(16, 4)
    with pytest.raises(UnsupportedError, match=why):
        chipfit.streaming(model, X)


@pytest.mark.parametrize(
    ("states", "why"),
    [
        (["z"], "'z' is not an input of the model.*Allowed: x, h"),
        (["x"], "State 'x' and its next value, output 1 of the model, differ in shape"),
        (["h", "h", "h"], "The model has 2 outputs, and 3 states"),
    ],
)
def test_wrong_states_are_refused_by_name(states, why):
    def forward(m, x, h):
        h = m.cell(x, h)
        return h * 2, h

    cell = model_of(forward, cell=nn.RNNCell(3, 5))
    with pytest.raises(DataError, match=why):
        chipfit.quantize(cell, [(torch.randn(2, 3), torch.randn(2, 5))], states=states, progress=False)


def test_a_layer_whose_outputs_are_its_states_drifts():
    result = chipfit.quantize(nn.GRU(3, 8, batch_first=True).eval(), [X], "tflite_int8", progress=False)
    found = chipfit.drift(result, [X])
    assert len(found.outputs) == 6 and found.outputs == pytest.approx(found.states)


@pytest.mark.parametrize("wrong", [X[:, :, :2], X[0], X[:, :0], (X, X)], ids=["features", "axes", "steps", "inputs"])
def test_sequences_that_do_not_fit_the_network_are_refused(wrong):
    step = chipfit.streaming(Network(nn.GRU).eval(), X)
    result = chipfit.quantize(step.model, step.calls([X]), states=step.states, progress=False)
    for walk in (step.calls, lambda sequences: chipfit.drift(result, sequences)):
        with pytest.raises(DataError, match=r"^Sequences do not fit .* Allowed: 'x' \[N, T, 3\]"):
            walk([wrong])


def test_a_network_without_states_does_not_drift():
    result = chipfit.quantize(nn.Linear(3, 4), [torch.randn(4, 3)], progress=False)
    with pytest.raises(UnsupportedError, match="no recurrent layer"):
        chipfit.drift(result, [X])


# ---------------------------------------------------------------- the step of a quantized network


class Last(Network):
    """A network that returns the scores after the last step."""

    def forward(self, x):
        return super().forward(x)[:, -1]


def on_litert(file, inputs):
    """Return what LiteRT's kernels give for inputs as they lie in the file."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    interpreter = Interpreter(str(file), experimental_op_resolver_type=OpResolverType.BUILTIN_REF)
    interpreter.allocate_tensors()

    def run(*given):
        for detail, x in zip(interpreter.get_input_details(), given, strict=True):
            interpreter.set_tensor(detail["index"], x)
        interpreter.invoke()
        return [interpreter.get_tensor(d["index"]) for d in interpreter.get_output_details()]

    zeros = [np.array(d["quantization"][1], d["dtype"]) for d in interpreter.get_input_details()]
    return run(*inputs) if inputs is not None else (run, zeros)


class Dilated(nn.Module):
    """Causal convolutions, with zeros added before them, or by them and cut off, and a sum around the second one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5)
        self.second, self.head = nn.Conv1d(5, 5, 2, dilation=2, padding=2), nn.Linear(5, 4)

    def forward(self, x):
        y = torch.relu(self.norm(self.first(nn.functional.pad(x.transpose(1, 2), (2, 0)))))
        return self.head((y + torch.relu(self.second(y)[:, :, :-2])).transpose(1, 2))


class Pictures(nn.Module):
    """Convolutions and a pool over steps and features, and a recurrent layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.pool = nn.Conv2d(1, 4, 3, padding=(0, 1)), nn.MaxPool2d((1, 2))
        self.second, self.layer = nn.Conv2d(4, 4, (3, 1), groups=4), nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        y = self.pool(torch.relu(self.first(nn.functional.pad(x.unsqueeze(1), (0, 0, 2, 0)))))
        return self.layer(self.second(nn.functional.pad(y, (0, 0, 2, 0))).transpose(1, 2).flatten(2))[0]


@pytest.mark.parametrize("model", [Dilated, Pictures])
def test_a_causal_convolution_keeps_the_steps_that_it_reads_again(model, tmp_path):
    model, states = model().eval(), [2, 2]
    step = chipfit.streaming(model, X)
    assert [s for name in step.states for s in step.graph.shape(name) if s in states][:2] == states
    with torch.no_grad():
        outputs = torch.stack([step.model(*call)[0] for call in step.calls([X])], 1)
        torch.testing.assert_close(outputs, model(X), rtol=1e-5, atol=1e-6)
    result = chipfit.quantize(model, [X], platform="tflm_cmsis_nn", progress=False)
    one = result.stream()
    whole = result.export(tmp_path / "whole.tflite", batch=1, io="int8", keep_layout=True)
    file = one.export(tmp_path / "step.tflite", batch=1, io="int8", keep_layout=True)
    steps = np.random.default_rng(0).integers(-128, 128, (1, 6, 3)).astype(np.int8)
    (want,) = on_litert(whole, [steps])
    run, zeros = on_litert(file, None)
    shapes = [one.graph.shape(i)[1:] for i in one.graph.inputs[1:]]
    states, outputs = [np.full((1, *s), z) for s, z in zip(shapes, zeros[1:], strict=True)], []
    for t in range(6):
        output, *states = run(steps[:, t], *states)
        outputs.append(output)
    np.testing.assert_array_equal(np.stack(outputs, 1), want)
    assert one.verify(calls(one, [X])).exact


class Turned(nn.Module):
    """A convolution over steps."""

    def __init__(self, layer, padding=(0, 0), mode="constant"):
        super().__init__()
        self.layer, self.padding, self.mode = layer, padding, mode

    def forward(self, x):
        return self.layer(nn.functional.pad(x.transpose(1, 2), self.padding, self.mode))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Turned(nn.Conv1d(3, 2, 3, padding=1)), "Conv1D 'layer'.*reads later steps"),
        (lambda: Turned(nn.Conv1d(3, 2, 3)), "reads later steps, or begins later"),
        (lambda: Turned(nn.Conv1d(3, 2, 3, stride=2), (2, 0)), "skips steps"),
        (lambda: Turned(nn.Conv1d(3, 2, 3), (2, 0), "replicate"), "adds other steps than zeros"),
        (lambda: Turned(nn.Conv1d(3, 2, 3), (4, 0)), "adds more zeros"),
        (lambda: Turned(nn.Conv1d(3, 2, 3, padding=2)), "An output has zeros that were added"),
        (lambda: Turned(nn.Sequential(nn.Conv1d(3, 2, 3, padding=2), nn.ReLU())), "Relu 'layer.1'.*reads zeros"),
        (lambda: Turned(nn.AvgPool1d(2)), "AvgPool 'layer'"),
    ],
)
def test_a_convolution_that_is_not_causal_is_refused_by_name(make, why):
    with pytest.raises(UnsupportedError, match=why):
        chipfit.streaming(make().eval(), X)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", [Network, Last])
def test_the_step_file_of_a_whole_result_gives_the_integers_of_the_whole_file_on_litert(kind, model, tmp_path):
    result = chipfit.quantize(model(kind).eval(), [X], platform="tflm_cmsis_nn", progress=False)
    whole = result.export(tmp_path / "whole.tflite", batch=1, io="int8")
    file = result.export(tmp_path / "step.tflite", batch=1, io="int8", stream=True)
    steps = np.random.default_rng(0).integers(-128, 128, (1, 6, 3)).astype(np.int8)
    (want,) = on_litert(whole, [steps])
    run, zeros = on_litert(file, None)
    states, outputs = [np.full((1, 8), z) for z in zeros[1:]], []
    for t in range(6):
        output, *states = run(steps[:, t], *states)
        outputs.append(output)
    got = outputs[-1] if model is Last else np.stack(outputs, 1)
    np.testing.assert_array_equal(got, want)
    assert len({*want.ravel()}) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_file_with_a_layer_in_float_gives_what_the_whole_file_gives_on_onnx_runtime(kind, tmp_path):
    result = chipfit.quantize(Network(kind).eval(), [X], platform="ort_cpu", progress=False)
    whole, step = (
        onnxruntime.InferenceSession(
            result.export(tmp_path / f"{s}.onnx", stream=s), providers=["CPUExecutionProvider"]
        )
        for s in (False, True)
    )
    (want,) = whole.run(None, {whole.get_inputs()[0].name: X.numpy()})
    names, states = [i.name for i in step.get_inputs()], [np.zeros((4, 8), "f4")] * (len(step.get_inputs()) - 1)
    for t in range(6):
        output, *states = step.run(None, dict(zip(names, [X[:, t].numpy(), *states], strict=True)))
        np.testing.assert_allclose(output, want[:, t], atol=1e-6)


def test_the_step_of_a_result_is_verified_saved_and_a_step_itself(tmp_path):
    result = chipfit.quantize(Network(nn.GRU).eval(), [X], platform="tflm_cmsis_nn", progress=False)
    step = result.stream()
    assert step.verify(calls(step, [X])).exact
    assert step.stream() is step
    loaded = chipfit.load(result.save(tmp_path / "whole"))
    assert chipfit.drift(loaded, [X]) == chipfit.drift(result, [X]) == chipfit.drift(step, [X])
    assert min(chipfit.drift(result, [X]).outputs) > 20


def test_all_steps_of_a_layer_read_and_write_tensors_of_one_scale():
    result = chipfit.quantize(Network(nn.LSTM).eval(), [X], platform="tflm_cmsis_nn", progress=False)
    steps = [[n for n in result.graph.nodes if n.composite == "lstm" and n.step == t] for t in range(6)]
    assert [n.op for n in steps[0]] == [n.op for n in steps[5]]
    for nodes in zip(*steps, strict=True):
        assert len({float(result.plan[n.output].scale) for n in nodes}) == 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Layer(nn.LSTM, bidirectional=True), "it runs from the last step to the first"),
        (lambda: Layer(nn.GRU, bidirectional=True), "another step than the last"),
        (lambda: Layer(nn.GRU, first=True), "Select 'select' cannot run one step at a time"),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU()), "no recurrent layer"),
    ],
)
def test_a_result_that_joins_several_steps_has_no_step(make, why, tmp_path):
    result = chipfit.quantize(make().eval(), [X], platform="tflm_cmsis_nn", progress=False)
    with pytest.raises(UnsupportedError, match=why):
        result.export(tmp_path / "step.tflite", stream=True)


class Layer(nn.Module):
    """A recurrent layer that returns its states, or the first of them."""

    def __init__(self, kind, first=False, **settings):
        super().__init__()
        self.layer, self.first = kind(3, 8, batch_first=True, **settings), first

    def forward(self, x):
        y = self.layer(x)[0]
        return y[:, 0] if self.first else y
