"""The simulation as a module: what it takes, returns, computes, and that everything one does with a module works."""

import copy
import io
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chipfit.engine.kernels import run_operator
from chipfit.errors import DataError, PlanError, UnknownNameError, UnsupportedError
from chipfit.frameworks.torch.capture import capture
from chipfit.frameworks.torch.lower import lower, read_back
from chipfit.frameworks.torch.modules import (
    BiasQuantizer,
    PytorchActivationQuantizationHolder,
    PytorchQuantizationWrapper,
)
from chipfit.pipeline import quantize
from chipfit.plan.record import Plan
from chipfit.plan.training import Training
from chipfit.quantizers.grids import dequantize
from chipfit.runtimes.onnxruntime import OnnxRuntime
from chipfit.settings import Settings
from chipfit.simulate.integer import simulate
from tests.build import model_of, platform_of, sequential
from tests.training.small import set_share


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.drop, self.fc = nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x, shift=None):
        x = F.relu(self.bn(self.conv1(x)))
        x = F.relu(self.conv2(x) + x)
        x = F.max_pool2d(x, 2).mean((2, 3))
        logits = self.fc(self.drop(x))
        return {"logits": logits if shift is None else logits + shift, "features": x}


X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def result(net):
    return quantize(net, [X], progress=False)


@pytest.fixture
def model(result):
    return lower(result.graph, result.plan)


def _fit(module, example, **options):
    return quantize(module, [example], progress=False, **options)


# ---- names and structure


def test_the_state_dict_has_the_original_names_folded_biases_and_quantizers(net, model):
    names = set(model.state_dict())
    assert set(net.state_dict()) <= names
    assert {n for n in names - set(net.state_dict()) if not n.startswith("quant.")} == {"conv1.bias"}
    assert {"quant.fc_weight.scale", "quant.conv1_weight.scale", "quant.x.scale"} <= names
    assert model.quant.fc_weight is model.quantizer_of("fc.weight")
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad and not n.startswith("quant.")}
    assert frozen == {"bn.weight", "bn.bias"}


def test_the_result_has_the_structure_of_the_original(net, model):
    got, want = model(X), net(X)
    assert list(got) == list(want)
    assert all(got[k].shape == want[k].shape for k in want)
    assert model(X[:1])["logits"].shape == (1, 4)


def test_an_argument_that_was_not_captured_is_refused(model):
    with pytest.raises(DataError, match="captured with other inputs"):
        model(X, shift=X)


