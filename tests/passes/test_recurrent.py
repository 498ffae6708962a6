"""Recurrent layers compute what PyTorch's own compute, whole and as their steps."""

from itertools import product

import pytest
import torch
from torch import nn

import chipfit
from chipfit.engine.run import run
from chipfit.errors import UnsupportedError
from chipfit.frameworks.torch.capture import capture
from chipfit.passes.decompose import decompose
from chipfit.plan.record import Plan
from tests.build import model_of, quantized

KINDS = [nn.LSTM, nn.GRU, nn.RNN]
FORMS = [{}, {"bias": False}, {"bidirectional": True, "num_layers": 2}, {"batch_first": False}]
X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    """A recurrent layer, with all of its results."""

    def __init__(self, kind, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind(4, 6, **{"batch_first": True, **settings})

    def forward(self, x, *states):
        x = x if self.layer.batch_first else x.transpose(0, 1)
        y, last = self.layer(x, states if isinstance(self.layer, nn.LSTM) else states[0]) if states else self.layer(x)
        return (y, *last) if isinstance(last, tuple) else (y, last)


def close(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def opened(graph):
    return decompose(graph, Plan(), {"Unstack", "Stack"})[0]


@pytest.mark.parametrize(("kind", "form"), [*product(KINDS, FORMS)])
def test_a_layer_whole_and_in_steps_computes_what_torch_computes(kind, form):
    model = Layer(kind, **form).eval()
    graph = capture(model, (X,))
    assert {n.op for n in graph.nodes} & {"LSTM", "GRU", "RNN"} == {kind.__name__}
    steps = opened(graph)
    assert not {n.op for n in steps.nodes} & {"LSTM", "GRU", "RNN", "Opaque"}
    with torch.no_grad():
        want = model(X)
    for g in (graph, steps):
        values = run(g, [X], keep=g.outputs)
        close([values[o] for o in g.outputs], want)


@pytest.mark.parametrize("kind", KINDS)
def test_states_that_are_given_are_where_the_layer_starts(kind):
    model, state = Layer(kind).eval(), torch.randn(1, 3, 6)
    given = (X, state, state / 2) if kind is nn.LSTM else (X, state)
    graph = capture(model, given)
    with torch.no_grad():
        want = model(*given)
    for g in (graph, opened(graph)):
        values = run(g, list(given), keep=g.outputs)
        close([values[o] for o in g.outputs], want)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_cell_is_one_step_of_a_layer(kind):
    def forward(m, x):
        state = None
        for step in x.unbind(1):
            state = m.cell(step, state)
        return state[0] if isinstance(state, tuple) else state

    model = model_of(forward, cell=kind(4, 6))
    graph = capture(model, (X,))
    with torch.no_grad():
        want = model(X)
    for g in (graph, opened(graph)):
        close([run(g, [X], keep=g.outputs)[o] for o in g.outputs], [want])


def test_a_relu_layer_and_a_sequence_of_open_length_are_read():
    model = Layer(nn.RNN, nonlinearity="relu").eval()
    graph = capture(model, (X,), others=[((X[:, :3],), {})])
    assert [n.attrs["activation"] for n in graph.nodes if n.op == "RNN"] == ["relu"]
    assert any(n.op == "RNN" for n in opened(graph).nodes)  # steps are not known
    with torch.no_grad():
        want = model(X[:, :2])
    close([run(graph, [X[:, :2]], keep=graph.outputs)[o] for o in graph.outputs], want)


class Last(nn.Module):
    """A classifier of the state after the last step."""

    def __init__(self, kind, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind(4, 6, batch_first=True, **settings)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("platform", ["tflite_int8", "tflm_cmsis_nn"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_of_a_layer_are_integers_and_exact(kind, platform, tmp_path):
    model, data = Last(kind).eval(), [torch.randn(8, 5, 4) for _ in range(2)]
    result = chipfit.quantize(model, data, platform=platform, progress=False)
    assert all(result.plan.quantized(v) for n in result.graph.nodes for v in n.outputs)
    assert not any(n.op == "Concat" for n in result.graph.nodes)  # nothing reads the states of all steps
    result.export(tmp_path / "m.tflite", batch=1, io="int8")
    check = result.verify(data[:1])
    assert check.exact, check


def test_one_stored_bias_serves_all_steps(tmp_path):
    """The bias is a multiple of the input's scale, so that all steps read states of one scale."""
    result = chipfit.quantize(Last(nn.GRU).eval(), [torch.randn(8, 5, 4)], platform="tflite_int8", progress=False)
    steps = [n for n in result.graph.nodes if n.bias == "layer.bias_hh_l0"]
    assert len(steps) == 5
    assert len({float(result.plan[n.data].scale) for n in steps}) == 1


def test_the_whole_layer_stays_in_float_where_the_runtime_has_it(tmp_path):
    model, data = Last(nn.LSTM).eval(), [torch.randn(8, 5, 4)]
    result = chipfit.quantize(model, data, platform="ort_cpu", progress=False)
    assert [n.op for n in result.graph.nodes if n.layer == "layer"] == ["LSTM"]
    result.export(tmp_path / "m.onnx")
    assert result.verify(data).exact


def test_a_layer_of_many_steps_is_refused_with_its_number_where_only_integers_are_allowed():
    with pytest.raises(UnsupportedError, match="GRU 'layer'"):
        chipfit.quantize(Last(nn.GRU).eval(), [torch.randn(2, 600, 4)], platform="tflm_cmsis_nn", progress=False)


def test_weights_of_the_steps_train_under_their_own_names():
    result = chipfit.quantize(Last(nn.GRU).eval(), [torch.randn(8, 5, 4)], platform="tflite_int8", progress=False)
    result.model(torch.randn(8, 5, 4)).square().mean().backward()
    named = dict(result.model.named_parameters())
    for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
        assert named[f"layer.{name}"].grad.abs().sum() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_last_state_is_rounded_only_for_what_reads_it_outside_of_a_float_layer(kind):
    def forward(m, x):
        y, last = m.layer(x)
        return m.head((last[0] if isinstance(last, tuple) else last)[0]), y.amax(1)

    torch.manual_seed(0)
    model = model_of(forward, layer=kind(4, 6, batch_first=True), head=nn.Linear(6, 3))
    result = quantized(model, torch.randn(16, 5, 4), "tflite_int8", overrides={"layer": "float"})
    check = result.verify([torch.randn(16, 5, 4)])
    assert check.exact and check.integers > 0
