"""An LSTM that rounds data and states at each call computes what ONNX Runtime computes on one thread."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import UnsupportedError
from chipfit.mct.ptq import in_float
from chipfit.simulate.onnxruntime import tanh
from tests.build import needs_vnni
from tests.onnx_models import onnx_of


class Recurrent(nn.Module):
    """LSTMs over a sequence, or a cell, and a layer behind them."""

    def __init__(self, step=False, given=False, **form):
        super().__init__()
        torch.manual_seed(0)
        ways = 2 if form.get("bidirectional") else 1
        self.layer = nn.LSTMCell(6, 8) if step else nn.LSTM(6, 8, batch_first=True, **form)
        self.head, self.given = nn.Linear(8 * ways, 3), given

    def forward(self, x):
        states = (x[:, 0, :4].repeat(1, 2)[None], x[:, 1, :4].repeat(1, 2)[None]) if self.given else None
        y = self.layer(x) if states is None else self.layer(x, states)
        return self.head(y[0])


SEQUENCES = torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "form",
    [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}, {"given": True}, {"step": True}],
    ids=["one", "both directions", "no bias", "given states", "cell"],
)
@pytest.mark.parametrize("platform", ["ort_dynamic", pytest.param("ort_dynamic@VNNI", marks=needs_vnni)])
def test_an_lstm_that_rounds_its_states_in_each_step_is_exact_on_one_thread(form, platform, tmp_path):
    data = SEQUENCES[:, 0] if form.get("step") else SEQUENCES
    result = chipfit.quantize(Recurrent(**form).eval(), [data], platform=platform, progress=False)
    assert {n.exec for n in result.plan.nodes.values() if n.op == "LSTM"} == {"int"}
    file = result.export(tmp_path / "m.onnx")
    assert "DynamicQuantizeLSTM" in {n.op_type for n in onnx.load(file).graph.node}
    check = result.verify([data])
    assert check.exact, check
    assert any("one thread" in w for w in check.warnings)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: data.numpy()})
    np.testing.assert_array_equal(result.device_model(data).detach().numpy(), got)


def test_an_lstm_is_as_near_to_the_float_network_as_by_the_runtimes_own_quantizer(tmp_path):
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = Recurrent().eval()
    with torch.no_grad():
        model.layer.weight_hh_l0.mul_(3)
        want = model(SEQUENCES).numpy()
    in_float(model, [SEQUENCES], "ort_cpu").export(tmp_path / "float.onnx")
    given = {"op_types_to_quantize": ["LSTM", "MatMul"], "per_channel": True, "weight_type": QuantType.QInt8}
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "theirs.onnx", **given)
    result = chipfit.quantize(model, [SEQUENCES], platform="ort_dynamic@VNNI", progress=False)
    result.export(tmp_path / "ours.onnx")
    errors = []
    for file in ("ours.onnx", "theirs.onnx"):
        session = onnxruntime.InferenceSession(tmp_path / file, providers=["CPUExecutionProvider"])
        errors.append(
            float(np.square(session.run(None, {session.get_inputs()[0].name: SEQUENCES.numpy()})[0] - want).sum())
        )
    assert errors[0] < 1.5 * errors[1]


def test_the_hyperbolic_tangent_is_the_runtimes_own():
    x = torch.randn(20001, generator=torch.Generator().manual_seed(0)) * 4
    made = onnx_of("y = Tanh(x)", inputs={"x": [None]})
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(tanh(x).numpy(), session.run(None, {"x": x.numpy()})[0])


def test_an_lstm_stays_in_float_by_request(tmp_path):
    result = chipfit.quantize(
        Recurrent().eval(), [SEQUENCES], platform="ort_dynamic", overrides={"layer": "float"}, progress=False
    )
    result.export(tmp_path / "m.onnx")
    kinds = {n.op_type for n in onnx.load(tmp_path / "m.onnx").graph.node}
    assert "LSTM" in kinds and "DynamicQuantizeLSTM" not in kinds
    assert result.verify([SEQUENCES]).exact


def test_a_file_has_no_operator_for_another_layer_that_rounds_at_each_call(tmp_path):
    chip = tmp_path / "chip.yaml"
    chip.write_text(
        "name: chip\nextends: ort_dynamic\nops:\n  - {match: [GRU], use: [{in: ud8, w: w8, b: float, out: float}],"
        " src: [O1], conf: V}\n"
    )
    model = nn.GRU(6, 8, batch_first=True).eval()
    result = chipfit.quantize(model, [SEQUENCES], platform=chip, progress=False)
    with pytest.raises(UnsupportedError, match="GRU .* cannot be written to ONNX.*LSTM alone at run time"):
        result.export(tmp_path / "m.onnx")
