"""prepare_by_platform, convert_deploy and ptq_reconstruction: scripts of MQBench with other imports."""

import copy
import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import onnxruntime
import pytest
import torch
from torch import nn

import chipfit
from chipfit import quantize_fx as fx
from chipfit.errors import CaptureError, ConfigError, PlanError, UnknownNameError, UnsupportedError
from chipfit.mqbench.quantizers import QuantizeBase
from chipfit.platform.load import load
from chipfit.quantize_fx import (
    BackendType,
    convert_deploy,
    convert_merge_bn,
    enable_calibration,
    enable_calibration_woquantization,
    enable_quantization,
    prepare_by_platform,
    profiling,
    ptq_reconstruction,
)
from tests.build import model_of, needs_vnni
from tests.mqbench.test_prepare import DATA, network, quantizers

FOUR = {"bit": 4, "symmetry": True, "per_channel": False, "pot_scale": False}
ACADEMIC = {
    "w_observer": "MinMaxObserver",
    "a_observer": "EMAMinMaxObserver",
    "w_fakequantize": "FixedFakeQuantize",
    "a_fakequantize": "LearnableFakeQuantize",
    "w_qscheme": FOUR,
    "a_qscheme": FOUR,
}


@pytest.fixture(scope="module")
def net():
    model = network()
    for x in DATA:
        model(x)
    return model


def prepared(net, backend, **config):
    if "Academic" in backend.name:
        config = {"extra_qconfig_dict": ACADEMIC, **config}
    return prepare_by_platform(net, backend, config)


def calibrated(model):
    enable_calibration(model)
    model(DATA[0])
    enable_quantization(model)
    return model


@pytest.mark.parametrize("backend", BackendType)
def test_every_backend_calibrates_trains_and_is_deployed(backend, net, tmp_path):
    """As in test/backend/test_backend.py of MQBench, for all of its backends."""
    model = calibrated(prepared(net, backend).train())
    model(DATA[0]).sum().backward()
    model.eval()
    result = convert_deploy(model, backend, {"x": [1, 3, 8, 8]}, output_path=tmp_path, model_name="net")
    torch.testing.assert_close(result.model(DATA[1]), model(DATA[1]), rtol=0, atol=0.02)
    names = {p.name for p in tmp_path.iterdir()}
    assert ("net.onnx" in names) == (backend is not BackendType.NNIE)  # its numbers are no integers
    assert ("net_clip_ranges.json" in names) == (load(backend.setting["platform"]).encodings != "generic")
    floats = [note for note in result.plan.rewrites if "stays in float" in note]
    assert len(floats) == (backend is BackendType.NNIE)  # which does not round the inputs of global pools


@needs_vnni
def test_a_proven_backend_runs_with_the_same_integers_on_its_runtime(net, tmp_path):
    assert BackendType.QDQ.proven and not BackendType.Vitis.proven
    model = calibrated(prepared(net, BackendType.QDQ).eval())
    result = convert_deploy(model, BackendType.QDQ, {"x": [1, 3, 8, 8]}, output_path=tmp_path)
    assert result.verify(DATA[:1]).exact
    session = onnxruntime.InferenceSession(tmp_path / "mqbench_qmodel.onnx")
    (y,) = session.run(None, {session.get_inputs()[0].name: DATA[1].numpy()})
    assert abs(y - model(DATA[1]).detach().numpy()).max() < 0.02