def test_arguments_passed_by_name_in_another_order_are_not_swapped():
    left, right = torch.randn(2, 8, 4)
    two = model_of(lambda m, left, right: m.a(left) - m.b(right), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    r = _fit(two, (left, right))
    assert torch.equal(r.model(right=right, left=left), r.model(left, right))
    assert not torch.equal(r.model(right, left), r.model(left, right))


@dataclass
class Prediction:
    scores: torch.Tensor
    extra: tuple[torch.Tensor, int]


def test_dataclasses_tuples_and_constants_come_back_as_they_were():
    structured = model_of(lambda m, x: Prediction(m.fc(x), (m.fc(x).relu(), 7)), fc=nn.Linear(4, 3))
    out = _fit(structured, torch.randn(8, 4)).model(torch.randn(2, 4))
    assert isinstance(out, Prediction)
    assert out.scores.shape == (2, 3)
    assert out.extra[1] == 7


def test_modules_may_be_called_quant_weight_or_scale():
    parts = {name: nn.Linear(4, 4) for name in ("quant", "weight", "scale", "forward_")}
    m = model_of(lambda m, x: m.forward_(m.scale(m.weight(m.quant(x)))), **parts)
    x = torch.randn(16, 4)
    r = _fit(m, x)
    assert set(m.state_dict()) <= set(r.model.state_dict())
    assert (r.model(x) - m(x)).abs().max() < 0.1


# ---- numbers


def test_the_simulation_is_close_to_the_float_model(net, model):
    got, want = model(X)["logits"], net(X)["logits"]
    assert (got - want).norm() / want.norm() < 0.05


def test_without_rounding_it_is_the_float_model(net):
    result = quantize(net, [X], progress=False, settings=Settings(repairs="off"))
    model = lower(result.graph, result.plan)
    set_share(model, 0.0)
    torch.testing.assert_close(model(X)["logits"], net(X)["logits"], rtol=1e-4, atol=1e-5)


def test_every_activation_is_within_one_code_of_the_integer_simulation(result, model):
    values = [v for v in result.graph.values if result.plan.quantized(v)]
    codes = simulate(result.graph, result.plan, [X], result.platform, keep=values)
    with torch.no_grad():
        got = dict(zip(values, model.run_flat([X], keep=values)[-len(values) :], strict=True))
    for v in values:
        t = result.plan.tensors[v]
        error = (got[v] - dequantize(codes[v], t.scale, t.zero_point)).abs() / t.scale
        assert error.max() < 1.01, v
        assert (error > 0.01).float().mean() < 0.01, v  # only where float accumulation lands on the other side of a tie


def test_numbers_that_only_move_are_not_rounded_again(model):
    assert model.quantizer_of("mean") is model.quantizer_of("dropout")


def test_the_quantizer_of_a_float_tensor_does_not_exist(model):
    with pytest.raises(UnknownNameError, match="quantized tensor"):
        model.quantizer_of("conv2d")


def test_layers_with_rounded_weights_are_wrappers_and_stored_results_pass_through_holders(model):
    wrappers = {n: m for n, m in model.named_modules() if isinstance(m, PytorchQuantizationWrapper)}
    holders = [m for m in model.modules() if isinstance(m, PytorchActivationQuantizationHolder)]
    assert set(wrappers) == {"conv1", "conv2", "fc"} and len(holders) > 3
    rounded = wrappers["fc"].get_quantized_weights()
    for name in ("weight", "bias"):
        w, s = model.weight(f"fc.{name}"), model.scale(f"fc.{name}").reshape(-1, *[1] * (name == "weight"))
        assert torch.equal(rounded[name], torch.round(w / s).clamp(-(2**31), 2**31 - 1) * s)
        assert not torch.equal(rounded[name], w)
    x = torch.randn(9)
    assert all(torch.equal(h.activation_holder_quantizer(x), h(x)) for h in holders)


def test_biases_follow_the_scales_of_input_and_weight(result, model):
    assert isinstance(model.quantizer_of("fc.bias"), BiasQuantizer)
    assert torch.equal(model.scale("fc.bias"), result.plan.tensors["fc.bias"].scale)
    model.quantizer_of("fc.weight").scale.data *= 2
    assert torch.equal(model.scale("fc.bias"), result.plan.tensors["fc.bias"].scale * 2)


def test_tied_weights_stay_one_parameter():
    tied = model_of(lambda m, x: m.b(torch.relu(m.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    tied.b.weight = tied.a.weight
    model = _fit(tied, torch.randn(8, 4)).model
    assert model.weight("a.weight") is model.weight("b.weight")
    assert {"a.weight", "b.weight"} <= set(model.state_dict())


def test_a_batch_norm_that_stays_trains_its_affine_part_and_keeps_its_statistics():
    in_front_of_a_rectifier = sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))  # where no weights can take it
    model = _fit(in_front_of_a_rectifier, torch.randn(8, 4) * 3).model.train()
    before = model.weight("0.running_mean").clone()
    model(torch.randn(8, 4) + 5).sum().backward()
    assert model.weight("0.weight").grad is not None
    assert torch.equal(model.weight("0.running_mean"), before)


# ---- training


def test_gradients_reach_every_live_parameter_and_lower_the_loss(model):
    model(X)["logits"].square().sum().backward()
    live = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert set(live) == {"conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias", "fc.weight", "fc.bias"}
    assert all(g is not None and g.abs().max() > 0 for g in live.values())
    before = (model(X)["logits"] ** 2).mean().item()
    assert _train(model, torch.zeros(6, 4)) < before / 2


def test_parameters_lie_as_they_are_indexed_and_kernels_read_them_channels_last(result):
    """FSDP2 shards no others, and convolutions with channels last are faster."""
    assert not all(w.is_contiguous() for w in result.graph.weights.values())
    model = lower(result.graph, result.plan)
    assert all(p.is_contiguous() for p in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(X)["logits"], result.model(X)["logits"])
    again, _ = read_back(model, result.graph, result.plan)
    assert [w.stride() for w in again.weights.values()] == [w.stride() for w in result.graph.weights.values()]


STEEP = {"root": torch.sqrt, "inverse root": torch.rsqrt, "quotient": lambda x: 1 / x, "logarithm": torch.log}


@pytest.mark.parametrize("name", STEEP)
def test_zeros_that_rounding_makes_do_not_spoil_gradients(name):
    """The slopes there are infinite, and 0 times infinity is no number."""
    x = torch.cat([torch.full((1, 4), 1e-4), torch.linspace(1, 4, 28).view(7, 4)])
    rule = {"match": ["Mul", "Sqrt", "Rsqrt", "Div", "Log"], "use": [{"in": "a", "out": "a"}]}
    net = model_of(lambda m, x: STEEP[name](x * m.w), w=nn.Parameter(torch.ones(4)))
    platform = platform_of(rule, formats={"a": {"bits": 8, "zero": "any"}})
    model = _fit(net, x[1:], platform=platform, overrides={"*": {"rule": "minmax"}}).model
    model(x).sum().backward()
    want = torch.ones(4, requires_grad=True)
    STEEP[name](x[1:] * want).sum().backward()
    torch.testing.assert_close(model.w.grad, want.grad, rtol=0.05, atol=0.05)


def test_dropout_is_active_in_training_only(model):
    model.train()
    assert not torch.equal(model(X)["logits"], model(X)["logits"])
    model.eval()
    assert torch.equal(model(X)["logits"], model(X)["logits"])


def _train(model, target, steps=30, lr=1e-2):
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = (model(X)["logits"] - target).square().mean()
        loss.backward()
        optimiser.step()
    return loss.item()


def test_trained_weights_and_scales_come_back_as_graph_and_plan(result, model):
    model.quantizer_of("fc.weight").scale.requires_grad_()
    _train(model, torch.randn(6, 4) * 0.1, steps=3, lr=1e-5)
    graph, plan = read_back(model, result.graph, result.plan)
    assert torch.equal(lower(graph, plan)(X)["logits"], model(X)["logits"])
    assert torch.equal(plan.tensors["fc.bias"].scale, plan.tensors["dropout"].scale * plan.tensors["fc.weight"].scale)
    assert plan.tensors["fc.weight"].origin.endswith(", trained")
    assert not torch.equal(graph.weights["fc.weight"], result.graph.weights["fc.weight"])


def test_a_trained_result_is_exported_as_the_trained_model_computes(tmp_path):
    result = _fit(Net().eval(), X)
    before = result.model(X)["logits"].detach()
    _train(result.model, torch.randn(6, 4) * 0.1, steps=5)
    path = result.trained().export(tmp_path / "net.onnx")
    device = next(v for v in OnnxRuntime(path).run([X.numpy()]).values() if v.shape == before.shape)
    now = result.model(X)["logits"].detach()
    step = (now.max() - now.min()) / 255
    assert (torch.as_tensor(device) - now).abs().max() <= step
    assert (before - now).abs().max() > 2 * step


def test_a_scale_that_training_made_negative_is_refused(result, model):
    model.quantizer_of("fc.weight").scale.data[0] = -1.0
    with pytest.raises(PlanError, match=r"'fc\.weight' is -1.*fc"):
        read_back(model, result.graph, result.plan)


# ---- what one does with a module


def _reloaded(model, result):
    other = lower(result.graph, result.plan)
    other.load_state_dict(model.state_dict())
    return other


def _pickled(model, _):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [lambda model, _: copy.deepcopy(model), _reloaded, _pickled])
def test_a_copy_of_a_trained_model_computes_the_same_and_shares_nothing(model, result, copied):
    _train(model, torch.zeros(6, 4), steps=2)
    twin = copied(model, result)
    assert torch.equal(twin(X)["logits"], model(X)["logits"])
    twin.quantizer_of("fc.weight").scale.data *= 4
    assert not torch.equal(twin(X)["logits"], model(X)["logits"])
    assert not torch.equal(twin.scale("fc.bias"), model.scale("fc.bias"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_runs_in_other_dtypes_and_under_autocast(model, dtype):
    want = model(X)["logits"]
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(X)["logits"].float() - want).abs().max() < 0.1
    got = model.to(dtype)(X.to(dtype))["logits"]
    assert got.dtype == dtype
    assert (got.float() - want).abs().max() < 0.1


def test_it_moves_to_another_device_with_the_tensors_that_it_creates():
    def counts(m, x):
        x = x + torch.arange(x.shape[1], device=x.device) * 0.1
        return m.fc(x + torch.arange(x.shape[0], device=x.device)[:, None] * 0.1)

    model = _fit(model_of(counts, fc=nn.Linear(4, 4)), torch.randn(8, 4)).model.to("meta")
    assert model(torch.randn(2, 4, device="meta")).device.type == "meta"


def test_it_exports_again(model):
    exported = torch.export.export(model, (X,)).module()
    assert torch.equal(exported(X)["logits"], model(X)["logits"])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # a check of sizes is a constant of the trace
def test_parts_of_one_weight_get_biases_that_torchscript_can_name():
    """Attention keeps three weights in one parameter, without biases, which the correction of biases adds."""
    attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    given = torch.randn(4, 5, 8), torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    module = model_of(lambda m, q, k, v: m.a(q, k, v)[0], a=attention)
    simulation = _fit(module, given, settings=Settings(correct_bias=True, rounding="off")).model
    assert len([n for n in simulation.state_dict() if "bias" in n and "quant" not in n]) == 4
    assert torch.equal(torch.jit.trace(simulation, given, check_trace=False)(*given), simulation(*given))


def test_a_symbolic_trace_has_one_node_for_each_operator_quantizer_and_weight(result, model):
    traced = torch.fx.symbolic_trace(model)
    assert all(torch.equal(traced(X)[k], model(X)[k]) for k in ("logits", "features"))
    nodes = traced.graph.nodes
    assert {n.name for n in nodes if n.target is run_operator} == {n.name for n in result.graph.nodes}
    assert {n.target for n in nodes if n.op == "call_module"} == {f"quant.{k}" for k, _ in model.quant.named_children()}
    assert {n.target for n in nodes if n.op == "get_attr"} == {
        f"{n}.{k}" for n in ("conv1", "conv2", "fc") for k in ("weight", "bias")
    }
    traced(X)["logits"].sum().backward()
    assert traced.conv1.weight.grad.abs().max() > 0


def test_inputs_by_name_lists_and_results_of_several_parts_are_traced():
    def forward(m, x, *, y):
        left, right = torch.split(m.a(x["image"][0]), 2, dim=1)
        return left + right, torch.special.expm1(y)  # an operator without a canonical name

    def batch(size):
        return {"x": {"image": [torch.randn(size, 4)]}, "y": torch.randn(size, 2)}

    small, call = _fit(model_of(forward, a=nn.Linear(4, 4)), batch(8)).model, batch(3)
    assert all(map(torch.equal, torch.fx.symbolic_trace(small)(**call), small(**call)))


def test_batch_norms_that_are_folded_in_each_step_are_not_traced():
    with pytest.raises(UnsupportedError, match=r"torch\.fx cannot trace"):
        torch.fx.symbolic_trace(_normed(True, method="lsq", bn_fold=1)[2])


@pytest.mark.parametrize(
    "backend",
    ["eager", pytest.param("aot_eager", marks=pytest.mark.slow), pytest.param("inductor", marks=pytest.mark.slow)],
)
def test_it_compiles_in_one_graph_and_trains(model, backend):
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    out = compiled(X)["logits"]
    assert (out - model(X)["logits"]).abs().max() < 0.05  # a compiler may round a tie to the other side
    out.square().sum().backward()
    assert model.weight("conv1.weight").grad.abs().max() > 0


@pytest.mark.usefixtures("process_group")
def test_it_trains_under_distributed_data_parallel(model):
    parallel = nn.parallel.DistributedDataParallel(model.train())
    for _ in range(2):  # the second step fails when a live parameter got no gradient in the first
        parallel(X)["logits"].square().sum().backward()
    assert model.weight("fc.weight").grad is not None


# ---- how it is built and runs


def test_two_names_that_become_one_stay_two_quantizers():
    """They differ only in a sign that no attribute may have; the input has the name of a method of modules."""
    parts = {"a": nn.Linear(4, 4), "a_weight": torch.randn(4, 4)}
    r = _fit(model_of(lambda m, forward: F.linear(m.a(forward), m.a_weight), **parts), torch.randn(8, 4))
    first, second = (r.model.quantizer_of(n) for n in ("a.weight", "a_weight"))
    assert first is not second
    assert (first.tensor, second.tensor) == ("a.weight", "a_weight")
    assert r.model.quantizer_of("forward").tensor == "forward"
    assert r.model(torch.randn(2, 4)).shape == (2, 4)


@pytest.mark.parametrize("segments", [1, 2, 3, 7, 100])
def test_the_network_is_computed_in_as_many_parts_as_segments_says(model, monkeypatch, segments):
    """As many nodes in each part but the last; one part needs no second pass, nor does a run without gradients."""
    sizes = []

    def once(walk, part, *rest, use_reentrant):
        sizes.append(len(part))
        assert not use_reentrant
        return walk(part, *rest)

    want, nodes = model(X)["logits"], len(model._nodes)
    monkeypatch.setattr("chipfit.frameworks.torch.lower.checkpoint", once)
    assert model.segments == 1
    model.segments = segments
    assert torch.equal(model(X)["logits"], want)
    size = -(-nodes // segments)
    assert sizes == ([] if segments == 1 else [min(size, nodes - k) for k in range(0, nodes, size)])
    sizes.clear()
    with torch.no_grad():
        assert torch.equal(model(X)["logits"], want)
    assert sizes == []


def test_a_model_of_no_operators_is_its_input():
    x, graph = torch.randn(2, 3), capture(model_of(lambda m, x: x), (torch.randn(2, 3),))
    assert torch.equal(lower(graph, Plan())(x), x)


def test_results_that_nothing_reads_again_are_freed_while_the_rest_runs(model):
    import weakref

    kept = []
    model.quantizer_of("relu").register_forward_hook(lambda m, args, y: kept.append(weakref.ref(y)))
    alive = []
    model.quantizer_of("mean").register_forward_hook(lambda m, args, y: alive.append(kept[-1]() is not None))
    with torch.no_grad():
        model(X)
        assert alive == [False]
        *_, asked = model.run_flat([X], keep=["relu"])
    assert alive == [False, True] and kept[1]() is asked


def test_parameters_train_that_an_operator_reads_or_the_model_returns():
    parts = {"fc": nn.Linear(4, 4), "shown": torch.ones(3), "unread": torch.ones(3), "fixed": torch.ones(4)}
    returning = model_of(lambda m, x: (m.fc(x) + m.fixed, m.shown), **parts)
    model = _fit(returning, torch.randn(8, 4)).model
    trains = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {"fc.weight", "fc.bias", "shown"} <= trains and not {"unread"} & trains


def test_steps_of_training_are_counted_and_no_others(model):
    model(X)
    assert model.steps == 0
    model.train()
    for _ in range(3):
        model(X)
    assert model.steps == 3
    model.eval()(X)
    assert model.steps == 3 and model.bn_fold == 0


def test_a_model_in_training_mode_exports_and_that_is_no_step():
    small = _fit(nn.Linear(4, 2), torch.ones(2, 4)).model.train()
    exported = torch.export.export(small, (torch.ones(2, 4),)).module()
    assert torch.equal(exported(torch.ones(2, 4)), small.eval()(torch.ones(2, 4))) and small.steps == 0


def _normed(affine, **how):
    """A convolution whose batch norm multiplies by 4: var + eps is 1 / 16."""
    bn = nn.BatchNorm2d(3, eps=1e-30, affine=affine)
    bn.running_var.fill_(1 / 16)
    bn.running_mean.copy_(torch.tensor([0.5, -0.25, 0.0]))
    module = model_of(lambda m, x: m.bn(m.conv(x)), conv=nn.Conv2d(2, 3, 1, bias=False), bn=bn)
    x = torch.randn(4, 2, 3, 3)
    result = _fit(module, x, platform="ort_cpu")
    return module, result, lower(result.graph, result.plan, Training(**how)), x


@pytest.mark.parametrize("bn_fold", [1, 2, 3, 4])
def test_a_batch_norm_without_factors_of_its_own_folds_in_each_step(bn_fold):
    """gamma is 1 and beta 0."""
    module, _, model, x = _normed(False, method="lsq", bn_fold=bn_fold)
    set_share(model, 0.0)
    torch.testing.assert_close(model(x), module(x))
    w, b = model.folded("conv.weight")
    torch.testing.assert_close(w, module.conv.weight * 4)
    torch.testing.assert_close(b, -module.bn.running_mean * 4)


@pytest.mark.parametrize("bn_fold, factor", [(0, 4), (1, 4), (2, 4), (4, 4), (-1, 1)])
def test_a_scale_starts_from_the_weight_that_it_rounds(bn_fold, factor):
    """Four times the layer's own where the folded one is rounded; LSQ can begin at 2 mean|w| / sqrt(greatest code)."""
    module, result, model, _ = _normed(True, method="lsq(from_mean=True)", bn_fold=bn_fold)
    mean = module.conv.weight.abs().mean((1, 2, 3))
    want = factor * 2 * mean / result.plan["conv.weight"].grid.qmax ** 0.5
    torch.testing.assert_close(model.scale("conv.weight").detach(), want.detach())


@pytest.mark.parametrize("bn_fold", [0, 1, -1])
def test_the_weight_that_is_rounded_is_the_folded_one_unless_nothing_folds(bn_fold):
    """A bound of the platform, such as of sums, asks for the weight that is stored."""
    module, _, model, _ = _normed(True, method="lsq", bn_fold=bn_fold)
    torch.testing.assert_close(model.weight_to_round("conv.weight"), module.conv.weight * (1 if bn_fold == -1 else 4))


def test_of_a_step_the_momentum_is_remembered_and_an_inference_changes_nothing():
    module, _, model, x = _normed(True, method="lsq", bn_fold=2, bn_momentum=0.25)
    set_share(model, 0.0)
    mean = module.bn.running_mean.clone()
    model(x)
    assert torch.equal(model.weight("bn.running_mean"), mean)
    model.train()(x)
    batch = module.conv(x).mean((0, 2, 3))
    torch.testing.assert_close(model.weight("bn.running_mean"), mean + 0.25 * (batch - mean))


def test_a_weight_whose_numbers_the_plan_keeps_does_not_train_its_scale(result):
    trained = lower(result.graph, result.plan, Training("lsq", only={"fc": None}))
    assert not trained.quantizer_of("fc.weight").scale.requires_grad
    assert trained.quantizer_of("conv1.weight").scale.requires_grad
    assert not lower(result.graph, result.plan).quantizer_of("conv1.weight").scale.requires_grad


def test_layers_in_float_are_modules_of_their_classes():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 2))
    net.eval()
    x = torch.randn(8, 3, 8, 8)
    r = _fit(net, x, overrides={"2": "float", "5": "float"})
    kinds = {name: type(m) for name, m in r.model.named_modules()}
    assert (kinds["2"], kinds["5"]) == (nn.BatchNorm2d, nn.Linear)
    assert r.model.get_submodule("5").weight is r.model.weight("5.weight")
    assert net.state_dict().keys() <= r.model.state_dict().keys()
    r.model.train()(x).square().sum().backward()
    assert all(r.model.get_parameter(name).grad is not None for name in ("2.weight", "5.weight"))
    r.model.load_state_dict(copy.deepcopy(r.model).state_dict())


@pytest.mark.parametrize("overrides", [{}, {"0": "float"}], ids=len)
def test_weights_that_a_layer_holds_as_buffers_stay_buffers(overrides):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)), torch.randn(8, 3, 8, 8)
    for name, w in list(net[0].named_parameters()):
        delattr(net[0], name)
        net[0].register_buffer(name, w.detach())
    model = _fit(net, x, overrides=overrides).model
    assert {"0.weight", "0.bias"} <= dict(model.named_buffers()).keys()
    torch.testing.assert_close(model(x), net(x), atol=0.05, rtol=0)


