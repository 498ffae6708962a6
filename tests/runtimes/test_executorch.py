"""ExecuTorch with XNNPACK: networks of several frameworks, tensors inside its delegates, and files that it refuses."""

import numpy as np
import pytest
import torch
from benchmarks.random_networks import check
from torch import nn

import chipfit
from chipfit.errors import ExportError, RuntimeUnavailable, UnsupportedError
from chipfit.registry import lookup
from tests.build import model_of, quantized, sequential

pytest.importorskip("executorch", reason="executorch is not installed: pip install 'chipfit[executorch]'")
PLATFORM = "executorch_xnnpack"


def network() -> nn.Module:
    """Return convolutions, a sum, a concatenation, pools and a linear layer."""

    def forward(m, x):
        a = m.first(x).relu()
        b = m.depth(a) + a
        c = torch.nn.functional.max_pool2d(torch.cat((b, m.point(a)), 1), 2)
        return m.head(torch.nn.functional.relu6(m.last(c)).mean((2, 3), keepdim=True).flatten(1))

    torch.manual_seed(0)
    first, depth, point = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.Conv2d(8, 4, 1)
    return model_of(forward, first=first, depth=depth, point=point, last=nn.Conv2d(12, 8, 3), head=nn.Linear(8, 5))


@pytest.fixture(scope="module")
def proven(tmp_path_factory):
    data = [torch.randn(8, 3, 12, 12) for _ in range(3)]
    result = quantized(network(), data[:2], PLATFORM)
    return result, data[2], result.export(tmp_path_factory.mktemp("file") / "net.pte")


def test_every_integer_of_a_network_is_the_runtimes(proven):
    result, new, path = proven
    found = result.verify([new], path=path)
    assert found.exact and found.promised, found.summary()
    assert not found.not_compared and not found.float_ops
    assert all(h.elements == result.graph.weights[h.tensor].numel() for h in found.held if h.role != "activation")


def test_the_operators_that_run_in_integers_are_counted(proven):
    _, _, path = proven
    executed = lookup("runtime", "executorch")(path).executed()
    assert executed["XNNConv2d"] == 3 and executed["XNNDepthwiseConv2d"] == executed["XNNFullyConnected"] == 1
    assert executed["XNNConvert"] == 2  # the input's and the output's
    assert not any(name.startswith("aten") for name in executed)


def test_a_simulation_that_is_wrong_is_noticed(proven, monkeypatch):
    result, new, path = proven
    kernels = lookup("kernels", "executorch").kernels

    def off(run, nodes, kernel=kernels["Add"]):
        kernel(run, nodes)
        q = run.codes[nodes[-1].output].clone(memory_format=torch.contiguous_format)
        q.view(-1)[0] += 1 if int(q.view(-1)[0]) < 127 else -1
        run.codes[nodes[-1].output] = q

    monkeypatch.setitem(kernels, "Add", off)
    found = result.verify([new], path=path)
    assert found.verdict == "departs" and "Add" in found.departures[0]


def test_outputs_are_those_of_the_file_without_readable_tensors(proven):
    result, new, path = proven
    make = lookup("runtime", "executorch")
    plain, shown = make(path), make(path, [v for v in result.plan.tensors if result.plan.quantized(v)])
    (y,) = plain.run([new.numpy()]).values()
    got = shown.run([new.numpy()])
    assert np.array_equal(y, next(iter(got.values()))) and len(got) > 8
    assert plain.part == 1 and y.shape == (8, 5)


@pytest.mark.slow
def test_the_batch_of_a_file_is_an_option(proven, tmp_path):
    result, new, path = proven
    device = lookup("runtime", "executorch")(result.export(tmp_path / "four.pte", batch=4))
    one = lookup("runtime", "executorch")(path)
    assert device.part == 4
    assert np.array_equal(*(next(iter(d.run([new.numpy()]).values())) for d in (device, one)))


@pytest.mark.slow
def test_a_layer_kept_in_float_stands_between_integers():
    net = sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    data = [torch.randn(8, 4, 12) for _ in range(2)]
    result = quantized(net, data[:1], PLATFORM, overrides={"2": "float"})
    found = result.verify(data[1:])
    assert found.sound and found.float_ops == {"Conv1D"} and found.differing == 0, found.summary()


def test_a_batch_norm_of_one_axis_that_no_layer_takes_runs_in_float():
    net = sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.BatchNorm1d(8), nn.Tanh())
    net[2].running_mean += 0.3
    found = quantized(net, torch.randn(8, 4, 12), PLATFORM).verify(torch.randn(4, 4, 12))
    assert found.sound and found.float_ops == {"BatchNorm", "Tanh"} and found.differing == 0, found.summary()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("how", [{}, {"bits": 4}, {"bits": 4, "per": "block"}], ids=["8 bits", "4 bits", "blocks"])
def test_linear_layers_that_round_their_data_at_run_time_give_the_runtimes_numbers(how):
    net = sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32, bias=False))
    data = [torch.randn(8, 64) for _ in range(2)]
    found = quantized(net, data[:1], PLATFORM, overrides={"*": {"inputs": "dynamic", **how}}).verify(data[1:])
    blocks = "per" in how  # products of blocks are added in float
    assert found.sound and found.float_ops == ({"Linear"} if blocks else set()), found.summary()
    assert all(h.elements for h in found.held) and found.executed["XNNFullyConnected"] == 2
    assert blocks or not any(o.differing for o in found.outputs)