@pytest.mark.parametrize("factor, count", [(1.0, 0), (1e-5, 0), (1e-10, 2)])
def test_values_too_small_to_be_quantized_are_a_warning(factor, count, caplog, tmp_path):
    """Quantized values of less than 2^-25 are 0 with every scale that chips hold; those of 1e-5 are not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False), nn.Flatten())
    with torch.no_grad():
        net[0].weight.mul_(factor)
    model = calibrated(prepared(net, BackendType.Tensorrt).eval())
    x, y = net(DATA[0]).flatten(), model(DATA[0]).flatten()
    assert bool(y.any()) == (count == 0)
    assert count or torch.nn.functional.cosine_similarity(x, y, dim=0) > 0.99
    notes = [r.message for r in caplog.records if "too small to be quantized" in r.message]
    assert len(notes) == bool(count) and all("'_1_post_act_fake_quantizer' (" in n for n in notes)
    result = convert_deploy(model, BackendType.Tensorrt, {"input": [1, 3, 8, 8]}, output_path=tmp_path)
    assert [n for n in result.plan.rewrites if "too small" in n] == notes


def test_ranges_for_tensorrt_are_scale_times_127(net, tmp_path):
    """MQBench writes {tensorrt: {blob_range: {tensor: clip}}}."""
    model = calibrated(prepared(net, BackendType.Tensorrt).eval())
    convert_deploy(model, BackendType.Tensorrt, {"x": [1, 3, 8, 8]}, output_path=tmp_path, model_name="m")
    ranges = json.loads((tmp_path / "m_clip_ranges.json").read_text())["tensorrt"]["blob_range"]
    scale = float(model.x_post_act_fake_quantizer.numbers()[0])
    assert ranges["x"] == pytest.approx(127 * scale, rel=0.01)


QUANTIZERS = [
    ("MinMaxObserver", "FixedFakeQuantize", "FixedFakeQuantize"),
    ("MSEObserver", "LearnableFakeQuantize", "LearnableFakeQuantize"),
    ("EMAQuantileObserver", "DoReFaFakeQuantize", "LearnableFakeQuantize"),
    ("EMAMinMaxObserver", "FixedFakeQuantize", "PACTFakeQuantize"),
    ("ClipStdObserver", "DSQFakeQuantize", "DSQFakeQuantize"),
    ("LSQObserver", "AdaRoundFakeQuantize", "QDropFakeQuantize"),
    ("EMAMSEObserver", "FixedFakeQuantize", "FixedFakeQuantize"),
]


@pytest.mark.parametrize("observer, weight, activation", QUANTIZERS)
def test_quantizers_and_observers_have_the_class_names_of_mqbench(observer, weight, activation, net):
    """As in test/fake_quant and test/observer of MQBench."""
    given = {"w_observer": "MinMaxObserver", "a_observer": observer}
    given |= {"w_fakequantize": weight, "a_fakequantize": activation}
    model = calibrated(prepare_by_platform(net, BackendType.Tensorrt, {"extra_qconfig_dict": given}).train())
    model(DATA[0]).sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads and all(g.isfinite().all() for g in grads)


def test_weights_and_activations_have_bits_of_their_own(net, tmp_path):
    """W4A8 on a chip without 4-bit weights: MQBench stores them in 8 bits, too."""
    scheme = {"bit": 4, "symmetry": True, "per_channel": True, "pot_scale": False}
    model = calibrated(prepared(net, BackendType.QDQ, extra_qconfig_dict={"w_qscheme": scheme}).eval())
    assert {q.bitwidth for n, q in quantizers(model).items() if "weight" in n} == {4}
    assert {q.bitwidth for n, q in quantizers(model).items() if "weight" not in n} == {8}
    result = convert_deploy(model, BackendType.QDQ, {"x": [1, 3, 8, 8]}, output_path=tmp_path)
    weight = result.plan["block.conv1.weight"]
    assert weight.quantize(result.graph.weights["block.conv1.weight"]).abs().max() <= 8
    assert result.verify(DATA[:1]).exact


def test_layers_can_have_settings_of_their_own(net):
    given = {**ACADEMIC, "layers": {"block.*": {"w_qscheme": {"bit": 2, "symmetry": True}}}}
    model = prepare_by_platform(net, BackendType.Academic, {"extra_qconfig_dict": given})
    bits = {n: q.bitwidth for n, q in quantizers(model).items() if "weight" in n}
    assert bits["block.conv1.weight_quantizer"] == bits["block.conv2.weight_quantizer"] == 2
    assert bits["stem.0.weight_quantizer"] == bits["fc.weight_quantizer"] == 8


def test_excluded_and_additional_layers(net):
    def names(**choices):
        model = prepare_by_platform(net, BackendType.Tensorrt, {"extra_quantizer_dict": choices})
        return set(quantizers(model))

    every = names()
    left = names(exclude_module_name=["block.conv1"])
    assert every - left == {"block.conv1.weight_quantizer"}
    assert every - names(exclude_module_name=["block"]) == {
        *(f"block.conv{k}.weight_quantizer" for k in (1, 2)),
        "block_relu_post_act_fake_quantizer",
    }
    assert every - names(exclude_node_name=["add", "pool"]) == {"block_relu_1_post_act_fake_quantizer"}
    assert names(additional_module_type=(nn.Dropout,)) >= every


def test_one_name_or_type_of_choices_may_stand_alone(net):
    def names(**choices):
        return set(quantizers(prepare_by_platform(net, BackendType.Tensorrt, {"extra_quantizer_dict": choices})))

    assert names(exclude_module_name="block.conv1") == names(exclude_module_name=["block.conv1"]) < names()
    assert names(additional_module_type=(nn.ReLU)) == names(additional_module_type=[nn.ReLU]) > names()


@needs_vnni
def test_an_excluded_layer_stays_in_float_on_the_chip(net, tmp_path):
    choices = {"exclude_module_name": ["block.conv1"]}
    model = calibrated(prepared(net, BackendType.QDQ, extra_quantizer_dict=choices).eval())
    result = convert_deploy(copy.deepcopy(model), BackendType.QDQ, {"x": [1, 3, 8, 8]}, output_path=tmp_path)
    assert not result.plan.quantized("block.conv1.weight") and result.plan.quantized("block.conv2.weight")
    assert result.verify(DATA[:1]).exact


class Leaf(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x  # cannot be traced


def test_leaf_modules_are_not_traced_and_attributes_are_preserved():
    def forward(m, x, flip=False):
        x = m.leaf(m.conv(x))
        return m.head(x.flip(1) if flip else x)

    net = model_of(forward, conv=nn.Conv2d(3, 4, 1), leaf=Leaf(), head=nn.Conv2d(4, 2, 1))
    net.config, net.conv.classes = {"depth": 2}, 10
    with pytest.raises(CaptureError):
        prepared(net, BackendType.Tensorrt, concrete_args={"flip": False})
    keep = {"": ["config", "forward_test"], "conv": ["classes"]}
    type(net).forward_test = lambda self, x: self(x).sum()
    config = {"leaf_module": [Leaf], "concrete_args": {"flip": False}, "preserve_attr": keep}
    model = calibrated(prepared(net, BackendType.Tensorrt, **config).eval())
    assert isinstance(model.leaf, Leaf) and model.config == {"depth": 2} and model.conv.classes == 10
    assert torch.equal(model.forward_test(DATA[0]), model(DATA[0]).sum())


class Decode(nn.Module):
    def forward(self, x):
        return x.sigmoid() * 2 - 0.5


def test_nothing_inside_a_leaf_module_is_rounded_in_the_deployed_network(tmp_path):
    layers = {"conv": nn.Conv2d(3, 4, 1), "leaf": Decode(), "head": nn.Conv2d(4, 2, 1), "end": Decode()}
    net = model_of(lambda m, x: m.end(m.head(torch.relu(m.leaf(m.conv(x))))), **layers)
    model = calibrated(prepared(net, BackendType.Tensorrt, leaf_module=[Decode]).eval())
    result = convert_deploy(model, BackendType.Tensorrt, {"x": list(DATA[0].shape)}, model_name=str(tmp_path / "n"))
    inside = [n for n in result.graph.nodes if n.layer in ("leaf", "end")]
    assert {result.plan.nodes[n.name].exec for n in inside} == {"float"}
    assert [result.plan.nodes[n.name].exec for n in result.graph.nodes if n.op == "Conv2D"] == ["int", "int"]
    torch.testing.assert_close(result.model(DATA[0]), model(DATA[0]), atol=0.02, rtol=0)
    result.save(tmp_path / "saved")
    again = chipfit.load(tmp_path / "saved").edit([("leaf", "float"), ("end", "float")])
    assert {n.exec for n in again.plan.nodes.values()} == {"int", "float"} and again.plan.groups == result.plan.groups


def test_a_network_of_dictionaries(tmp_path):
    """As in test/model/test_det_model.py of MQBench."""

    def forward(m, given):
        given.update({"y": {"z": m.conv(given["x"])}})
        return given

    model = prepare_by_platform(model_of(forward, conv=nn.Conv2d(3, 3, 3, 3)).train(), BackendType.PPLW8A16)
    enable_calibration(model)
    model({"x": DATA[0]})
    enable_quantization(model)
    model({"x": DATA[0]})["y"]["z"].sum().backward()
    result = convert_deploy(model.eval(), BackendType.PPLW8A16, dummy_input={"x": DATA[0]}, output_path=tmp_path)
    assert result.plan["conv.weight"].grid.bits == 8 and (tmp_path / "mqbench_qmodel.onnx").exists()


def test_arguments_may_have_the_order_of_mqbenchs_first_releases(net):
    config = {"extra_qconfig_dict": {**ACADEMIC, "w_qscheme": {**FOUR, "bit": 3}}}
    old = prepare_by_platform(net, BackendType.Tensorrt, True, config, None, False)
    new = prepare_by_platform(net, BackendType.Tensorrt, config, freeze_bn=False)
    assert [str(q) for q in quantizers(old)] == [str(q) for q in quantizers(new)]
    assert str(old) == str(new) != str(prepare_by_platform(net, BackendType.Tensorrt))
    assert prepare_by_platform(net, BackendType.Tensorrt, False, None, None, True) is not net


def test_merged_batch_norms_compute_the_same(net):
    """As in test/test_merge of MQBench."""
    model = calibrated(prepared(net, BackendType.Tensorrt).eval())
    before = model(DATA[1])
    convert_merge_bn(model)
    assert not [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    torch.testing.assert_close(model(DATA[1]), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["standalone", "interaction"])
def test_profiling_returns_similarities_to_the_float_network(kind, net):
    model = calibrated(prepared(net, BackendType.Tensorrt).eval())
    found = profiling(model, DATA, kind)
    key = "stem.0.weight_quantizer" if kind == "standalone" else "stem_0"
    assert 0.9 < found[key] <= 1 + 1e-9 and min(found.values()) > 0.5


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("backend", [BackendType.Tensorrt, BackendType.SNPE])
def test_a_model_that_is_wrapped_for_parallel_training_is_calibrated_and_trains(net, backend):
    plain = prepare_by_platform(net, backend)
    parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    for model in (parallel, plain):
        calibrated(model.eval())
        torch.manual_seed(0)  # of dropout
        model.train()(DATA[0]).square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), parallel.parameters(), strict=True):
        assert p.shape == q.shape and (p.grad is None or torch.equal(p.grad, q.grad)), name


def test_a_state_dict_holds_tensors_so_that_a_model_is_traced_and_averaged(net):
    model = calibrated(prepare_by_platform(net, BackendType.Tensorrt).eval())
    assert all(isinstance(v, torch.Tensor) for v in model.state_dict().values())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of a trace: the sizes of this call become constants
        torch.testing.assert_close(torch.jit.trace(model, DATA[0])(DATA[1]), model(DATA[1]))


def test_a_state_dict_is_restored_in_a_model_prepared_anew(net):
    """As in test/load_ckpt of MQBench."""
    model = calibrated(prepared(net, BackendType.Tensorrt).eval())
    fresh = prepared(network(), BackendType.Tensorrt).eval()
    fresh.load_state_dict(model.state_dict())
    enable_quantization(fresh)
    assert torch.equal(fresh(DATA[1]), model(DATA[1]))


def test_layers_in_place_train_and_are_read_as_in_the_model():
    """As mnasnet of torchvision, with dropout in place behind a quantizer; `y` is read after it was overwritten."""

    def forward(m, x):
        y = m.conv(x)
        return m.head(nn.functional.relu6(m.drop(y), inplace=True).mean((2, 3)) + y.mean((2, 3)))

    drop = nn.Dropout(inplace=True)
    net = model_of(forward, conv=nn.Conv2d(3, 8, 3), drop=drop, head=nn.Linear(8, 4))
    model = prepared(net, BackendType.Tensorrt).eval()
    torch.testing.assert_close(calibrated(model)(DATA[0]), copy.deepcopy(net)(DATA[0]), atol=0.1, rtol=0.1)
    model.train()(DATA[0]).sum().backward()


def test_quantizers_of_one_type_are_calibrated_alone(net):
    model = prepared(net, BackendType.Tensorrt).eval()
    enable_calibration_woquantization(model, quantizer_type="act_fake_quant")
    y = model(DATA[0])
    torch.testing.assert_close(y, copy.deepcopy(net).eval()(DATA[0]))
    observed = {n for n, q in quantizers(model).items() if q.activation_post_process.batches}
    assert observed == {n for n in quantizers(model) if "weight" not in n}
    enable_calibration_woquantization(model, quantizer_type="weight_fake_quant")
    model(DATA[0])
    assert all(q.activation_post_process.batches == 1 for q in quantizers(model).values())


# ---------------------------------------------------------------- reconstruction

LOW = {
    "w_observer": "MSEObserver",
    "a_observer": "EMAMSEObserver",
    "w_fakequantize": "AdaRoundFakeQuantize",
    "a_fakequantize": "QDropFakeQuantize",
    "w_qscheme": {"bit": 2, "symmetry": False, "per_channel": True, "pot_scale": False, "p": 2.4},
    "a_qscheme": {"bit": 4, "symmetry": False, "per_channel": False, "pot_scale": False, "p": 2.4},
}
RECIPE = {"scale_lr": 4e-5, "warm_up": 0.2, "weight": 0.01, "max_count": 150, "b_range": [20, 2], "keep_gpu": True}
RECIPE |= {"round_mode": "learned_hard_sigmoid", "weight_lr": 0.01}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("backend", [BackendType.Academic, BackendType.Tensorrt])
@pytest.mark.parametrize("pattern, prob", [("layer", 1.0), ("block", 1.0), ("block", 0.5)])
def test_reconstruction_lowers_the_error_of_two_bit_weights(pattern, prob, backend, net):
    """AdaRound, BRECQ and QDrop, as in application/imagenet_example/PTQ of MQBench."""
    model = prepare_by_platform(net, backend, {"extra_qconfig_dict": LOW}).eval()
    for x in DATA:
        enable_calibration_woquantization(model, quantizer_type="act_fake_quant")
        model(x)
    enable_calibration_woquantization(model, quantizer_type="weight_fake_quant")
    model(DATA[0])
    torch.manual_seed(0)
    learned = ptq_reconstruction(model, DATA, SimpleNamespace(pattern=pattern, prob=prob, **RECIPE))
    enable_quantization(model)
    wanted = [copy.deepcopy(net).eval()(x) for x in DATA]
    nearest, fitted = (sum((m(x) - y).square().mean() for x, y in zip(DATA, wanted)) for m in (model, learned))
    assert fitted < 0.8 * nearest
    name = "block.conv2.weight_quantizer"
    weight = {n: q for n, q in learned.named_modules() if isinstance(q, QuantizeBase)}[name]
    folded = learned.block.conv2.fold().weight
    torch.testing.assert_close(weight(folded), folded, rtol=0, atol=1e-6)  # it is on the grid


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "config, error, says",
    [
        ({"extra_qconfig": {}}, UnknownNameError, "key of prepare_custom_config_dict.*'extra_qconfig_dict'"),
        ({"extra_qconfig_dict": {"w_obs": "x"}}, UnknownNameError, "key of extra_qconfig_dict.*'w_observer'"),
        ({"extra_qconfig_dict": {"w_observer": "MinMax0bserver"}}, UnknownNameError, "'MinMaxObserver'"),
        ({"extra_qconfig_dict": {"a_fakequantize": "LSQFakeQuantize"}}, UnknownNameError, "quantizer in extra_qconfig"),
        (
            {"extra_qconfig_dict": {"w_qscheme": {"bit": "4"}}},
            ConfigError,
            "'bit' in 'w_qscheme' of extra_qconfig_dict",
        ),
        ({"extra_qconfig_dict": {"w_qscheme": {"bits": 4}}}, UnknownNameError, "'bits'"),
        ({"extra_qconfig_dict": {"a_qscheme": {"per_channel": True}}}, ConfigError, "concerns weights"),
        ({"extra_qconfig_dict": {"layers": {"fc": {"w_bit": 4}}}}, UnknownNameError, r"extra_qconfig_dict\['layers'\]"),
        ({"extra_quantizer_dict": {"exclude_module": []}}, UnknownNameError, "'exclude_module_name'"),
        ({"extra_quantizer_dict": {"additional_module_type": ["Upsample"]}}, ConfigError, "types of modules"),
        ({"extra_quantizer_dict": {"exclude_node_name": [nn.ReLU]}}, ConfigError, "'exclude_node_name' .* names"),
        ({"extra_fuse_dict": {"additional_fusion_pattern": {}}}, UnsupportedError, "additional_fusion_pattern"),
        ({"leaf_module": ["Leaf"]}, ConfigError, "'leaf_module' must list types"),
        ({"preserve_attr": {"stem": ["depth"]}}, UnknownNameError, "preserve_attr of 'stem'"),
        ({"preserve_attr": ["depth"]}, ConfigError, "attributes by submodule"),
        (3, ConfigError, "'prepare_custom_config_dict' must be a dictionary"),
    ],
)
def test_invalid_dictionaries_are_refused_by_key_and_place(config, error, says, net):
    with pytest.raises(error, match=says):
        prepare_by_platform(net, BackendType.Tensorrt, config)


def test_invalid_calls_are_refused(net, tmp_path):
    with pytest.raises(ConfigError, match="BackendType"):
        prepare_by_platform(net, "Tensorrt")
    with pytest.raises(ConfigError, match="academic backend needs 'w_qscheme'"):
        prepare_by_platform(net, BackendType.Academic)
    with pytest.raises(PlanError, match="prepare_by_platform"):
        convert_deploy(net, BackendType.Tensorrt, {"x": [1, 3, 8, 8]})
    model = prepare_by_platform(net, BackendType.Tensorrt).eval()
    with pytest.raises(PlanError, match="observed no data"):
        ptq_reconstruction(model, DATA, {})
    with pytest.raises(UnknownNameError, match="'pattern'"):
        ptq_reconstruction(model, DATA, {"patern": "layer"})
    calibrated(model)
    model.meta.pop("seen")
    with pytest.raises(ConfigError, match="input_shape_dict"):
        convert_deploy(model, BackendType.Tensorrt, output_path=tmp_path)


def test_names_that_only_mqbench_has_name_their_equivalent():
    with pytest.raises(UnknownNameError, match="use prepare_by_platform"):
        from chipfit.quantize_fx import get_qconfig_by_platform  # noqa: F401
    with pytest.raises(AttributeError):
        _ = fx.nothing


class Encoder(nn.Module):
    """An encoder layer with one head, [N, T] words to [N, 3]."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, words):
        x = self.words(words)
        scores = torch.matmul(self.q(x), self.k(x).transpose(-1, -2)) * 0.25
        x = self.norm(x + torch.matmul(torch.softmax(scores, -1), self.v(x)))
        return self.down(torch.relu(self.up(x[:, 0])))


