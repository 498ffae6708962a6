"""Integers only: nothing of a file computes in floats, or the operators that would are named before calibration."""

from __future__ import annotations

import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from torch import nn

import chipfit
from chipfit import Settings
from chipfit.errors import UnsupportedError
from chipfit.runtimes.tflm import operator_names
from tests.build import model_of, quantized, sequential

CHIPS = ["tflm_cmsis_nn", "ethos_u"]


def types_in(path) -> set[int]:
    graph = schema.ModelT.InitFromObj(schema.Model.GetRootAs(path.read_bytes(), 0)).subgraphs[0]
    return {t.type for t in graph.tensors}


def small(*last: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *last, nn.Flatten(), nn.Linear(8 * 16, 5), nn.Softmax(-1))


@pytest.mark.parametrize("platform", CHIPS)
def test_no_tensor_of_a_file_is_float_and_its_ends_are_integers(tmp_path, platform):
    result = quantized(small(), [torch.randn(4, 3, 6, 6)], platform)
    path = result.export(tmp_path / "net.tflite")
    assert types_in(path) <= {schema.TensorType.INT8, schema.TensorType.INT32}
    assert not {"QUANTIZE", "DEQUANTIZE"} & {*operator_names(path.read_bytes())}
    assert result.verify([torch.randn(4, 3, 6, 6)], path=path).exact


def test_the_setting_gives_the_same_promise_on_a_chip_with_a_float_unit(tmp_path):
    data = [torch.randn(4, 3, 6, 6)]
    free = quantized(small(nn.GELU()), data, "tflite_int8").export(tmp_path / "free.tflite")
    assert "QUANTIZE" in operator_names(free.read_bytes())  # of its float input
    bound = quantized(small(nn.GELU()), data, "tflite_int8", settings=Settings(integer_only=True))
    path = bound.export(tmp_path / "bound.tflite")
    assert types_in(path) <= {schema.TensorType.INT8, schema.TensorType.INT32}
    assert bound.verify(data, path=path).exact
    floats = bound.export(tmp_path / "floats.tflite", io="float")  # what the user asks for is done
    assert schema.TensorType.FLOAT32 in types_in(floats)


@pytest.mark.parametrize(
    "layer, op, helps",
    [
        (nn.GELU(), "Gelu", "approximate='tanh'"),
        (nn.ELU(0.5), "Elu", "Elu with alpha 1"),
        (model_of(lambda m, x: torch.exp(x)), "Exp", "Softmax"),
        (model_of(lambda m, x: torch.sin(x)), "Sin", "outside the file"),
    ],
)
def test_operators_that_a_microcontroller_lacks_are_named_before_calibration(layer, op, helps):
    net, data = small(layer), [torch.randn(4, 3, 6, 6)]
    notes = chipfit.lint(net, data[0], "tflm_cmsis_nn").notes
    assert any(note.startswith("warning: ") and op in note and helps in note for note in notes), notes
    with pytest.raises(UnsupportedError, match="cannot run in integers on 'tflm_cmsis_nn'") as refused:
        quantized(net, data, "tflm_cmsis_nn")
    assert op in str(refused.value) and helps in str(refused.value)


def test_an_override_that_keeps_a_layer_in_float_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"Linear '3' cannot run in integers .* overrides"):
        quantized(small(), [torch.randn(4, 3, 6, 6)], "tflm_cmsis_nn", overrides={"3": "float"})
    result = quantized(small(), [torch.randn(4, 3, 6, 6)], "tflm_cmsis_nn")
    with pytest.raises(UnsupportedError, match="cannot run in integers"):
        result.edit({"3": "float"})


def test_indices_have_32_bits_in_the_file_and_64_in_the_model(tmp_path):
    torch.manual_seed(0)
    net = model_of(
        lambda m, t: m.head(m.table(t).flatten(1)).argmax(1), table=nn.Embedding(20, 4), head=nn.Linear(20, 6)
    )
    tokens = torch.randint(0, 20, (8, 5))
    result = quantized(net, [tokens], "tflm_cmsis_nn")
    path = result.export(tmp_path / "net.tflite")
    assert schema.TensorType.INT64 not in types_in(path)
    found = result.verify([torch.randint(0, 20, (8, 5))], path=path)
    assert found.exact and found.outputs[0].elements == 8, found.summary()


def test_repetitions_become_concatenations_where_the_runtime_has_no_kernel_for_them():
    result = quantized(
        model_of(lambda m, x: torch.sigmoid(x).repeat(1, 2, 1, 3)), [torch.randn(2, 3, 4, 4)], "tflm_cmsis_nn"
    )
    found = result.verify([torch.randn(2, 3, 4, 4)])
    assert found.exact and dict(found.executed)["CONCATENATION"] == 2, found.executed


def test_a_size_that_is_read_is_no_float_operator():
    def forward(m, x):
        return m.head(torch.relu(m.body(x)) + m.shift.expand(x.size(0), -1))

    model = model_of(forward, body=nn.Linear(8, 8), head=nn.Linear(8, 4))
    model.shift = nn.Parameter(torch.randn(1, 8))
    with pytest.raises(UnsupportedError, match=r"^Expand '[^']*' cannot run in integers on 'tflm_cmsis_nn'\. Got"):
        chipfit.quantize(model.eval(), torch.randn(8, 8), platform="tflm_cmsis_nn", progress=False)
