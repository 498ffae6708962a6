"""A framework from outside the package goes all the way; it needs one file."""

import importlib
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import chipfit
from chipfit import frameworks
from chipfit.cli.inputs import example_of, load_model
from chipfit.engine.run import run
from chipfit.errors import CaptureError, GraphError, RegistrationError
from chipfit.registry import ENTRIES, register
from tests.build import NEAREST, quantized, randn

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src/chipfit"


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    ENTRIES["framework"].pop("toy", None)  # of a test that imports every module of the tests
    module = importlib.import_module("toy_framework")
    register("framework", "toy")(module.Toy)  # again, where another test has imported the module
    yield module
    del ENTRIES["framework"]["toy"]


@pytest.fixture
def net(toy):
    def numbers(*shape, scale):
        return (randn(*shape, seed=len(shape)) * scale).numpy()

    first = toy.Conv(numbers(3, 3, 2, 6, scale=0.3), numbers(6, scale=0.1))
    return toy.Net((8, 8, 2), first, toy.Relu(), toy.Pool(), toy.Dense(numbers(6, 4, scale=0.5), numbers(4, scale=0.1)))


def test_the_graph_computes_what_the_model_computes_and_keeps_its_layout(net):
    graph, x = frameworks.capture(net), randn(3, 8, 8, 2)
    assert [n.op for n in graph.nodes if n.op != "Transpose"] == ["Conv2D", "Relu", "Mean", "Linear"]
    assert (graph.framework, graph.data_format, graph.shape("input")) == ("toy", "channels_first", (None, 8, 8, 2))
    (out,) = run(graph, [x]).values()
    torch.testing.assert_close(out, frameworks.adapter_of("toy").run(net, x))


def test_a_model_is_quantized_exported_and_verified_bit_for_bit(net, tmp_path):
    x = randn(16, 8, 8, 2)
    result = quantized(net, x, settings=NEAREST)
    assert result.verify(x).exact
    session = onnxruntime.InferenceSession(result.export(tmp_path / "net.onnx"))
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.equal(torch.from_numpy(out), result.device_model(x))
    assert np.abs(out - net(x.numpy())).max() < 0.05
    assert chipfit.load(result.save(tmp_path / "saved")).verify(x).exact


def test_without_trainable_models_of_its_own_the_simulation_is_one_of_pytorch(net):
    x = randn(16, 8, 8, 2)
    result = quantized(net, x, training="lsq")
    step = frameworks.adapter_of("toy").stepper(result.model, 0.05, 4, False)
    losses = [step([x], torch.arange(16) % 4) for _ in range(4)]
    assert isinstance(result.model, torch.nn.Module) and losses[-1] < losses[0]
    assert result.trained().verify(x).exact


def test_an_operator_of_its_own_stays_a_call_of_the_framework(toy, net):
    x = randn(16, 8, 8, 2)
    result = quantized(toy.Net(net.shape, *net.layers, toy.Wave()), x)
    assert np.abs(result.device_model(x).numpy() - np.asarray(result.model(x).detach())).max() < 1e-5
    with pytest.raises(GraphError, match="no such operator"):
        frameworks.adapter_of("toy").opaque("toy:tide")


def test_the_command_line_finds_it_by_the_suffix_of_a_file(toy, tmp_path):
    with open(file := tmp_path / "net.toy", "wb") as f:
        np.savez(f, kernel=np.eye(3, dtype="f4"), bias=np.zeros(3, "f4"))
    assert frameworks.is_model(load_model(str(file))) and example_of(str(file), ["1,3"]).shape == (1, 3)
    with pytest.raises(CaptureError, match="a .keras file, a .onnx file, a .tflite file, a .toy file, a .pt2 file"):
        load_model("net")


def test_a_layer_that_it_does_not_know_is_refused_by_name(toy):
    with pytest.raises(CaptureError, match="Layer 0 is a function"):
        quantized(toy.Net((3,), lambda x: x), randn(4, 3))


def test_an_adapter_that_cannot_read_is_refused():
    with pytest.raises(RegistrationError, match="The framework 'half' has no 'capture', 'run'"):
        register("framework", "half")(type("Half", (), {"facts": None, "is_model": None}))


def test_no_file_of_the_package_names_it_and_it_is_short():
    lines = (HERE / "toy_framework.py").read_text().splitlines()
    assert len(lines) < 150
    assert [p for p in SOURCE.rglob("*.[py]*") if p.suffix in (".py", ".yaml") and "toy_" in p.read_text()] == []


def test_nothing_outside_its_folder_asks_which_framework_it_is():
    """Where a room needs to know, it reads a fact or calls a method of the adapter."""
    asks = [
        f"{p.relative_to(SOURCE)}: {line.strip()}"
        for p in SOURCE.rglob("*.py")
        if not p.is_relative_to(SOURCE / "frameworks")
        for line in p.read_text().splitlines()
        if 'framework == "' in line or 'framework != "' in line or 'framework_of(model) == "' in line
    ]
    assert asks == []


def test_a_file_is_loaded_by_its_suffix_or_by_the_framework_that_is_asked_for(tmp_path):
    program = torch.export.export(torch.nn.Linear(3, 2), (randn(4, 3),))
    for name in ("model.pt2", "model.program"):
        torch.export.save(program, tmp_path / name)
        assert frameworks.load_torch(str(tmp_path / name))(randn(4, 3)).shape == (4, 2)
    assert frameworks.load(str(tmp_path / "model.pt2"))(randn(4, 3)).shape == (4, 2)
    with pytest.raises(CaptureError, match=r"No framework reads .*model\.program'.*\.pt2.*\.keras|\.keras.*\.pt2"):
        frameworks.load(str(tmp_path / "model.program"))
