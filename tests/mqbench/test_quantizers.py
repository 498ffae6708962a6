"""Quantizers of MQBench: the example of document 004, and every training algorithm in `AlgorithmQuantizer`."""

import sys

import pytest
import torch
from torch.nn import Parameter

from chipfit.errors import ConfigError, DataError, UnknownNameError, UnsupportedError
from chipfit.mqbench import quantizers
from chipfit.mqbench.quantizers import AlgorithmQuantizer, QuantizeBase, quantizer_of
from chipfit.mqbench.settings import get_qconfig
from chipfit.registry import create, register, registered
from tests.mqbench.test_observers import A4, C4, S4

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


class DocumentLSQ(QuantizeBase):
    """The fragments of "How to self-implement a quantization algorithm", put together."""

    def __init__(self, observer, scale=1.0, zero_point=0.0, use_grad_scaling=True, **observer_kwargs):
        super().__init__(observer, **observer_kwargs)
        self.use_grad_scaling = use_grad_scaling
        self.scale = Parameter(torch.tensor([scale]))
        self.zero_point = Parameter(torch.tensor([zero_point]))

    def forward(self, X):
        if self.observing:
            if self.ada_sign and X.min() >= 0:
                self.quant_max = self.activation_post_process.quant_max = 2**self.bitwidth - 1
                self.quant_min = self.activation_post_process.quant_min = 0
                self.activation_post_process.adjust_sign = True
            self.activation_post_process(X.detach())
            scale, zero_point = self.activation_post_process.calculate_qparams()
            self.scale.data, self.zero_point.data = scale.reshape(-1), zero_point.reshape(-1).float()
        if not self.fake_quant_enabled:
            return X
        if self.qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric):
            self.zero_point.data.zero_()

        def pot_quantization(tensor: torch.Tensor):
            log2t = torch.log2(tensor)
            log2t = (torch.round(log2t) - log2t).detach() + log2t
            return 2**log2t

        scale = pot_quantization(self.scale) if self.pot_scale else self.scale
        factor = 1.0
        if self.use_grad_scaling:
            factor = 1 / (X.numel() / scale.numel() * self.quant_max) ** 0.5
        if self.ch_axis != -1:
            zero = self.zero_point.int()
            return torch._fake_quantize_learnable_per_channel_affine(
                X, scale, zero.float(), self.ch_axis, self.quant_min, self.quant_max, factor
            )
        return torch._fake_quantize_learnable_per_tensor_affine(
            X, scale, self.zero_point, self.quant_min, self.quant_max, factor
        )


