"""Functions of each element become tables of 8-bit integers where a chip looks them up, and stay otherwise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.engine.curves import steps_of
from tests import build
from tests.build import model_of

X = build.images(4)


class Between(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 1)

    def forward(self, x):
        return self.last(self.function(self.first(x)))


def quantized(function, platform="tflite_int8"):
    return chipfit.quantize(Between(function).eval(), [X, X + 0.1], platform=platform, progress=False)


def steps(result):
    return [[s.op for s in steps_of(n.attrs["steps"])] for n in result.graph.nodes if n.op == "Curve"]


FUNCTIONS = {
    "softplus": (F.softplus, ["Softplus"]),
    "mish": (F.mish, ["Mish"]),
    "selu": (F.selu, ["Selu"]),
    "softsign": (F.softsign, ["Abs", "Add", "Div"]),
    "parts chosen by a condition": (lambda x: torch.where(x > 0.3, x.clamp(-1, 0.8), 0.1 * x), None),
    "steps": (lambda x: torch.round(4 * x) / 4, None),
    "a signed root": (lambda x: torch.sign(x) * torch.sqrt(torch.abs(x) + 1e-3), None),
    "a root with others around it": (lambda x: (x + torch.sqrt(x * x + 4)) / 2, ["Mul", "Add", "Sqrt", "Add"]),
    "remainder": (lambda x: x - torch.floor(x), ["Floor", "Sub"]),
    "sine": (lambda x: torch.sin(3 * x), None),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_each_element_is_one_table_with_equal_integers_on_litert(name):
    function, ops = FUNCTIONS[name]
    result = quantized(function)
    assert len(steps(result)) == 1 and ops in (None, *steps(result))
    assert result.device_model(X).shape == (4, 2, 6, 6) and not result.device_model(X).isnan().any()
    assert result.verify([X]).exact


def test_a_table_holds_the_function_of_every_integer():
    result = quantized(F.softsign)
    (n,) = [n for n in result.graph.nodes if n.op == "Curve"]
    x, y = (result.plan[v] for v in (n.data, n.output))
    reals = x.dequantize(torch.arange(-128, 128)).double()
    found = y.dequantize(y.quantize((reals / (1 + reals.abs())).float()))
    assert (found - reals / (1 + reals.abs())).abs().max() <= 0.5001 * float(y.scale)


def test_what_reads_two_tensors_is_no_table():
    two = model_of(lambda m, x: m.a(x) * (1 + m.b(x).abs()), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1))
    result = chipfit.quantize(two, [X], platform="tflite_int8", progress=False)
    assert not steps(result)


@pytest.mark.parametrize("platform", ["tflite_int8", "tflm_cmsis_nn"])
def test_a_division_by_computed_values_is_a_product_with_a_table_of_reciprocals(platform):
    result = quantized(lambda x: x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-3), platform)
    assert ["Reciprocal"] in steps(result) and {n.exec for n in result.plan.nodes.values()} <= {
        "int",
        "table",
        "follow",
    }
    assert result.verify([X]).exact


def test_activations_with_kernels_stay_what_they_are():
    result = quantized(lambda x: F.gelu(F.silu(torch.tanh(F.relu(x)))))
    assert not steps(result)


def test_chips_without_tables_keep_the_operators():
    assert "Softplus" in {n.op for n in quantized(F.softplus, "ort_cpu").graph.nodes}


def test_a_table_kept_in_float_is_written_as_its_operators(tmp_path):
    model = Between(F.softsign).eval()
    (name,) = [n.name for n in quantized(F.softsign).graph.nodes if n.op == "Curve"]
    result = chipfit.quantize(model, [X], platform="tflite_int8", overrides={name: "float"}, progress=False)
    interpreter = pytest.importorskip("ai_edge_litert.interpreter").Interpreter(
        model_path=str(result.export(tmp_path / "m.tflite"))
    )
    assert {"ABS", "ADD", "DIV"} <= {o["op_name"] for o in interpreter._get_ops_details()}
    assert result.verify([X]).exact


def test_gelu_is_a_table_on_microcontrollers():
    pytest.importorskip("tflite_micro")
    result = quantized(F.gelu, "tflm_cmsis_nn")
    assert steps(result) == [["Gelu"]] and result.verify([X]).exact


@pytest.mark.parametrize("text", ["[]", '[["Conv2D", ["0"], {}]]', '[["Abs", ["1"], {}]]', '[["Abs", [0], {}]]'])
def test_steps_that_are_no_function_of_elements_are_refused(text):
    with pytest.raises(ValueError, match="curve"):
        steps_of(text)


def test_a_table_trains_and_survives_saving(tmp_path):
    result = quantized(F.mish)
    result.model(X).square().mean().backward()
    assert result.model.first.weight.grad.abs().sum() > 0
    result.save(tmp_path / "saved")
    assert torch.equal(chipfit.load(tmp_path / "saved").device_model(X), result.device_model(X))
