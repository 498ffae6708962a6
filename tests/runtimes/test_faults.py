"""Faults of every runtime: processes that end, hang or print, operators that it lacks, inputs that do not fit."""

import contextlib
import os
import signal

import numpy as np
import onnx
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from torch import nn

from chipfit.errors import RuntimeUnavailable
from chipfit.registry import entries, lookup
from chipfit.runtimes import installed
from chipfit.runtimes.child import Child
from tests.build import model_of, quantized
from tests.runtimes.test_litert import packed

PLATFORMS = {
    **dict.fromkeys(("litert", "litert_reference", "litert_optimized"), "tflite_int8"),
    "onnxruntime": "ort_cpu",
    "openvino": "openvino_cpu",
    "qnn": "ort_qnn_ep",
    "tflm": "tflm_cmsis_nn",
    "executorch": "executorch_xnnpack",
}
APART = "tflm", "executorch", "qnn"  #: in processes of their own
ANSWER = "import os, pickle, sys\npickle.load(sys.stdin.buffer)\n{}\npickle.dump(('', 7), sys.stdout.buffer)\n"


def test_every_runtime_is_tested():
    assert PLATFORMS.keys() == entries("runtime").keys()


def zeros(*shapes):
    return [np.zeros(s, np.float32) for s in shapes]


@pytest.fixture(scope="module")
def file(request, tmp_path_factory):
    """A runtime and a file whose inputs are an image and a state of 5 numbers."""
    if not installed(entries("runtime")[request.param]):
        pytest.skip(f"{request.param} is not installed")
    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(3, 4, 3), "cell": nn.Linear(5, 4)}
    net = model_of(lambda m, x, memory: m.conv(x).relu().mean((2, 3)) + m.cell(memory).tanh(), **layers)
    data = [(torch.randn(2, 3, 6, 6), torch.randn(2, 5)) for _ in range(2)]
    suffix = entries("runtime")[request.param].declares.suffix
    result = quantized(net, data, PLATFORMS[request.param])
    return request.param, result.export(tmp_path_factory.mktemp("file") / f"net{suffix}")


def opened(file):
    return lookup("runtime", file[0])(file[1])


@pytest.fixture(scope="module")
def device(file):
    """The runtime with its file: what it refuses leaves it able to go on."""
    return opened(file)


@pytest.mark.parametrize("file", PLATFORMS, indirect=True)
@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (
            [(2, 3, 6, 6), (2, 6)],
            r"^Input '(memory|input 1)' does not fit the file. Got: \[2, 6\]. Allowed: \[\w+, 5\]",
        ),
        (
            [(2, 3, 7, 6), (2, 5)],
            r"^Input '(x|input 0)' does not fit the file. Got: \[2, 3, 7, 6\]. Allowed: \[\w+, 3, 6",
        ),
        ([(2, 3, 6), (2, 5)], r"^Input '(x|input 0)' does not fit the file. Got: \[2, 3, 6\]"),
        ([(2, 3, 6, 6), (3, 5)], r"does not fit the file. Got: \[3, 5\]. Allowed: \[2, 5\]|cannot run|OpenVINO"),
        ([(2, 3, 6, 6)], "^The inputs do not fit the file. Got: 1 inputs. Allowed: (x, memory|input 0, input 1)"),
        ([], "^The inputs do not fit the file. Got: 0 inputs"),
    ],
    ids=["state", "image", "axes", "samples", "one missing", "none"],
)
def test_an_input_that_does_not_fit_the_file_is_named(device, shapes, words):
    with pytest.raises(RuntimeUnavailable, match=words):
        device.run(zeros(*shapes))


@pytest.mark.parametrize("file", PLATFORMS, indirect=True)
def test_other_inputs_give_results_or_typed_errors(device):
    image, state = zeros((2, 3, 6, 6), (2, 5))
    for wrong in (image.astype(np.int64), image.astype(np.float64), np.full(image.shape, "a"), image[:0]):
        with contextlib.suppress(RuntimeUnavailable):
            device.run([wrong, state[: len(wrong)]])
    assert next(iter(device.run([image, state]).values())).shape == (2, 4)


def crashed(number):
    return rf"was ended by signal {number} \({signal.strsignal(number)}"


@pytest.mark.parametrize("file", APART, indirect=True)
def test_a_process_that_ends_or_hangs_is_an_error(file, monkeypatch):
    call, device = zeros((2, 3, 6, 6), (2, 5)), opened(file)
    child = device.child
    monkeypatch.setattr(child, "limit_s", 0.5)
    os.kill(child.process.pid, signal.SIGSTOP)
    with pytest.raises(RuntimeUnavailable, match=r"gave no answer within 0.5 s"):
        device.run(call)
    with pytest.raises(RuntimeUnavailable, match=crashed(signal.SIGKILL)):
        device.run(call)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("print('full', file=sys.stderr, flush=True); os.abort()", crashed(signal.SIGABRT) + r"\) \(full\)"),
        ("os.kill(os.getpid(), 11)", crashed(signal.SIGSEGV)),
        ("import time; time.sleep(60)", "gave no answer within 0.2 s"),
        ("print('N.garbage', flush=True); sys.stdin.read()", "gave an answer that cannot be read"),
        ("sys.exit(3)", "ended with code 3"),
    ],
)
def test_a_process_that_gives_no_answer_is_an_error_with_its_last_words(tmp_path, line, words):
    (tmp_path / "child.py").write_text(ANSWER.format(line))
    with pytest.raises(RuntimeUnavailable, match=rf"^Toy {words}"):
        Child(str(tmp_path / "child.py"), "Toy", limit_s=0.2 if "sleep" in line else 120).ask("run")


def test_what_a_runtime_prints_is_kept_from_the_users_screen(tmp_path, capfd):
    (tmp_path / "child.py").write_text(ANSWER.format("print('hello', file=sys.stderr, flush=True)"))
    child = Child(str(tmp_path / "child.py"), "Toy")
    assert child.ask("run") == 7
    assert child.printed() == "hello\n"
    assert capfd.readouterr() == ("", "")


def without_kernel(path):
    """Change a file so that it needs an operator, or a delegate, that no runtime has; return it and the name."""
    if path.suffix == ".onnx":
        model = onnx.load(path)
        next(n for n in model.graph.node if n.op_type == "Conv").op_type = "NoSuchOperator"
        return model.SerializeToString(), "NoSuchOperator"
    if path.suffix == ".pte":
        return path.read_bytes().replace(b"XnnpackBackend", b"NoSuchDelegate"), "NoSuchDelegate"
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(path.read_bytes(), 0))
    code = next(c for c in model.operatorCodes if c.builtinCode == schema.BuiltinOperator.CONV_2D)
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.CUSTOM
    code.customCode = b"NoSuchOperator"
    return packed(model), "NoSuchOperator"


@pytest.mark.parametrize("file", PLATFORMS, indirect=True)
def test_an_operator_that_the_runtime_lacks_is_named(file, tmp_path, capfd):
    name, path = file
    content, lacking = without_kernel(path)
    (bad := tmp_path / path.name).write_bytes(content)
    with pytest.raises(RuntimeUnavailable, match=rf"(?s){lacking}.* Where: .*{path.name}"):
        lookup("runtime", name)(bad).run(zeros((2, 3, 6, 6), (2, 5)))
    assert capfd.readouterr() == ("", "")
