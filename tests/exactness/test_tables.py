"""Weights in look-up tables in ONNX files: codes, a table, a Gather; and files that cannot hold them."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from chipfit.errors import UnsupportedError
from tests.build import model_of, platform_of, precise_session, quantized
from tests.training.small import DATA, Net, train


def chip(bits=4, value_bits=8, per="tensor"):
    """A chip with palettes of weights, whose kernels are ONNX Runtime's."""
    table = {"value_bits": value_bits, "entries": 1 << bits, "per": "tensor"}
    return platform_of(
        {
            "match": ["@conv", "Linear"],
            "use": [{"in": "a8", "w": "lut", "b": "b32", "out": "a8"}],
            "rules": [{"mono": {"b": 1, "in0": -1, "w": -1}, "eq": 1}],
        },
        {"match": ["Embedding"], "use": [{"w": "lut", "out": "a8"}]},
        {"match": ["Relu", "Add", "GlobalAvgPool"], "use": [{"in": "a8", "out": "a8"}]},
        formats={
            "a8": {"bits": 8, "zero": "any", "signed": False},
            "lut": {"kind": "lut", "bits": bits, "lut": table, "per": per},
            "b32": {"bits": 32, "per": per},
        },
        math={
            "kernels": "onnxruntime",
            "acc": [{"bits": 32}],
            "q_round": "half_even",
            "requant": {"form": "float", "round": "half_even", "passes": 1},
        },
        runtimes=["onnxruntime"],
    )


def twice():
    """Return a network that calls one layer twice."""
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(3, 3, 3, padding=1), "head": nn.Linear(3, 4)}
    return model_of(lambda m, x: m.head(m.conv(torch.relu(m.conv(x))).mean((2, 3))), **parts)


def initialisers(file):
    return {i.name: numpy_helper.to_array(i) for i in onnx.load(str(file)).graph.initializer}


@pytest.mark.parametrize("network", [Net, twice])
@pytest.mark.parametrize(("bits", "per"), [(1, "tensor"), (2, "channel"), (4, "tensor"), (4, "channel"), (8, "tensor")])
def test_weights_in_tables_of_bytes_run_in_integers(network, bits, per, tmp_path):
    result = quantized(network(), DATA, chip(bits, per=per))
    file = result.export(tmp_path / "net.onnx")
    found = result.verify([DATA[0], 3 * DATA[1]], path=file)
    assert found.exact
    assert {"QLinearConv", "Conv"} & found.executed.keys() == {"QLinearConv"}
    held = initialisers(file)
    for name, t in result.plan.tensors.items():
        if t.role == "weight":
            codes, table = held[f"{name}_q_codes"], held[f"{name}_table"]
            assert (codes.dtype, table.dtype) == (np.uint8, np.int8) and len(table) <= 1 << bits
            by_hand = torch.from_numpy(table[codes].astype("float32"))
            scale = t.scale.view(-1, *[1] * (codes.ndim - 1)) if t.scale.dim() else t.scale
            assert torch.equal(by_hand * scale, t.stored.round(result.graph.weights[name].detach()))
    session = precise_session(file)
    got = session.run(None, {session.get_inputs()[0].name: DATA[2].numpy()})[0]
    assert np.array_equal(got, result.device_model(DATA[2]).numpy())


def test_levels_that_trained_reach_the_file(tmp_path):
    result = quantized(Net(), DATA, chip(3), training={"weights": "lut", "activations": "lsq"})
    train(result.model, 15, 0.05)
    after = result.trained()
    assert after.verify([2 * DATA[2]]).exact
    held = initialisers(after.export(tmp_path / "net.onnx"))
    assert held["head.weight_table"].tolist() == list(after.plan["head.weight"].grid.table)


def test_a_table_of_wider_numbers_is_gathered_in_float(tmp_path):
    result = quantized(Net(), DATA, chip(4, value_bits=16))
    file = result.export(tmp_path / "net.onnx")
    held = initialisers(file)
    codes, table, scale = (held[f"head.weight_{k}"] for k in ("q_codes", "table", "scale"))
    assert table.dtype == np.float32 and abs(table).max() > 127
    expected = result.plan["head.weight"].round(result.graph.weights["head.weight"].detach())
    assert np.array_equal(table[codes] * scale, expected.numpy())
    found = result.verify([DATA[0]], path=file)
    assert all(not c.fault and c.elements for c in found.held if c.role == "weight")
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    got = session.run(None, {session.get_inputs()[0].name: DATA[2].numpy()})[0]
    assert abs(got - result.model(DATA[2]).detach().numpy()).max() <= float(result.plan["linear"].scale) * 1.01


def test_rows_of_an_embedding_are_entries_of_a_table():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(40, 4))
    words = torch.randint(0, 20, (16, 5))
    assert quantized(net, [words], chip()).verify([words]).exact


@pytest.mark.parametrize("changed", ["head.weight_q_codes", "head.weight_table", "head.weight_scale"])
@pytest.mark.parametrize("value_bits", [8, 16])
def test_another_code_entry_or_scale_in_the_file_is_noticed(changed, value_bits, tmp_path):
    result = quantized(Net(), DATA, chip(value_bits=value_bits))
    file = result.export(tmp_path / "net.onnx")
    assert result.verify([DATA[0]], path=file).exact
    model = onnx.load(str(file))
    (held,) = [i for i in model.graph.initializer if i.name == changed]
    numbers = numpy_helper.to_array(held).copy()
    numbers.reshape(-1)[0] = numbers.reshape(-1)[0] * 0.5 + 1
    held.CopyFrom(numpy_helper.from_array(numbers, changed))
    onnx.save(model, str(file))
    found = result.verify([DATA[0]], path=file)
    assert not found.exact and [c.tensor for c in found.held if c.fault] == ["head.weight"]


@pytest.mark.parametrize(
    ("platform", "suffix", "says"),
    [
        ("coreml", "tflite", r"codes of a table.*export `\.onnx` or JSON"),
        ("nnie", "tflite", r"codes of a table.*export JSON encodings"),
        ("nnie", "onnx", r"holds tables of weights.*activation 'x'.*export JSON encodings"),
    ],
)
def test_a_file_that_cannot_hold_a_table_is_refused_with_the_format_that_can(platform, suffix, says, tmp_path):
    given = {"overrides": {"*": {"bits": 4}}} if platform == "coreml" else {}
    result = quantized(Net(), DATA, platform, **given)
    with pytest.raises(UnsupportedError, match=f"(?s){says}"):
        result.export(tmp_path / f"net.{suffix}")
    assert not [*tmp_path.iterdir()]
    assert result.export(tmp_path / "net.json").is_file()