@pytest.mark.parametrize("backend", [BackendType.Academic_NLP, BackendType.Tensorrt_NLP])
def test_language_models_are_quantized_with_bits_of_their_own(backend, tmp_path):
    """As in application/nlp_example of MQBench: 8 bits in all layers, calibration by quantiles."""
    torch.manual_seed(0)
    scheme = {"bit": 8, "symmetry": True, "per_channel": True, "pot_scale": False}
    given = {**ACADEMIC, "a_observer": "EMAQuantileObserver", "w_qscheme": scheme}
    given |= {"a_qscheme": {**scheme, "symmetry": backend is not BackendType.Academic_NLP, "per_channel": False}}
    model = prepare_by_platform(Encoder().eval(), backend, {"extra_qconfig_dict": given})
    words = torch.randint(0, 50, (4, 7))
    enable_calibration(model)
    model(words)
    enable_quantization(model)
    result = convert_deploy(model, backend, dummy_input=(words,), output_path=tmp_path)
    assert {result.plan[f"{n}.weight"].grid.bits for n in ("q", "k", "v", "up", "down")} == {8}
    torch.testing.assert_close(result.model(words), model(words), rtol=0, atol=0.02)


def test_quantizers_may_observe_while_they_round(net):
    model = calibrated(prepared(net, BackendType.Tensorrt).eval())
    enable_quantization(model, weight_cali_on=True)
    model(DATA[1])
    batches = {n: q.activation_post_process.batches for n, q in quantizers(model).items()}
    assert {k for n, k in batches.items() if "weight" in n} == {2}
    assert {k for n, k in batches.items() if "weight" not in n} == {1}
    fx.enable_calibration_quantization(model, "act_fake_quant")
    assert {q.fake_quant_enabled for n, q in quantizers(model).items() if "weight" in n} == {False}
    assert {q.fake_quant_enabled for n, q in quantizers(model).items() if "weight" not in n} == {True}


def test_the_page_has_every_backend_with_its_platform_and_whether_it_is_proven():
    page = (Path(__file__).parents[2] / "docs/from-mqbench.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `([\w@]+)` \| (yes|no)", page, re.MULTILINE)
    found = {
        name: (platform, proven == "yes") for names, platform, proven in rows for name in re.findall(r"\w+", names)
    }
    assert found == {b.name: (b.setting["platform"], b.proven) for b in BackendType}
