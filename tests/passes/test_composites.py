"""Composites become parts with integer kernels before formats are decided, where their rounding costs little."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.engine.run import run
from chipfit.graph.check import check
from chipfit.passes.composites import close_composites, open_composites
from tests.build import graph_of, model_of, quantized, randn, sqnr_db

LITERT = ["tflite_int8", "tflm_cmsis_nn", "ethos_u", "edgetpu"]


def gated():
    """Return a squeeze-and-excite block with SiLU and hard sigmoid, as EfficientNet has it."""

    def forward(m, x):
        x = m.act(m.stem(x))
        gate = m.gate(m.up(m.inner(m.down(x.mean((2, 3), keepdim=True)))))
        return m.head((x * gate).mean((2, 3)))

    layers = {"stem": nn.Conv2d(3, 8, 3), "down": nn.Conv2d(8, 4, 1), "up": nn.Conv2d(4, 8, 1), "head": nn.Linear(8, 4)}
    return model_of(forward, act=nn.SiLU(), inner=nn.SiLU(), gate=nn.Hardsigmoid(), **layers)


def images(count=16):
    return torch.randn(count, 3, 10, 10, generator=torch.Generator().manual_seed(3))


def build(platform="tflite_int8", model=gated, data=images, **options):
    torch.manual_seed(0)
    return quantized(model(), data(), platform, **options)


def in_float(result):
    return [n.name for n in result.plan.nodes.values() if n.exec == "float"]


@pytest.mark.parametrize("platform", LITERT)
def test_a_block_with_silu_and_hard_sigmoid_has_no_float_operator(platform):
    result = build(platform)
    assert in_float(result) == []
    parts = [(n.op, n.layer) for n in result.graph.nodes if n.composite]
    assert parts[:2] == [("Sigmoid", "act"), ("Mul", "act")]
    assert parts[-3:] == [("Add", "gate"), ("Relu6", "gate"), ("Mul", "gate")]
    assert "2 Swish became parts with integer kernels: Sigmoid, Mul" in result.plan.rewrites


def test_the_file_of_such_a_block_takes_and_returns_integers_and_is_exact(tmp_path):
    from ai_edge_litert.interpreter import Interpreter

    result = build()
    path = result.export(tmp_path / "gated.tflite", io="int8")
    details = Interpreter(str(path)).get_tensor_details()
    assert {d["dtype"].__name__ for d in details} <= {"int8", "int32"}
    assert result.verify(images()).exact


@pytest.mark.parametrize("low, high", [(0.0, 0.5), (-0.3, 0.4), (None, 0.2), (-0.1, None), (-30.0, 40.0)])
def test_a_clamp_stays_in_integers_and_its_grid_covers_what_it_returns(low, high, tmp_path):
    from ai_edge_litert.interpreter import Interpreter

    def clamped(m, x):
        return m.b(m.a(x).clamp(low, high).mean((2, 3)))

    result = build(model=lambda: model_of(clamped, a=nn.Conv2d(3, 8, 3), b=nn.Linear(8, 4)))
    details = Interpreter(str(result.export(tmp_path / "clamp.tflite", io="int8"))).get_tensor_details()
    assert {d["dtype"].__name__ for d in details} <= {"int8", "int32"}
    assert result.verify(images()).exact
    torch.manual_seed(0)
    seen = nn.Conv2d(3, 8, 3)(images()).detach().clamp(low, high)
    low, high = min(float(seen.min()), 0.0), max(float(seen.max()), 0.0)
    clamp = result.plan[next(n for n in result.graph.nodes if n.op in ("Min", "Max")).output]
    assert 0.9 * (high - low) < float(clamp.scale) * 255 < 1.06 * (high - low)


def test_two_clamps_with_the_same_bounds_have_scales_of_their_own():
    def forward(m, x):
        return m.b((F.hardtanh(m.a(x), -0.6, 0.6) / 16).clamp(-0.6, 0.6).mean((2, 3)))

    result = build(model=lambda: model_of(forward, a=nn.Conv2d(3, 8, 3), b=nn.Linear(8, 4)))
    first, second = (result.plan[n.output] for n in result.graph.nodes if n.op == "Min")
    assert float(first.scale) == pytest.approx(16 * float(second.scale), rel=0.02)


def test_a_norm_and_attention_are_exact_in_integers_and_close_to_float():
    def forward(m, x):
        x = x + m.attention(m.first(x), m.first(x), m.first(x), need_weights=False)[0]
        return m.head(m.elu(m.hidden(m.second(x))).mean(1))

    def model():
        layers = {"attention": nn.MultiheadAttention(16, 2, batch_first=True), "hidden": nn.Linear(16, 16)}
        norms = {"first": nn.LayerNorm(16), "second": nn.RMSNorm(16), "elu": nn.ELU(0.5)}
        return model_of(forward, **layers, **norms, head=nn.Linear(16, 4))

    def data():
        return torch.randn(32, 6, 16, generator=torch.Generator().manual_seed(3))

    result = build(model=model, data=data)
    kinds = {n.composite_op for n in result.graph.nodes if n.composite}
    assert {"LayerNorm", "RMSNorm"} <= kinds
    assert not {n.composite for n in result.graph.nodes} & {*in_float(result)}
    torch.manual_seed(0)
    y = model().eval()(data())
    assert (result.model(data()) - y).square().mean() < 0.01 * y.square().mean()
    assert result.verify(data()).exact


@pytest.mark.parametrize("platform, whole", [("tflite_int8", True), ("ethos_u", False)])
def test_an_elu_is_one_kernel_of_litert_and_its_parts_on_an_npu_that_lacks_it(platform, whole):
    result = build(platform, lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ELU(), nn.Conv2d(8, 4, 1)))
    ops = [n.op for n in result.graph.nodes]
    assert in_float(result) == [] and ("Elu" in ops) == whole and ("Exp" in ops) != whole


@pytest.mark.parametrize("platform", ["ort_cpu", "ethos_u", "st_edge_ai"])
def test_rotary_positions_are_integers_where_no_kernel_negates(platform):
    cos, sin = (f(torch.arange(6.0)).repeat(2) for f in (torch.cos, torch.sin))

    def forward(m, x):
        x = m.a(x)
        first, second = x.chunk(2, -1)
        return m.b(x * m.cos + torch.cat([-second, first], -1) * m.sin)

    result = quantized(
        model_of(forward, a=nn.Linear(8, 12), b=nn.Linear(12, 3), cos=cos, sin=sin), randn(32, 8), platform
    )
    assert "float" not in {n.exec for n in result.plan.nodes.values()}
    assert result.verify([randn(4, 8, seed=1)]).exact


def test_a_roll_joins_two_slices_where_no_kernel_gathers():
    layers = {"a": nn.Conv2d(3, 4, 3, padding=1), "b": nn.Conv2d(4, 4, 3, padding=1)}
    net = model_of(lambda m, x: m.b(torch.roll(m.a(x), (1, -2), (2, 3))), **layers)
    result = quantized(net, torch.randn(8, 3, 6, 8), "xnnpack")
    runs = [n.exec for n in result.plan.nodes.values() if n.op in ("Slice", "Concat")]
    assert runs == ["follow", "follow", "follow"] * 2
    assert result.verify([torch.randn(4, 3, 6, 8)]).exact


@pytest.mark.parametrize("move", [lambda x: x[:, [3, 0, 2, 2]], lambda x: x.flip(3), lambda x: x[..., [1, 5]]])
def test_elements_that_are_gathered_stay_integers_on_onnx_runtime(move):
    layers = {"a": nn.Conv2d(3, 4, 3, padding=1), "b": nn.Conv2d(4, 4, 1)}
    result = quantized(model_of(lambda m, x: m.b(move(m.a(x))), **layers), torch.randn(8, 3, 6, 8))
    assert "float" not in {n.exec for n in result.plan.nodes.values()}
    assert result.verify([torch.randn(4, 3, 6, 8)]).exact


@pytest.mark.parametrize("pattern", ["act", "Swish", "SiLU", "silu"])
def test_an_override_of_the_layer_or_the_operator_keeps_the_whole_in_float(pattern):
    result = build(overrides={pattern: "float"})
    (whole,) = (n for n in result.graph.nodes if n.layer == "act")
    assert (whole.op, result.plan.nodes[whole.name].exec) == ("Swish", "float")


def test_parts_are_named_by_their_layer_in_overrides_and_edits():
    result = build(overrides={"act": {"rule": "no_clipping"}})
    assert {result.decision.assignment.tensors[v].rule for v in ("silu", "silu/sigmoid")} == {"no_clipping"}
    edited = build().edit({"act": "float"})
    assert [(n.op, n.exec) for n in edited.plan.nodes.values() if n.layer == "act"] == [("Swish", "float")]
    again = edited.edit({})
    assert [(n.op, n.exec) for n in again.plan.nodes.values() if n.layer == "act"] == [
        ("Sigmoid", "int"),
        ("Mul", "int"),
    ]


def test_parts_survive_a_saved_result(tmp_path):
    result = build()
    result.save(tmp_path / "saved")
    loaded = chipfit.load(tmp_path / "saved")
    assert [n for n in loaded.graph.nodes if n.composite] == [n for n in result.graph.nodes if n.composite]
    edited = loaded.edit({"Swish": "float"})
    assert {n.layer for n in edited.plan.nodes.values() if n.exec == "float"} == {"act", "inner"}


def test_the_model_of_parts_returns_and_trains_what_the_original_did():
    def forward(m, x):
        return m.head(m.norm(m.act(m.stem(x))).mean((2, 3)))

    def model():
        layers = {"act": nn.SiLU(), "norm": nn.GroupNorm(2, 8), "head": nn.Linear(8, 4)}
        return model_of(forward, stem=nn.Conv2d(3, 8, 3), **layers)

    result = build(model=model)
    assert "GroupNorm" in {n.composite_op for n in result.graph.nodes}
    torch.manual_seed(0)
    difference = result.model(images()) - model()(images())
    assert difference.abs().max() < 0.05
    result.model.train()
    result.model(images()).square().sum().backward()
    assert len([p for p in result.model.parameters() if p.grad is not None and p.grad.abs().sum() > 0]) >= 6


def test_a_norm_of_rows_that_differ_a_thousandfold_stays_whole_in_float_with_a_note():
    def data():  # in 8 bits the variance of most rows is 0
        return torch.randn(64, 8, generator=torch.Generator().manual_seed(3)) * torch.logspace(-2, 2, 64)[:, None]

    def model():
        return model_of(lambda m, x: m.b(m.norm(m.a(x))), a=nn.Linear(8, 8), norm=nn.LayerNorm(8), b=nn.Linear(8, 4))

    result = build(model=model, data=data)
    assert [n.op for n in result.graph.nodes if n.layer == "norm"] == ["LayerNorm"]
    assert any(note.startswith("LayerNorm 'norm' stays whole, in float") for note in result.plan.rewrites)


def test_a_norm_that_ends_up_whole_has_the_statistics_of_its_result():
    """In parts, the rectifier behind it is a part of its last kernel, so that the result of the norm is not stored."""
    layers = {"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(4, 4, 1), "norm": nn.BatchNorm2d(8), "c": nn.Conv2d(8, 4, 1)}

    def model():
        return model_of(lambda m, x: m.c(m.norm(torch.cat([y := m.a(x), m.b(y)], 1)).relu()), **layers)

    result = build(model=model, settings=chipfit.Settings(results="float"))
    assert "BatchNorm" in [n.op for n in result.graph.nodes] and result.plan.quantized("batch_norm")


def norms(forward, **layers):
    """Return a network with statistics of batch norms as after training: one factor is 0, one below 0."""
    torch.manual_seed(0)
    model = model_of(forward, **layers)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.uniform_(0, 20), m.running_var.uniform_(100, 5000)
            m.weight.data.uniform_(0.5, 1.5), m.bias.data.uniform_(-0.5, 0.5)
            m.weight.data[:2] = torch.tensor([0.0, -1.0])
    return model


def behind_an_activation():
    """Return a network of convolution, ReLU and batch norm, as CREPE has it; the padding hinders its folding."""

    def forward(m, x):
        return m.b(F.max_pool2d(m.norm(m.a(x).relu()), 2))

    return norms(forward, a=nn.Conv2d(3, 16, 3), norm=nn.BatchNorm2d(16), b=nn.Conv2d(16, 4, 3, padding=1))


def in_front_of_an_activation():
    """Return a layer of DenseNet: what is joined is normalised."""

    def forward(m, x):
        y = m.a(x)
        return m.b(torch.cat([y, m.c(m.norm(y).relu())], 1))

    layers = {"a": nn.Conv2d(3, 16, 3), "norm": nn.BatchNorm2d(16), "c": nn.Conv2d(16, 4, 1), "b": nn.Conv2d(20, 4, 1)}
    return norms(forward, **layers)


@pytest.mark.parametrize("make", [behind_an_activation, in_front_of_an_activation])
@pytest.mark.parametrize("platform", [*LITERT[:2], "ort_cpu"])
def test_a_batch_norm_that_nothing_absorbs_is_one_integer_operator_of_its_factors(platform, make):
    model, data = make(), images()
    result = chipfit.quantize(model, [data * 30], platform, progress=False)
    (found,) = (n for n in result.graph.nodes if n.layer == "norm" and n.op != "Relu")
    assert (found.op, result.plan.nodes[found.name].exec) == ("DepthwiseConv2D", "int")
    factors = model.norm.weight / (model.norm.running_var + model.norm.eps).sqrt()
    torch.testing.assert_close(result.graph.weights[found.weight].flatten(), factors.detach())
    assert result.verify(images(4) * 30).exact


@pytest.mark.parametrize("platform, op", [("ort_cpu", "BatchNorm"), ("tflite_int8", "DepthwiseConv2D")])
def test_a_batch_norm_of_few_channels_stays_whole_where_its_integer_kernel_is_slow(platform, op):
    layers = {"norm": nn.BatchNorm2d(3), "b": nn.Conv2d(3, 4, 3, padding=1)}
    result = chipfit.quantize(norms(lambda m, x: m.b(m.norm(x)), **layers), [images() * 30], platform, progress=False)
    (found,) = (n for n in result.graph.nodes if n.layer == "norm")
    assert found.op == op and result.verify(images(4) * 30).exact


def test_a_composite_with_a_part_without_integer_kernel_stays_whole():
    result = build("ort_cpu", lambda: model_of(lambda m, x: m.a(F.mish(x)), a=nn.Conv2d(3, 4, 3)))
    assert [n.op for n in result.graph.nodes] == ["Mish", "Conv2D"]


def test_closed_parts_are_the_whole_again():
    graph = graph_of("y = HardSigmoid(x)", "z = Swish(y)", "w = HardSigmoid(z)", shape=(2, 3))
    kernels = {"Add", "Relu6", "Mul", "Sigmoid"}
    opened, wholes = open_composites(graph, lambda _, n: n.op in kernels, kernels)
    check(opened)
    x = torch.randn(2, 3)
    torch.testing.assert_close(run(opened, [x]), run(graph, [x]))
    some = close_composites(opened, {"y": wholes["y"]})
    check(some)
    assert [n.op for n in some.nodes] == ["HardSigmoid", "Sigmoid", "Mul", "Add", "Relu6", "Mul"]
    closed = close_composites(opened, wholes)
    assert (closed.nodes, closed.values, closed.weights) == (graph.nodes, graph.values, graph.weights)


def vectors(size, exponent=0.0):
    """Return the embeddings of a small network with unit length, and data; `exponent` spreads the lengths."""
    torch.manual_seed(0)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(4))
    lengths = torch.linspace(-exponent, exponent, len(x)).exp().unsqueeze(1)
    return model_of(lambda m, x: F.normalize(m.a(x), dim=1), a=nn.Linear(8, size, bias=False)).eval(), x * lengths


@pytest.mark.parametrize("size", [128, 256])
def test_long_unit_vectors_are_more_exact_than_the_scale_of_the_kernel_allows(size):
    model, x = vectors(size)
    result = quantized(model, x, "tflite_int8")
    assert [n.op for n in result.graph.nodes if n.composite] == ["Mul", "Sum", "Max", "Rsqrt", "Mul"]
    assert in_float(result) == []
    of_kernel = 10 * math.log10(12 * 128**2 / size)  # rounding errors of L2_NORMALIZATION, whose scale is 1/128
    with torch.no_grad():
        want = model(x)
    assert sqnr_db(want, result.device_model(x)) > of_kernel + 3
    assert result.verify(x).exact


@pytest.mark.parametrize(("size", "exponent"), [(2, 0.0), (16, 2.5)])  # codes are used up; some lengths are lost
def test_unit_vectors_keep_the_kernel_where_parts_are_no_more_exact(size, exponent):
    model, x = vectors(size, exponent)
    result = quantized(model, x, "tflite_int8")
    assert [n.op for n in result.graph.nodes][-1] == "L2Norm"
    assert result.verify(x).exact


def test_results_in_float_on_request_leave_kernels_with_a_scale_of_their_own():
    model, x = vectors(128)
    result = quantized(model, x, "tflite_int8", settings=chipfit.Settings(results="float"))
    assert [n.op for n in result.graph.nodes][-1] == "L2Norm" and in_float(result) == []
