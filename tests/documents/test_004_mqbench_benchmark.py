"""Statements of the document "Benchmark" of MQBench; more about each in tests/mqbench and tests/bench."""

from pathlib import Path

import pytest
import torch
import torch.fx
import yaml
from torch import nn

from chipfit import quantize_fx
from chipfit.bench.config import of
from chipfit.bench.store import Store
from chipfit.errors import ConfigError
from chipfit.mqbench.observers import ObserverBase
from chipfit.quantize_fx import QuantizeBase, get_backend_params, get_foldbn_config, get_qconfig
from chipfit.registry import register
from tests.bench.tiny import config
from tests.build import randn, small_cnn
from tests.mqbench.test_quantizers import DocumentLSQ
from tests.processes import python

ROOT = Path(__file__).parents[2]
SNPE = {"ada_sign": False, "symmetry": False, "per_channel": False, "pot_scale": False}
QPARAMS = {"w_method": "lsq", "a_method": "lsq", "bit": 4}


def prepared(foldbn_strategy=4, backend_params=SNPE, qparams=QPARAMS):
    """Return the model of the document's conversion."""
    model_qconfig = get_qconfig(**qparams, **backend_params)
    foldbn_config = get_foldbn_config(foldbn_strategy)
    return quantize_fx.prepare_qat_fx(small_cnn(norm=True), {"": model_qconfig}, foldbn_config)


def weight_quantizers(model):
    return [m for n, m in model.named_modules() if n.endswith("weight_quantizer")]


def train(model):
    optimizer = torch.optim.SGD(model.train().parameters(), 0.01)
    for step in range(2):
        optimizer.zero_grad()
        model(randn(4, 3, 8, 8, seed=step)).square().sum().backward()
        optimizer.step()
    return model.eval()


# ---------------------------------------------------------------- conversion


def test_a_backend_is_four_flags():
    flags = {"ada_sign", "symmetry", "per_channel", "pot_scale"}
    assert {k: v for k, v in get_backend_params("snpe").items() if k in flags} == SNPE


def test_a_prepared_model_trains_like_any_module():
    model = prepared()
    assert isinstance(model, nn.Module)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert {n for n in before if n.endswith("scale")} <= moved and any(n.endswith("layer.weight") for n in moved)
    again = prepared().eval()
    again.load_state_dict(model.state_dict())
    x = randn(2, 3, 8, 8)
    assert torch.equal(again(x), model(x))


def test_it_is_a_graph_module_whose_code_is_made_from_its_graph():
    model = prepared()
    assert isinstance(model, torch.fx.GraphModule)
    kinds = {n.op for n in model.graph.nodes}
    assert {"placeholder", "call_module", "output"} <= kinds
    assert "def forward(self" in model.code and "post_act_fake_quantizer" in model.code


@pytest.mark.parametrize("strategy", [-1, 0, 1, 2, 3, 4])
def test_strategy_of_folding_and_algorithm_are_chosen_freely(strategy):
    for method in ("lsq", "pact", "dorefa"):
        assert torch.isfinite(
            train(prepared(strategy, qparams={**QPARAMS, "a_method": method}))(randn(2, 3, 8, 8))
        ).all()


# ---------------------------------------------------------------- experiments


def test_the_experiment_of_lsq_on_resnet18_is_a_folder_with_configuration_and_script():
    folder = ROOT / "qbench_zoo" / "lsq_experiments" / "resnet18_4bit_academic"
    given = yaml.safe_load((folder / "config.yaml").read_text())
    assert (given["qparams"], given["backend"], given["bnfold"]) == (QPARAMS, "academic", 4)
    assert "python -u -m chipfit.bench.solver.cls_quant_solver --config config.yaml" in (folder / "run.sh").read_text()


