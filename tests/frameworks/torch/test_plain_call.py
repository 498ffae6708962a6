"""Captured networks are compared with a plain call of the model, and results have the types that the model returns."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import chipfit
from chipfit.errors import PlanError
from tests.build import model_of, quantized, sequential


def warned(result: chipfit.Result) -> list[str]:
    return [note for note in result.plan.rewrites if note.startswith("warning: in eval mode under torch.no_grad()")]


def words(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(len(lengths), 8, 16), torch.arange(8) >= torch.tensor(lengths)[:, None]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_numbers_of_the_transformers_fast_path_are_noted_with_the_switch():
    """The mean over all words, with those that the mask hides: 0 where PyTorch takes its path without gradients."""

    def forward(m, x, pad):
        return m.head(m.encoder(x, src_key_padding_mask=pad).mean(1))

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = model_of(forward, encoder=nn.TransformerEncoder(layer, 1), head=nn.Linear(16, 4))
    result = quantized(model, [words(8, 8, 8, 5)] * 2)  # the padded sample is the last
    assert "set_fastpath_enabled(False) turns it off" in warned(result)[0]
    with torch.no_grad():
        fast, got = model(*words(8, 5)), result.model(*words(8, 5))
    assert fast.shape == got.shape
    assert warned(quantized(model, [words(8, 8, 8, 8)] * 2)) == []
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert warned(quantized(model, [words(8, 8, 8, 5)] * 2)) == []
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


DIFFERENT = {
    "while it is compiled": lambda m, x: m.dense(x) * (1 if torch.compiler.is_compiling() else 2),
    "in an export": lambda m, x: m.dense(x) + (1 if torch.compiler.is_exporting() else 0),
    "in inference mode": lambda m, x: m.dense(x) * (1 if torch.is_inference_mode_enabled() else 2),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_model_that_computes_something_else_while_it_is_captured_is_noted(name):
    assert "returns other numbers than the captured" in warned(
        quantized(model_of(DIFFERENT[name], dense=nn.Linear(8, 4)), torch.randn(8, 8))
    )[0]  # fmt: skip


def test_a_model_whose_results_are_random_is_noted_with_what_draws_them():
    result = quantized(
        model_of(lambda m, x: m.fc(x) + 0.1 * torch.randn_like(x), fc=nn.Linear(4, 4)), torch.randn(8, 4)
    )
    (note,) = warned(result)
    assert note.endswith("it returns other numbers in every call: 'randn_like' draws them")
    assert "what 'randn_like' draws differs in every run" in result.verify([torch.randn(4, 4)]).summary()


@pytest.mark.parametrize("training", [False, True])
def test_what_follows_gradients_and_mode_as_a_plain_call_does_is_not_noted(training):
    def forward(m, x):
        y = m.drop(m.norm(m.dense(x)))
        return y * 2 if torch.is_grad_enabled() or m.training else y

    model = model_of(forward, dense=nn.Linear(8, 4), norm=nn.BatchNorm1d(4), drop=nn.Dropout(0.5)).train(training)
    x = torch.randn(64, 8)
    result = chipfit.quantize(model, x, platform="ort_cpu", progress=False)
    assert warned(result) == [] and model.training is training and int(model.norm.num_batches_tracked) == 0
    with torch.no_grad():
        want = model.eval()(x)
        assert (result.model(x) - want).abs().mean() < 0.03 * want.abs().max()


# ---------------------------------------------------------------- number types


class Mixed(nn.Module):
    """Inputs and results of several types, and a part in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16).bfloat16(), nn.Linear(16, 4)

    def forward(self, x, t):
        y = self.second(F.relu(self.first(x) * t).bfloat16())
        return {"half": y, "single": self.last(y.float()), "double": t * 2, "count": x.long().sum(1)}


def cast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return m.net(x)


def plain(kind: torch.dtype) -> nn.Module:
    return sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(kind)


TYPES = {
    "float16": (lambda: plain(torch.float16), lambda: torch.randn(64, 8).half()),
    "bfloat16": (lambda: plain(torch.bfloat16), lambda: torch.randn(64, 8).bfloat16()),
    "float64": (lambda: plain(torch.float64), lambda: torch.randn(64, 8).double()),
    "mixed": (Mixed, lambda: (torch.randn(64, 8), torch.rand(64, 1).double())),
    "autocast": (lambda: model_of(cast, net=plain(torch.float32)), lambda: torch.randn(64, 8)),
}


@pytest.mark.parametrize("name", TYPES)
def test_the_simulation_takes_and_returns_the_types_of_the_model(name, tmp_path):
    torch.manual_seed(0)
    make, data = TYPES[name]
    model, batch = make().eval(), data()
    result = quantized(model, [batch, data()])
    result.save(tmp_path / "saved")
    given = batch if isinstance(batch, tuple) else (batch,)
    with torch.no_grad():
        want = tree_leaves(model(*given))
    for runs in (result.model, result.device_model, chipfit.load(tmp_path / "saved").model):
        got = tree_leaves(runs(*given))
        assert [x.dtype for x in got] == [x.dtype for x in want]
        assert all((a - b).abs().double().mean() < 0.03 * b.abs().max() for a, b in zip(got, want, strict=True))
    assert warned(result) == [] and result.verify([data()]).sound
    told = [note for note in result.plan.rewrites if "it was read, and is simulated, in float32" in note]
    assert len(told) == 1 and (name if name.startswith(("float", "bfloat")) else "bfloat16") in told[0]


def test_gradients_pass_through_the_types_and_a_model_in_half_precision_takes_that():
    model = plain(torch.float64)
    x = torch.randn(64, 8, dtype=torch.float64, requires_grad=True)
    trained = quantized(model, x.detach()).model
    trained(x).sum().backward()
    assert x.grad.dtype is torch.float64 and bool(x.grad.any())
    half = quantized(plain(torch.float32), torch.randn(64, 8)).model.to(torch.bfloat16)
    assert half(torch.randn(2, 8)).dtype is half(torch.randn(2, 8).bfloat16()).dtype is torch.bfloat16


def test_a_saved_result_with_a_strange_type_is_refused(tmp_path):
    result = quantized(plain(torch.float16), torch.randn(64, 8).half())
    assert "float16" in result.graph.out_spec
    result.graph.out_spec = result.graph.out_spec.replace("float16", "Generator")
    result.save(tmp_path / "saved")
    with pytest.raises(PlanError, match="no number type named 'Generator'"):
        chipfit.load(tmp_path / "saved")