@pytest.mark.slow
def test_samples_that_are_merged_behind_another_axis_are_compared_in_their_place():
    """As in attention of torch, which computes rows [length * batch, features] of sequences."""

    def forward(m, x):
        rows = m.first(x).transpose(0, 1).reshape(-1, 8)
        return m.second(rows).view(6, -1, 8).transpose(0, 1).relu()

    torch.manual_seed(0)
    result = quantized(
        model_of(forward, first=nn.Linear(4, 8), second=nn.Linear(8, 8)), [torch.randn(4, 6, 4)] * 2, PLATFORM
    )
    found = result.verify([torch.randn(3, 6, 4)])
    assert found.exact and not found.not_compared, found.summary()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("repeated", [False, True])
def test_a_constant_beside_the_samples_is_found_in_the_file(repeated):
    """A token in front of a sequence, as in ViT, and rows of a table behind the samples."""

    def forward(m, x):
        y = m.first(x)
        return m.second(torch.cat([m.token.expand(x.shape[0], -1, -1), y] if repeated else [y[0], m.token[0]], -2))

    torch.manual_seed(0)
    model = model_of(forward, first=nn.Linear(8, 8), second=nn.Linear(8, 4), token=torch.randn(1, 1, 8))
    result = quantized(model, [torch.randn(4 if repeated else 1, 6, 8) for _ in range(2)], PLATFORM)
    found = result.verify([torch.randn(4 if repeated else 1, 6, 8)])
    (constant,) = (h for h in found.held if h.role == "weight" and h.tensor not in ("first.weight", "second.weight"))
    assert found.exact and constant.elements == 8 and not constant.differing


def test_a_network_of_onnx_is_written_as_well(tmp_path):
    onnx = pytest.importorskip("onnx")
    from tests.onnx_models import onnx_node, onnx_of

    draw = np.random.default_rng(0)
    w, v = (draw.standard_normal(s).astype(np.float32) for s in ((6, 3, 3, 3), (4, 6)))
    nodes = [
        onnx_node("c = Conv(x, w)", pads=[1, 1, 1, 1]),
        "r = Relu(c)",
        "p = GlobalAveragePool(r)",
        "f = Flatten(p)",
        onnx_node("y = Gemm(f, v)", transB=1),
    ]
    model = onnx_of(*nodes, inputs={"x": ["n", 3, 8, 8]}, constants={"w": w, "v": v}, opset=13)
    onnx.save(model, tmp_path / "net.onnx")
    data = [draw.standard_normal((4, 3, 8, 8)).astype(np.float32) for _ in range(2)]
    found = chipfit.quantize(str(tmp_path / "net.onnx"), data[:1], platform=PLATFORM, progress=False).verify(data[1:])
    assert found.exact and not found.float_ops, found.summary()


def test_a_quantized_layer_that_xnnpack_leaves_out_is_named_and_can_be_kept_in_float(tmp_path):
    """XNNPACK has no convolution from integers to floats, which `nxp_neutron` computes in front of a sigmoid."""
    model = sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Sigmoid())
    result = quantized(model, [torch.randn(4, 3, 6, 6)], "nxp_neutron")
    with pytest.raises(ExportError, match=r"XNNPACK leaves '2' to kernels .* keep this layer in float"):
        result.export(tmp_path / "net.pte")
    assert result.edit({"2": "float"}).export(tmp_path / "net.pte").exists()


def test_a_program_that_does_not_run_is_not_written(proven, tmp_path, monkeypatch):
    def run(self, inputs):
        assert [x.shape for x in inputs] == [(1, 3, 12, 12)] and not inputs[0].any()
        raise RuntimeUnavailable("ExecuTorch: arg 1 with type id 8")

    monkeypatch.setattr(lookup("runtime", "executorch"), "run", run)
    with pytest.raises(ExportError, match=r"The file was not written: ExecuTorch: arg 1"):
        proven[0].export(tmp_path / "net.pte")
    assert not list(tmp_path.iterdir())


def test_results_of_kernels_of_one_position_lie_channels_first():
    """Kernels outside of XNNPACK refuse operands of two orders; such weights have the strides of both."""
    net = model_of(lambda m, x: (y := m.mix(x)) * y.amax(1, True), mix=nn.Conv2d(3, 8, 1))
    net.mix.weight.data = net.mix.weight.data.as_strided((8, 3, 1, 1), (3, 1, 3, 3))
    x = torch.randn(4, 3, 6, 6)
    assert quantized(net, x, PLATFORM).verify(x).exact


def test_a_file_that_is_not_one_is_refused(proven, tmp_path):
    (tmp_path / "bad.pte").write_bytes(b"not a program at all, and long enough to be one")
    with pytest.raises(RuntimeUnavailable, match="not an ExecuTorch program"):
        lookup("runtime", "executorch")(tmp_path / "bad.pte")
    content = proven[2].read_bytes()
    (tmp_path / "cut.pte").write_bytes(content[: len(content) // 2])
    with pytest.raises(RuntimeUnavailable):
        lookup("runtime", "executorch")(tmp_path / "cut.pte")


def test_formats_without_a_form_are_refused_before_a_file_exists(tmp_path):
    result = quantized(sequential(nn.Conv2d(3, 4, 3)), torch.randn(4, 3, 6, 6), "ort_cpu")
    with pytest.raises(UnsupportedError, match="cannot hold these tensors.*signed integers") as e:
        result.export(tmp_path / "net.pte")
    assert e.value.hint and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [777000004, 4242000006, 4242000026])
def test_values_that_lie_channels_last_between_delegates_are_read_in_the_axes_of_the_program(seed):
    """Reflections, a resized image outside of both, and the mean of one that has as many channels as rows."""
    assert check(seed, "executorch").faults == []
