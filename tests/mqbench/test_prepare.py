"""prepare_qat_fx: placement of quantizers in each setting, training, and deployment on platforms."""

import copy
import io
from dataclasses import dataclass, replace
from functools import partial

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from chipfit import errors
from chipfit import quantize_fx as fx
from chipfit.errors import CaptureError, ConfigError, PlanError, UnknownNameError, UnsupportedError
from chipfit.mqbench.folded_batch_norm import FoldedBatchNorm
from chipfit.mqbench.quantizers import QuantizeBase
from chipfit.quantizers.algorithms.ste import STE
from chipfit.runtimes.onnxruntime import saturates
from tests.build import model_of

SEED = torch.Generator().manual_seed(0)
DATA = [torch.randn(8, 3, 8, 8, generator=SEED) for _ in range(3)]
LABELS = torch.arange(8) % 5


def residual(m, x):
    y = m.relu(m.bn1(m.conv1(x)))
    return m.relu(m.bn2(m.conv2(y)) + x)


def forward(m, x):
    x = m.block(m.stem(x))
    return m.fc(nn.functional.dropout(torch.flatten(m.pool(x), 1), 0.1, training=m.training))


def network():
    """Return a stem, a residual block that uses its ReLU twice, average pooling, and a linear layer, in training."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
    convs = {f"conv{k}": nn.Conv2d(6, 6, 3, padding=1, bias=False) for k in (1, 2)}
    block = model_of(residual, **convs, bn1=nn.BatchNorm2d(6), bn2=nn.BatchNorm2d(6), relu=nn.ReLU())
    return model_of(forward, stem=stem, block=block, pool=nn.AdaptiveAvgPool2d(1), fc=nn.Linear(6, 5)).train()


@pytest.fixture(scope="module")
def net():
    model = network()
    for x in DATA:
        model(x)
    return model.eval()


def setting(backend, bit=4, method="lsq", **options):
    return fx.get_qconfig(method, method, bit, **{**fx.get_backend_params(backend), **options})


def prepared(net, backend, fold=None, **options):
    config = None if fold is None else fx.get_foldbn_config(fold)
    return fx.prepare_qat_fx(net, {"": setting(backend, **options)}, config)


def quantizers(model, what=QuantizeBase):
    return {name: m for name, m in model.named_modules() if isinstance(m, what)}


def quantized_tensors(model):
    return {n.removesuffix("_post_act_fake_quantizer") for n in quantizers(model) if "weight" not in n}


def train(model, steps=4):
    optimizer = torch.optim.SGD(model.train().parameters(), 0.02)  # before the first batch
    for k in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(DATA[k % 3]), LABELS).backward()
        optimizer.step()
    return model.eval()


BACKENDS = "academic tensorrt acl tvm snpe fbgemm tflitemicro".split()


def test_without_quantization_the_network_is_unchanged(net):
    for backend in BACKENDS:
        model = prepared(net, backend, fold=-1)
        fx.disable_all(model)
        assert torch.equal(model(DATA[0]), net(DATA[0]))
        fx.enable_calibration(model)
        assert torch.equal(model(DATA[0]), net(DATA[0]))
        fx.enable_quantization(model)
        assert not torch.equal(model(DATA[0]), net(DATA[0]))
        assert not model.training


def test_the_academic_setting(net):
    """Inputs and weights of each weighted layer; the first and the last have 8 bits; one quantizer for each tensor."""
    model = prepared(net, "academic")
    bits = {name: q.bitwidth for name, q in quantizers(model).items()}
    weights = {k.removesuffix(".weight_quantizer"): b for k, b in bits.items() if k.endswith("weight_quantizer")}
    inputs = {k.removesuffix("_post_act_fake_quantizer"): b for k, b in bits.items() if "post_act" in k}
    assert weights == {"stem.0": 8, "block.conv1": 4, "block.conv2": 4, "fc": 8}
    assert inputs == {"x": 8, "stem_2": 4, "block_relu": 4, "pool": 8}
    calls = [n for n in model.graph.nodes if n.op == "call_module" and "post_act" in n.target]
    assert len(calls) == 4
    codes = {n: (q.quant_min, q.quant_max) for n, q in quantizers(model).items()}
    assert codes["stem.0.weight_quantizer"] == (-128, 127) and codes["block.conv1.weight_quantizer"] == (-8, 7)
    assert {n for n, q in quantizers(model).items() if q.ada_sign} == {n for n in bits if "post_act" in n}
    train(model)
    signs = {n.split("_post")[0]: q.quant_min for n, q in quantizers(model).items() if "post_act" in n}
    assert signs == {"x": -128, "stem_2": 0, "block_relu": 0, "pool": 0}


def test_graph_kinds_differ_at_sums_and_pools(net):
    placed = {kind: quantized_tensors(prepared(net, "snpe", graph=kind)) for kind in (1, 2, 3)}
    assert placed[1] == {"x", "stem_2", "block_relu", "pool"}
    assert placed[3] == placed[1] | {"block_conv2", "block_relu_1"}
    assert placed[3] - placed[2] == {"block_conv2"} and placed[2] < placed[3]


def reuses(m, x):
    """Call a layer twice, read a tensor three times, and return a result behind a pass-through operator."""
    y = m.conv(m.conv(x))
    z = m.up(torch.cat([m.a(y) + m.b(y), m.a(y)[:, :0]], 1))
    return (z * 0.5).view(x.size(0) * 1, -1)


def test_reused_layers_and_tensors_have_one_quantizer():
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(3, 3, 3, padding=1), "a": nn.Conv2d(3, 4, 1), "b": nn.Conv2d(3, 4, 1)}
    model = model_of(reuses, **parts, up=nn.ConvTranspose2d(4, 6, 2, stride=2))
    ready = fx.prepare_qat_fx(model, {"": setting("tensorrt", graph=3)}, example_inputs=torch.randn(2, 3, 4, 4))
    names = [n for n, q in quantizers(ready).items() if "weight" in n]
    assert names == [f"{layer}.weight_quantizer" for layer in ("conv", "a", "b", "up")]
    assert ready.up.weight_quantizer.ch_axis == 1 and ready.up.weight_quantizer.rounds.scale.shape == (6,)
    assert {"conv", "conv_1", "x"} <= quantized_tensors(ready) and "mul_1" not in quantized_tensors(ready)
    readers = [len(n.users) for n in ready.graph.nodes if n.name.startswith("conv_1_post")]
    assert readers == [3]
    ready.train()(torch.randn(2, 3, 4, 4)).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["lsq", "ema"])
def test_every_setting_trains_and_restores_its_state(backend, method, net):
    model = prepared(net, backend, method=method)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model)
    assert set(dict(model.named_parameters())) == set(before)  # all were there for the optimizer
    scales = [n for n, p in model.named_parameters() if n.endswith("scale") and p.requires_grad]
    assert bool(scales) == (method == "lsq")
    fresh = prepared(network(), backend, method=method).eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(DATA[1]), model(DATA[1]))
    pot = fx.get_backend_params(backend)["pot_scale"]
    numbers = torch.cat([q.numbers()[0].reshape(-1) for q in quantizers(model).values()])
    assert torch.equal(numbers.log2(), numbers.log2().round()) == pot


@pytest.mark.parametrize("fold", [0, 1, 2, 3, 4])
def test_every_strategy_of_folding_batch_norms_deploys(fold, net):
    model = prepared(net, "tensorrt", fold=fold, bit=8)
    assert any(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == (fold != 0)
    train(model)
    result = fx.deploy(model, DATA, "tensorrt")
    torch.testing.assert_close(result.model(DATA[1]), model(DATA[1]), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "other, says",
    [
        ({"bit": 8}, "the grid of '(block_relu|stem_2|block.conv1.weight_quantizer).*Got: Grid.bits=8"),
        ({"method": "tqt"}, "Unexpected key|Missing key"),
        ({"backend": "snpe"}, "another plan"),
    ],
)
def test_a_checkpoint_of_another_setting_is_refused(other, says, net):
    theirs, ours = prepared(net, **{"backend": "tensorrt", **other}), prepared(net, "tensorrt")
    with pytest.raises(PlanError, match=says):
        ours.load_state_dict(train(theirs, 1).state_dict())


# ---------------------------------------------------------------- platforms


@pytest.mark.parametrize("backend, method", [("tvm", "lsq"), ("snpe", "lsq"), ("tensorrt", "ema")])
def test_the_runtime_computes_the_trained_model(backend, method, net):
    """ONNX Runtime holds 8-bit grids of all these settings, affine weights aside."""
    qconfig = setting(backend, 8, method, **({"per_channel": True, "symmetry": True} if backend == "snpe" else {}))
    assert fx.platforms_of(qconfig)["ort_cpu@VNNI"] == ""
    model = train(fx.prepare_qat_fx(net, {"": qconfig}, fx.get_foldbn_config(1)))
    result = fx.deploy(copy.deepcopy(model), DATA, "ort_cpu@VNNI")
    for name, q in quantizers(model).items():
        if name.endswith("weight_quantizer"):
            learned = q.numbers()[0].expand_as(result.plan[name.replace("_quantizer", "")].scale)
            assert torch.equal(result.plan[name.replace("_quantizer", "")].scale, learned)
    assert torch.equal(result.plan["x"].scale, model.x_post_act_fake_quantizer.numbers()[0])
    torch.testing.assert_close(result.model(DATA[1]), model(DATA[1]), rtol=0, atol=0.02)
    assert saturates() or result.verify(DATA[:1]).exact


def plain(bias):
    """Return two convolutions and a linear layer; names are those of the ONNX file."""
    torch.manual_seed(0)
    parts = {"a": nn.Conv2d(3, 6, 3, bias=bias), "b": nn.Conv2d(6, 6, 3, bias=bias), "fc": nn.Linear(96, 5, bias)}
    return model_of(lambda m, x: m.fc(torch.flatten(m.relu(m.b(m.relu(m.a(x)))), 1)), **parts, relu=nn.ReLU())


@pytest.mark.parametrize("backend, bias, apart", [("tvm", False, 0), ("tvm", True, 1), ("tensorrt", True, 1)])
def test_quantized_values_in_training_equal_those_of_the_exported_file(backend, bias, apart, tmp_path):
    """Every quantizer of activations beside the QuantizeLinear of its tensor, which ONNX Runtime computes as it stands.

    With steps that are powers of two all numbers are whole multiples of one, and float32 adds them exactly. A bias,
    which training leaves as it is and the file stores in codes, may turn a tie, and so may other steps.
    """
    model = train(fx.prepare_qat_fx(plain(bias), {"": setting(backend, 8)}))
    simulated = {}
    names = {q: n.removesuffix("_post_act_fake_quantizer") for n, q in quantizers(model).items() if "weight" not in n}

    def keep(q, _, y):
        simulated[names[q]] = y.detach(), q.numbers()[0]

    hooks = [q.register_forward_hook(keep) for q in names]
    model(DATA[0])
    for hook in hooks:
        hook.remove()
    assert set(simulated) == {"x", "relu", "relu_1"}
    file = onnx.load(fx.deploy(model, DATA, "ort_cpu@VNNI").export(tmp_path / "m.onnx"))
    numbers = {i.name: onnx.numpy_helper.to_array(i) for i in file.graph.initializer}
    nodes = {n.output[0]: n for n in file.graph.node if n.op_type == "QuantizeLinear"}
    file.graph.output.extend(onnx.helper.make_empty_tensor_value_info(f"{t}_q") for t in simulated)
    exactly = onnxruntime.SessionOptions()
    exactly.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(file.SerializeToString(), exactly)
    for tensor, (value, scale) in simulated.items():
        (codes,) = session.run([f"{tensor}_q"], {session.get_inputs()[0].name: DATA[0].numpy()})
        _, step, zero = nodes[f"{tensor}_q"].input
        assert numbers[step] == scale.numpy()
        own = (value / scale).round().int().numpy() + int(numbers[zero])
        assert abs(codes.astype(int) - own).max() <= apart and len(set(own.flatten())) > 30, tensor


CHIPS = "openvino_cpu tvm_qnn k210 tensorrt st_edge_ai mqbench_academic ort_cpu@VNNI"


@pytest.mark.thinned(4)
@pytest.mark.parametrize("backend, bit", [("academic", 8), ("academic", 4), ("tensorrt", 8), ("snpe", 8)])
def test_a_platform_is_promised_if_and_only_if_a_trained_model_can_be_deployed_on_it(backend, bit, net):
    qconfig = setting(backend, bit)
    model = train(fx.prepare_qat_fx(net, {"": qconfig}), 2)
    promised, of_model = fx.platforms_of(qconfig), fx.platforms_of(model, DATA[0])
    for chip in CHIPS.split():
        refusal = ""
        try:
            fx.deploy(model, DATA[:1], chip)
        except UnsupportedError as e:
            refusal = str(e)
        assert of_model[chip] == refusal and bool(promised[chip]) == bool(refusal), chip


def test_the_reason_why_a_platform_does_not_fit_is_given(net):
    four = fx.platforms_of(setting("tensorrt", bit=4))
    assert "'relu' as it was trained: its format a8 has 256 values of kind int, not 16" in four["tensorrt"]
    with pytest.raises(UnsupportedError, match="cannot store"):
        fx.deploy(train(prepared(net, "snpe", fold=1, bit=8)), DATA, "tensorrt")
    with pytest.raises(ConfigError, match="prepared_model, example_inputs"):
        fx.platforms_of(prepared(net, "tensorrt"))


@pytest.mark.parametrize("bit, chip", [(4, "mqbench_academic"), (3, "mqbench_academic"), (8, "ort_cpu@VNNI")])
def test_what_was_trained_in_the_academic_setting_is_exported_with_the_same_results(bit, chip, net, tmp_path):
    """Batch norms behind quantized weights scale their channels; a negative factor mirrors the quantized values."""
    signed = copy.deepcopy(net)
    with torch.no_grad():
        signed.stem[1].weight[::2] *= -1
        signed.block.bn1.weight[1] = 0
    model = train(prepared(signed, "academic", bit=bit), 3)
    result = fx.deploy(model, DATA, chip)
    sums_round = chip != "mqbench_academic"  # this chip also quantizes results of sums and pools
    torch.testing.assert_close(result.model(DATA[1]), model(DATA[1]), rtol=0, atol=0.05 if sums_round else 1e-4)
    session = onnxruntime.InferenceSession(result.export(tmp_path / "m.onnx"))
    (own,) = session.run(None, {session.get_inputs()[0].name: DATA[1].numpy()})
    assert abs(own - result.model(DATA[1]).detach().numpy()).max() < 1e-4
    assert result.plan["stem.0.weight"].scale.shape == (6,)


def test_weights_of_few_bits_are_stored_in_a_wider_format_with_the_same_values(net):
    """W4A8: the chip has no 4-bit weights; constants in -8..7 are also constants in -128..127."""
    qconfig = setting("tvm", 8, bnfold=1, pot_scale=False, per_channel=True)
    four = partial(qconfig.weight, bitwidth=4)

    def weight(**options):
        return four(**{**options, "quant_min": -8, "quant_max": 7, "bitwidth": 4})

    model = train(fx.prepare_qat_fx(net, {"": replace(qconfig, weight=weight)}), 2)
    result = fx.deploy(model, DATA, "ort_cpu@VNNI")
    stored = result.plan["block.conv1.weight"]
    codes = stored.quantize(result.graph.weights["block.conv1.weight"])
    assert stored.grid.bits == 8 and codes.min() >= -8 and codes.max() <= 7
    torch.testing.assert_close(result.model(DATA[1]), model(DATA[1]), rtol=0, atol=0.02)
    assert result.verify(DATA[:1]).exact


def test_a_trained_tensor_that_the_chip_keeps_in_float_is_reported(net):
    """TensorRT computes a convolution and the sum behind it in one kernel; graph 3 rounds between them."""
    result = fx.deploy(train(prepared(net, "tvm", fold=1, bit=8), 1), DATA, "tensorrt")
    assert "warning: 'conv2d_2' was quantized in training and stays in float" in result.plan.rewrites


class Squared(QuantizeBase):
    """Levels that lie further apart the greater they are."""

    def forward(self, x):
        if self.observing:
            self.activation_post_process(x.detach())
        s = self.numbers()[0]
        return x.sign() * s * torch.round((x.abs() / s).sqrt()) ** 2


@dataclass(frozen=True)
class OnPaper(STE):
    """An algorithm of which no chip computes what it trains for activations."""

    undeployable = {"activation": "no chip has it"}


@pytest.mark.parametrize("method, says", [(Squared, "equal steps"), (OnPaper(), "no chip has it")])
def test_methods_that_no_chip_computes_are_not_deployed(method, says, net):
    qconfig = fx.get_qconfig("ste", method, 8, per_channel=True, bnfold=1)
    model = train(fx.prepare_qat_fx(net, {"": qconfig}), steps=1)
    with pytest.raises(UnsupportedError, match=says):
        fx.deploy(model, DATA, "tensorrt")


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "options, error, says",
    [
        ({"w_method": "lsk"}, UnknownNameError, "'lsq'"),
        ({"a_observer": "MinMox"}, UnknownNameError, "'MinMax'"),
        ({"bits": 4}, UnknownNameError, "'bit'"),
        ({"bit": 17}, ConfigError, "1 to 16"),
        ({"bit": 1}, UnsupportedError, "1 bit"),
        ({"ada_sign": True, "symmetry": False}, ConfigError, "academic"),
        ({"ada_sign": True, "pot_scale": True}, ConfigError, "academic"),
        ({"per_channel": 1}, ConfigError, "True or False"),
        ({"graph": 4}, ConfigError, "1, 2 or 3"),
        ({"bnfold": 5}, ConfigError, "-1, 0, 1"),
    ],
)
def test_invalid_settings_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        fx.get_qconfig(**options)


PLAIN = setting("snpe")


def per_channel(**options):
    return PLAIN.activation(**{**options, "qscheme": torch.per_channel_affine, "ch_axis": 1})


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        (({},), ConfigError, "get_qconfig"),
        (({"": PLAIN, "fc": PLAIN},), UnknownNameError, "'fc'"),
        (({"": PLAIN}, (torch.randn(2, 3, 8, 8),)), ConfigError, "get_foldbn_config"),
        (({"": replace(PLAIN, activation=per_channel)},), ConfigError, "per_channel concerns weights"),
    ],
)
def test_invalid_arguments_are_refused(arguments, error, says, net):
    with pytest.raises(error, match=says):
        fx.prepare_qat_fx(net, *arguments)


FC = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "model, example, says",
    [
        (model_of(lambda m, x: m.fc(x) if x.sum() > 0 else x, fc=FC), None, "cannot be traced.*torch.where"),
        (model_of(lambda m, x: m.fc(x) + torch.randn(1).item(), fc=FC), torch.ones(2, 2), "computes something else"),
        (model_of(lambda m, x: nn.functional.linear(x, m.fc.weight), fc=FC), None, "does not belong to a layer"),
        (nn.ReLU(), None, "no convolution"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_with_a_hint(model, example, says):
    with pytest.raises(CaptureError, match=says):
        fx.prepare_qat_fx(model, {"": PLAIN}, example_inputs=example)


# ---------------------------------------------------------------- NaN and infinite values


def through_a_file(model):
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("door", [lambda m: m, copy.deepcopy, through_a_file], ids=["made", "copied", "from a file"])
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda m: m.block.conv2.layer.weight[0, 0].fill_(torch.inf), r"'block.conv2.layer.weight' holds NaN.*block"),
        (lambda m: m.fc.weight_quantizer.rounds.scale[1].fill_(torch.nan), r"scale of 'fc.weight_quantizer' is nan"),
    ],
)
def test_training_stops_at_nan_and_infinite_parameters(spoil, says, door, net):
    model = prepared(net, "tensorrt", fold=1).train()
    train(model, 1)
    model = door(model)
    with torch.no_grad():
        spoil(model)
    model.eval()(DATA[0])
    with pytest.raises(errors.TrainingError, match=f"In step 2 of training, .*{says}"):
        model.train()(DATA[0])


@pytest.mark.parametrize("method", ["lsq", "ema"])
@pytest.mark.parametrize("w_observer", ["MinMax", "MSE"])
def test_nan_in_the_first_batch_of_training_is_refused(method, w_observer, net):
    model = prepared(net, "tensorrt", method=method, w_observer=w_observer, a_observer="MSE").train()
    batch = DATA[0].clone()
    batch[0, 0, 0, 0] = torch.nan
    with pytest.raises(errors.DataError, match="Batch 1 .* NaN.*x_post_act_fake_quantizer"):
        model(batch)


@pytest.mark.parametrize("method", ["dorefa", "apot", "lsq"])
def test_strategy_4_keeps_batch_norms_where_weights_have_no_scale(net, method):
    """Its variance would follow itself: that of a layer's results after 200 steps differs from theirs by many times."""
    options = {**fx.get_backend_params("tensorrt"), "bnfold": 4}
    model = fx.prepare_qat_fx(copy.deepcopy(net), {"": fx.get_qconfig(method, "lsq", 4, **options)}).train()
    for _ in range(200):
        model(DATA[0])
    folded = [m.strategy for m in model.modules() if isinstance(m, FoldedBatchNorm)]
    assert folded == ([4, 4, 4, 4] if method == "lsq" else [4, -1, -1, 4])
    trained = model(DATA[0]).detach()
    after = model.eval()(DATA[0]).detach()
    assert float((after - trained).abs().mean()) < 0.5 * float(trained.abs().mean())