@pytest.mark.slow
def test_the_core_command_runs_an_experiment(tmp_path):
    data = {**config()["data"], "train": {"images": 100}, "test": {"images": 20}}
    given = config(data=data, deploy=[], saver={"print_freq": 100, "val_freq": 100, "pretrain": {"epochs": 1}})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(given))
    done = python("-m chipfit.bench.solver.cls_quant_solver", "--config", "config.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = Store(tmp_path / "bench_runs" / "runs.sqlite").rows()
    assert 0 <= row["outcome"]["top1"] <= 100


def test_methods_and_hardware_of_an_experiment_stand_in_its_file():
    text = "qparams:\n    w_method: lsq\n    a_method: lsq\n    bit: 4\n\nbackend: academic\nbnfold: 4\n"
    rest = {k: v for k, v in config().items() if k not in ("qparams", "backend", "bnfold")}
    found = of({**rest, **yaml.safe_load(text)})
    assert (found.qparams.w_method, found.qparams.a_method, found.qparams.bit) == ("lsq", "lsq", 4)
    assert (found.backend, found.bnfold) == ("academic", 4)


# ---------------------------------------------------------------- an algorithm of one's own


def test_every_quantizer_is_a_quantize_base_with_an_observer():
    symmetric = {**SNPE, "symmetry": True}
    for name in ("lsq", "dorefa", "dsq", "qil", "apot", "tqt", "ste"):
        for quantizer in weight_quantizers(prepared(4, symmetric, {**QPARAMS, "w_method": name})):
            assert isinstance(quantizer, QuantizeBase)
            assert isinstance(quantizer.activation_post_process, ObserverBase)
    assert issubclass(DocumentLSQ, QuantizeBase)


def test_quantizer_and_observer_take_the_documents_parameters():
    """`qshcme` in the document is torch's `qscheme`."""
    given = {"quant_min": -8, "quant_max": 7, "qscheme": torch.per_channel_symmetric, "ch_axis": 0}
    given |= {"ada_sign": False, "pot_scale": True}
    quantizer = QuantizeBase("MinMax", **given)
    for owner in (quantizer, quantizer.activation_post_process):
        assert {k: getattr(owner, k) for k in given} == given
    for scheme in ("per_tensor_symmetric", "per_channel_symmetric", "per_tensor_affine", "per_channel_affine"):
        axis = 0 if "channel" in scheme else -1
        assert QuantizeBase("MinMax", qscheme=getattr(torch, scheme), ch_axis=axis).qscheme is getattr(torch, scheme)


@pytest.mark.parametrize("per_channel", [True, False])
def test_channels_are_on_axis_0_of_convolutions_and_linear_layers(per_channel):
    axes = [q.ch_axis for q in weight_quantizers(prepared(backend_params={**SNPE, "per_channel": per_channel}))]
    assert axes == ([0, 0, 0] if per_channel else [-1, -1, -1])


def test_the_sign_adapts_in_the_academic_setting_only():
    backends = "academic tensorrt acl tvm snpe fbgemm tflitemicro".split()
    assert [b for b in backends if get_backend_params(b)["ada_sign"]] == ["academic"]
    for contradiction in ({"symmetry": False}, {"symmetry": True, "pot_scale": True}):
        with pytest.raises(ConfigError, match="academic"):
            get_qconfig(**QPARAMS, **{**SNPE, "ada_sign": True, **contradiction})


def observed(x, **options):
    """Return the document's LSQ after one batch of training, and what it makes of the batch."""
    start = {"quant_min": -8, "quant_max": 7, "qscheme": torch.per_tensor_symmetric, "ch_axis": -1}
    quantizer = DocumentLSQ("MinMax", **{**start, **options}).train()
    return quantizer, quantizer(x)


def test_scale_and_zero_point_are_new_parameters():
    quantizer, y = observed(torch.tensor([-4.0, 0.3, 3.75]))
    assert {n for n, _ in quantizer.named_parameters()} == {"scale", "zero_point"}
    y.sum().backward()
    assert quantizer.scale.grad is not None


def test_values_without_a_sign_move_the_range_up():
    """4 bits: 0 to 2^4 - 1."""
    for x, ends in ((torch.tensor([0.0, 3.0]), (0, 15)), (torch.tensor([-1.0, 3.0]), (-8, 7))):
        quantizer, _ = observed(x, ada_sign=True)
        own = quantizer.activation_post_process
        assert (quantizer.quant_min, quantizer.quant_max) == (own.quant_min, own.quant_max) == ends
        assert own.adjust_sign is (ends[0] == 0)


def test_symmetric_quantization_has_the_zero_point_0():
    x = torch.tensor([-1.0, 3.0])
    assert observed(x)[0].zero_point.item() == 0
    affine = observed(x, quant_min=0, quant_max=15, qscheme=torch.per_tensor_affine)[0]
    assert affine.zero_point.item() == 4  # 1 / (4 / 15) rounded


@pytest.mark.parametrize(("learned", "scale"), [(0.24, 0.25), (0.35, 0.25), (0.36, 0.5)])
def test_scales_are_rounded_to_the_nearest_power_of_two_of_their_logarithm(learned, scale):
    """2^round(log2 s): the border between 1/4 and 1/2 is sqrt(1/8) = 0.3536. The gradient is 2^round(log2 s) / s."""
    x = torch.linspace(-1, 1, 9)
    quantizer, _ = observed(x, pot_scale=True)
    quantizer.eval().scale.data = torch.tensor([learned])
    quantizer.use_grad_scaling = False
    y = quantizer(x)
    assert torch.equal(y, torch.round(x / scale) * scale)
    y.sum().backward()
    plain = torch.tensor([scale], requires_grad=True)
    torch._fake_quantize_learnable_per_tensor_affine(x, plain, torch.zeros(1), -8, 7, 1.0).sum().backward()
    assert quantizer.scale.grad.item() == pytest.approx(plain.grad.item() * scale / learned, rel=1e-5)


def test_scales_per_channel_and_per_tensor():
    x = torch.tensor([[-1.0, 1.0], [-4.0, 4.0]])
    per_tensor = observed(x)[0].scale
    quantizer, y = observed(x, qscheme=torch.per_channel_symmetric, ch_axis=0)
    assert per_tensor.shape == (1,) and quantizer.scale.shape == (2,)
    assert (quantizer.scale[1] / quantizer.scale[0]).item() == pytest.approx(4)
    assert y[0].abs().max() < 1.2 < y[1].abs().max()


@pytest.mark.usefixtures("drop_ins")
def test_a_registered_quantizer_is_chosen_by_its_name():
    register("quantizer", "of_the_document")(DocumentLSQ)
    model = prepared(qparams={"w_method": "of_the_document", "a_method": "of_the_document", "bit": 4})
    assert all(isinstance(q, DocumentLSQ) for q in weight_quantizers(model))
    assert torch.isfinite(train(model)(randn(2, 3, 8, 8))).all()


# ---------------------------------------------------------------- hardware of one's own


def test_another_setting_of_hardware_is_a_dictionary_of_flags():
    backend_params = {"ada_sign": False, "symmetry": True, "per_channel": False, "pot_scale": True}
    assert get_backend_params("tflitemicro") == backend_params
    model = train(prepared(backend_params=backend_params))
    for quantizer in (m for m in model.modules() if isinstance(m, QuantizeBase)):
        scale, zero = quantizer.numbers()
        assert scale.numel() == 1 and torch.equal(scale.log2(), scale.log2().round()) and not zero.any()
