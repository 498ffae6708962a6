"""Models that pack their sequences are read with lengths, and PyTorch's functions are as before afterwards."""

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from chipfit.engine.run import run
from chipfit.errors import CaptureError
from chipfit.frameworks.torch.capture import capture
from chipfit.frameworks.torch.packed import padded_sequences
from tests.build import model_of, quantized, randn

T, F, H = 6, 5, 4


def lengths(*n):
    return torch.tensor(n)


def last(m, x, n):
    """Classify by the last states of both directions."""
    _, h = m.rnn(pack_padded_sequence(x, n.cpu(), batch_first=True, enforce_sorted=False))
    return m.out(torch.cat([*(h[0] if isinstance(h, tuple) else h)[-m.ways :]], 1))


def every_step(m, x, n):
    """Label every step; layers get the packed sequence of others."""
    packed, state = m.rnn(pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))
    y, counts = pad_packed_sequence(packed, batch_first=True, padding_value=0.5, total_length=T + 1)
    return m.out(y), counts, state


def steps_first(m, x, n):
    """Start from states of the input, with the steps first and the sequences sorted."""
    state = x.mean(1)[:, :H].expand(m.layers * m.ways, -1, -1)
    state = (state, -state) if isinstance(m.rnn, nn.LSTM) else state
    y, _ = m.rnn(pack_padded_sequence(x.transpose(0, 1), n), state)
    return m.out(pad_packed_sequence(y, total_length=T)[0])


def model(kind, forward, layers=1, both=False):
    torch.manual_seed(0)
    batch_first = forward is not steps_first
    rnn = kind(F, H, num_layers=layers, bidirectional=both, batch_first=batch_first)
    m = model_of(forward, rnn=rnn, out=nn.Linear(H * (1 + both), 3))
    m.layers, m.ways = layers, 1 + both
    return m


MODELS = [
    (nn.LSTM, last, 1, True),
    (nn.LSTM, every_step, 2, True),
    (nn.LSTM, steps_first, 2, True),
    (nn.GRU, last, 2, True),
    (nn.GRU, steps_first, 1, False),
    (nn.RNN, every_step, 1, True),
]


@torch.no_grad()
@pytest.mark.parametrize("given", MODELS, ids=lambda g: f"{g[0].__name__} {g[1].__name__}")
def test_captured_layers_run_over_as_many_steps_as_each_sequence_has(given):
    m = model(*given)
    graph = capture(m, (randn(2, T, F), lengths(T, 3)))
    assert not graph.notes and {n.called for n in graph.nodes} & {"LSTM", "GRU", "RNN"}
    assert not {n.called for n in graph.nodes if n.op in ("Opaque", "TopK")} - {"aten.arange.default"}
    x, n = randn(4, T, F, seed=1), lengths(5, 4, 4, 1)
    want = torch.utils._pytree.tree_leaves(m(x, n))
    values = run(graph, (x, n), keep=graph.outputs)
    for a, o in zip(want, graph.outputs, strict=True):
        torch.testing.assert_close(values[o], a, rtol=1e-6, atol=1e-6)


def batches(*steps):
    return [(randn(4, t, F, seed=t), lengths(t, 1, 2, t - 1)) for t in steps]


@pytest.mark.parametrize("platform", ["ort_cpu", "ort_dynamic", "tflite_int8", "tflm_cmsis_nn"])
def test_files_stop_at_the_end_of_each_sequence(platform):
    result = quantized(model(nn.LSTM, last, both=True), batches(T, T), platform)
    in_steps = platform in ("tflite_int8", "tflm_cmsis_nn")
    assert {n.composite_op for n in result.graph.nodes} >= ({"LSTM"} if in_steps else set())
    check = result.verify([(randn(4, T, F, seed=7), lengths(2, T, 1, 5))])
    assert check.exact and (check.integers > 0 or platform == "ort_dynamic"), str(check)


def test_an_open_number_of_steps_stays_open_in_onnx_files():
    result = quantized(model(nn.GRU, last), batches(T, 4))
    assert result.graph.shape("x") == (None, None, F)
    assert result.verify(batches(9)).exact


def test_a_note_says_where_the_model_returns_fewer_steps():
    def forward(m, x, n):
        return pad_packed_sequence(m.rnn(pack_padded_sequence(x, n))[0])[0]

    m = model_of(forward, rnn=nn.LSTM(F, H))
    (note,) = capture(m, (randn(T, 2, F), lengths(4, 3))).notes
    assert note.startswith("pad_packed_sequence returns all steps") and "total_length" in note
    assert not capture(m, (randn(T, 2, F), lengths(T, 3))).notes


def test_a_list_of_lengths_is_refused_with_advice():
    m = model_of(lambda m, x, n: m.rnn(pack_padded_sequence(x, n.tolist()))[1][0], rnn=nn.LSTM(F, H))
    with pytest.raises(CaptureError, match=r"pack_padded_sequence.*lengths\.cpu\(\)"):
        capture(m, (randn(T, 2, F), lengths(T, 3)))


def test_rows_of_a_packed_sequence_are_refused():
    m = model_of(lambda m, x, n: pack_padded_sequence(x, n, batch_first=True).data.relu(), rnn=nn.LSTM(F, H))
    with pytest.raises(CaptureError, match="pack_padded_sequence"):
        capture(m, (randn(2, T, F), lengths(T, 3)))


def test_functions_of_pytorch_have_other_code_in_the_recording_thread_only_and_for_its_time():
    def kind():
        return type(pack_padded_sequence(randn(2, T, F), lengths(T, 3), batch_first=True)).__name__

    m, before, found = nn.LSTM(F, H), pack_padded_sequence.__code__, []
    with contextlib.suppress(ZeroDivisionError), padded_sequences(m), padded_sequences(m):
        thread = threading.Thread(target=lambda: found.append(kind()))
        thread.start()
        thread.join()
        found.append(kind())
        raise ZeroDivisionError
    assert found == ["PackedSequence", "Padded"] and kind() == "PackedSequence"
    assert pack_padded_sequence.__code__ is before