@pytest.mark.parametrize("in_float", [["batch_norm"], ["batch_norm", "conv2d", "linear"]], ids=len)
def test_modules_whose_tensors_a_function_reads_are_of_the_class_that_computes_it(in_float):
    torch.manual_seed(0)

    def forward(m, x):
        y = F.conv2d(x, m.conv.weight, m.conv.bias, padding=1)
        z = F.batch_norm(y, m.bn.running_mean, m.bn.running_var, m.bn.weight, m.bn.bias, eps=1e-2)
        return m.last(F.linear((y * z).mean((2, 3)), m.fc.weight, m.fc.bias))

    layers = {"conv": nn.Conv2d(3, 4, 3), "bn": nn.BatchNorm2d(4), "fc": nn.Linear(4, 2), "last": nn.Linear(2, 2)}
    net = model_of(forward, **layers).eval()
    x = torch.randn(8, 3, 8, 8)
    model = _fit(net, x, overrides=dict.fromkeys(in_float, "float")).model
    kinds = dict(model.named_modules())
    assert type(kinds["bn"]) is nn.BatchNorm2d and kinds["bn"].eps == 1e-2
    assert net.state_dict().keys() <= model.state_dict().keys()
    conv, fc = (kinds[k] if "linear" in in_float else kinds[k].layer for k in ("conv", "fc"))
    assert (type(conv), type(fc)) == (nn.Conv2d, nn.Linear) and conv.padding == (1, 1)
    torch.testing.assert_close(conv(x), F.conv2d(x, model.conv.weight, model.conv.bias, padding=1))


def test_a_layer_of_a_class_that_only_has_the_name_of_one_of_pytorch_is_a_plain_module():
    class RMSNorm(nn.Module):
        def __init__(self, heads):
            super().__init__()
            self.gain = nn.Parameter(torch.rand(heads, 1) + 0.5)

        def forward(self, x):
            return F.normalize(x, dim=-1) * self.gain

    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), RMSNorm(2)), torch.randn(8, 6)
    model = _fit(net, x, overrides={"2": "float"}).model
    assert net.state_dict().keys() <= model.state_dict().keys()
    torch.testing.assert_close(model(x), net(x), atol=0.05, rtol=0)