@pytest.mark.parametrize("options", [S4, S4 | {"pot_scale": True}, A4, C4, S4 | {"ada_sign": True}])
@pytest.mark.parametrize("x", [X, X.abs()], ids=["signed", "positive"])
def test_the_documents_example_agrees_with_chipfits_lsq(options, x):
    """Values, and gradients of the scale; MQBench clips after rounding."""
    theirs, own = DocumentLSQ("LSQ", **options), {"algorithm": "lsq(clip_first=False)", "role": "weight"}
    ours = AlgorithmQuantizer("LSQ", **own, **options)
    ours.prepare(x)
    results = [q(x) for q in (theirs, ours)]
    torch.testing.assert_close(*results)
    unsigned = options == A4 or (options.get("ada_sign") and x is not X)
    assert theirs.quant_max == ours.quant_max == (15 if unsigned else 7)
    for y in results:
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    torch.testing.assert_close(theirs.scale.grad.reshape(-1), ours.rounds.scale.grad.reshape(-1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(theirs.numbers(), ours.numbers())


def test_a_quantizer_creates_its_observer_and_shares_its_options():
    q = QuantizeBase("EMAMinMaxObserver", ema_ratio=0.5, pot_scale=True, **S4)
    own = q.activation_post_process
    assert type(own).__name__ == "EMAMinMax" and own.ema_ratio == 0.5
    shared = "quant_min quant_max qscheme ch_axis ada_sign pot_scale bitwidth sticky_sign".split()
    assert all(getattr(q, k) == getattr(own, k) for k in shared)
    assert q.bitwidth == 4 and q.qscheme == torch.per_tensor_symmetric and q.ch_axis == -1 and q.pot_scale
    own(torch.tensor([0.0, 3.0]))
    before = float(own.calculate_qparams()[0])
    own.adjust_sign, own.quant_min, own.quant_max = True, 0, 15
    assert (before, float(own.calculate_qparams()[0])) == (0.5, 0.25)  # of 0.4 and 0.2
    with pytest.raises(UnknownNameError, match="'ema_ratio'"):
        QuantizeBase("MinMax", ema_rate=0.5)


@pytest.mark.parametrize("name", registered("training"))
@pytest.mark.parametrize("options", [S4, A4, C4, S4 | {"pot_scale": True}], ids=["int4", "affine", "channel", "pot"])
@pytest.mark.parametrize("role", ["weight", "activation"])
def test_every_algorithm_trains_and_is_saved(name, options, role):
    if role == "activation" and options is C4:
        with pytest.raises(ConfigError, match="per_channel concerns weights"):
            AlgorithmQuantizer("MSE", algorithm=name, role=role, **options)
        return
    grid = QuantizeBase("MinMax", **options).grid
    if create("training", name).refuses(grid, role):
        with pytest.raises(UnsupportedError):
            AlgorithmQuantizer("MSE", algorithm=name, role=role, **options)
        return
    q = AlgorithmQuantizer("MSE", algorithm=name, role=role, **options)
    q.prepare(X if role == "weight" else None)
    parameters = dict(q.named_parameters())
    x = X.clone().requires_grad_()
    q(x).square().sum().backward()
    assert {k: id(p) for k, p in q.named_parameters()} == {k: id(p) for k, p in parameters.items()}
    assert x.grad.isfinite().all() and all(p.grad is not None for p in parameters.values() if p.requires_grad)
    q.eval()
    other = AlgorithmQuantizer("MSE", algorithm=name, role=role, **options)
    other.prepare(X if role == "weight" else None)
    other.load_state_dict(q.state_dict())
    assert torch.equal(other.eval()(X), q(X)) and q(X).unique().numel() <= 16 * (6 if options is C4 else 1)
    assert q.activation_post_process.batches == 1  # inference observes nothing


@pytest.mark.parametrize("name", registered("training"))
@pytest.mark.parametrize("observer", ["MinMax", "EMAMinMax", "LSQ", "QuantileMovingAverage"])
@pytest.mark.parametrize("options", [S4, A4], ids=["int4", "affine"])
def test_a_first_batch_of_zeros_does_not_decide_a_scale(name, observer, options):
    """Training begins anew with the first batch that has another number; until then the range is [0, 1]."""
    if create("training", name).refuses(QuantizeBase("MinMax", **options).grid, "activation"):
        pytest.skip("refused by name")
    late, usual = (AlgorithmQuantizer(observer, algorithm=name, **options).train() for _ in range(2))
    assert not late(torch.zeros(4, 5)).any()
    zeroed = [p for p in late.parameters() if p.requires_grad]
    assert all(float(p.detach().abs().max()) > 1e-3 or p.min() == 0 for p in zeroed)
    assert torch.equal(late(X), usual(X)) and usual(X).unique().numel() > 3
    late(3 * X)  # observes no more
    assert late.numbers() == usual.numbers()


def test_a_channel_of_zeros_has_the_greatest_scale_of_the_others():
    w = torch.stack([torch.zeros(5), torch.linspace(-1, 3, 5), torch.linspace(-1, 1, 5)]).requires_grad_()
    q = AlgorithmQuantizer("MinMax", algorithm="tqt(pot=False)", role="weight", **C4)
    q.prepare(w)
    q(w)
    assert q.numbers()[0].tolist() == pytest.approx([3 / 7.5, 3 / 7.5, 1 / 7.5])
    with torch.no_grad():
        w[0] = 1.0  # a step of training
    (q(w) * 2).sum().backward()
    assert w.grad[0].tolist() == [2] * 5


def test_signedness_follows_the_data_and_sticks_by_default():
    for sticky in (True, False):
        q = AlgorithmQuantizer("MinMax", algorithm="ste", ada_sign=True, sticky_sign=sticky, **S4)
        quantizers.enable_calibration(q)
        q(torch.tensor([0.0, 3.0]))
        assert (q.quant_min, q.quant_max) == (0, 15) and float(q.numbers()[0]) == pytest.approx(3 / 15)
        q(torch.tensor([-1.0, 3.0]))
        assert (q.quant_min, q.quant_max) == ((0, 15) if sticky else (-8, 7))
        other = AlgorithmQuantizer("MinMax", algorithm="ste", ada_sign=True, sticky_sign=sticky, **S4)
        other.load_state_dict(q.state_dict())
        assert other.rounds.grid == q.rounds.grid and other.numbers() == q.numbers()


def test_modes_of_a_model():
    q = torch.nn.Sequential(AlgorithmQuantizer("MinMax", algorithm="ste", **S4)).eval()
    with pytest.raises(DataError, match="enable_calibration"):
        q(X)
    quantizers.enable_calibration(q)
    assert q(X) is X and q[0].activation_post_process.batches == 1
    quantizers.enable_quantization(q)
    rounded = q(10 * X)
    assert rounded.abs().max() < 10 and q[0].activation_post_process.batches == 1
    quantizers.enable_all(q)
    assert not torch.equal(q(10 * X), rounded) and q[0].activation_post_process.batches == 2
    quantizers.disable_all(q.train())
    assert q(X) is X and q[0].activation_post_process.batches == 2
    quantizers.enable_calibration(q, named="weight")
    assert not q[0].observer_enabled


@pytest.mark.usefixtures("drop_ins")
def test_a_method_is_a_name_a_class_or_permitted_code(tmp_path, monkeypatch):
    register("quantizer", "documented")(DocumentLSQ)
    assert quantizer_of("documented") is DocumentLSQ is quantizer_of(DocumentLSQ)
    assert isinstance(quantizer_of("lsq(use_grad_scaling=False)")(**S4), AlgorithmQuantizer)
    (tmp_path / "of_mine.py").write_text(
        "from chipfit.quantize_fx import QuantizeBase\nclass Mine(QuantizeBase):\n    forward = lambda self, x: x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="allow_code=True"):
        quantizer_of("of_mine:Mine")
    assert "of_mine" not in sys.modules
    assert quantizer_of("of_mine:Mine", allow_code=True).__name__ == "Mine"
    for wrong in ("of_mine:Yours", "not_mine:Mine", "torch:nn"):
        with pytest.raises(ConfigError):
            quantizer_of(wrong, allow_code=True)
    with pytest.raises(UnknownNameError, match="'documented'"):
        quantizer_of("document")
    register("quantizer", "lsq")(DocumentLSQ)
    with pytest.raises(ConfigError, match="a quantizer and a training algorithm"):
        quantizer_of("lsq")


@pytest.mark.usefixtures("drop_ins")
def test_options_follow_the_name_of_a_method():
    register("quantizer", "documented")(DocumentLSQ)
    made_of = get_qconfig("documented(use_grad_scaling=False)", "lsq(use_grad_scaling=False)").quantizer
    assert not made_of("weight", end=False).use_grad_scaling
    assert not made_of("activation", end=False).algorithm.use_grad_scaling
    for method in ("documented(grad_scaling=False)", "lsq(grad_scaling=False)", "ema(grad_scaling=False)"):
        with pytest.raises(UnknownNameError, match="'grad_scaling'"):
            get_qconfig(method)
