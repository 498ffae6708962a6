"""TorchScript programs are read as the modules that they were made of."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import chipfit
from chipfit.engine.run import run
from chipfit.errors import CaptureError
from chipfit.frameworks import load_model
from chipfit.graph.ir import OPAQUE
from chipfit.graph.linear import LINEAR
from tests.build import quantized

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Shuffled(nn.Module):
    """It computes with sizes, as the blocks of ShuffleNet do, and with a mask that it writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.conv = nn.Conv2d(8, 8, 3, padding="same", groups=2)
        self.head = nn.Linear(8, 5)
        self.register_buffer("shift", torch.rand(1, 8, 1, 1))

    def forward(self, image, factor: float = 0.5):
        x = self.stem(image)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, -1, h, w)
        mask = torch.zeros(x.size(-2), x.size(-1))
        mask[1:, : w // 2] = 1.0
        x = F.relu(self.conv(x) + self.shift) * mask
        return self.head(x.mean((2, 3))) * factor


X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(1)
    return Shuffled().eval()


def loaded(program):
    file = io.BytesIO()
    torch.jit.save(program, file)
    file.seek(0)
    return torch.jit.load(file)


PROGRAMS = {
    "scripted": torch.jit.script,
    "traced": lambda m: torch.jit.trace(m, X),
    "loaded": lambda m: loaded(torch.jit.script(m)),
    "loaded trace": lambda m: loaded(torch.jit.trace(m, X)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_read_as_its_module(name):
    model = net()
    want, got = chipfit.capture(model, (X,)), chipfit.capture(PROGRAMS[name](model), (X,))
    of_tensors = [[(n.op, g.shape(n.output)) for n in g if g.shape(n.output)] for g in (want, got)]
    assert of_tensors[0] == of_tensors[1]
    assert [n.layer for n in got if n.op in LINEAR] == ["stem.0", "conv", "head"]
    assert {*got.weights} >= {*dict(model.named_parameters())} and got.trainable >= {"conv.weight", "head.bias"}
    assert got.shape(got.inputs[0]) == (None, 3, 6, 6)
    batch = torch.rand(7, 3, 6, 6)
    torch.testing.assert_close(run(got, [batch])[got.outputs[0]], model(batch))


@pytest.mark.parametrize("name", [*PROGRAMS, "frozen"])
def test_a_quantized_program_is_exact_and_trains(name):
    program = torch.jit.freeze(torch.jit.script(net())) if name == "frozen" else PROGRAMS[name](net())
    before = copy.deepcopy(program.state_dict())
    result = quantized(program, X)
    assert result.verify([torch.rand(4, 3, 6, 6)]).exact
    if name != "frozen":  # its weights are constants
        result.model(X).sum().backward()
        assert all(p.grad is not None for p in result.model.parameters() if p.requires_grad)
    assert all(torch.equal(v, before[k]) for k, v in program.state_dict().items())


def test_a_program_may_be_a_part_of_a_module():
    """And of several float types: it is read in float32."""
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())), nn.Conv2d(4, 2, 1)).eval()
    for x in (X, X.double()):
        graph = chipfit.capture(model.to(x.dtype), (x,))
        assert [(n.op, n.layer) for n in graph] == [("Conv2D", "0.0"), ("Relu", "0"), ("Conv2D", "1")]
        assert all(w.dtype == torch.float32 for w in graph.weights.values())
    assert isinstance(model[0], torch.jit.ScriptModule)


class Branches(nn.Module):
    def forward(self, x):
        if bool(x.sum() > 0):
            return x
        return -x


def test_a_program_whose_calls_depend_on_values_is_refused():
    with pytest.raises(
        CaptureError, match="TorchScript program do not show what it computes.*module that was scripted"
    ):
        chipfit.capture(torch.jit.script(Branches()), (X,))


def test_a_module_in_the_place_of_a_program_has_its_modes_and_types():
    model = load_model(torch.jit.script(net()))
    assert not model.training and not model.get_submodule("stem.1").training
    model.train()
    assert model.program.training and getattr(model.program.stem, "1").training
    model.double()
    assert model.program.conv.weight.dtype is torch.float64 and model(X.double()).dtype is torch.float64
    assert model.shift is dict(model.program.named_buffers())["shift"]
    again = copy.deepcopy(model)
    with torch.no_grad():
        again.conv.weight.zero_()
    assert model.conv.weight.abs().max() > 0 and not again.program.conv.weight.any()


def test_what_depends_on_no_input_may_be_written_in_place():
    """As windows of Swin transformers are marked; PyTorch's exporter would keep every write as an operator."""

    class Windows(nn.Module):
        def forward(self, x):
            mask = x.new_zeros(6, 6)
            for k, rows in enumerate((slice(0, 2), slice(2, 4), slice(4, 6))):
                mask[rows, 1:4] = k
            other = mask.view(2, 3, 6).unsqueeze(1) - mask.view(3, 2, 6)[:, :1].transpose(0, 1)
            return x + other.masked_fill(other != 0, -100.0)[0, 0, 0]

    graph, batch = chipfit.capture(Windows(), (X,)), torch.rand(5, 3, 6, 6)
    assert [n.op for n in graph] == ["Add"] and OPAQUE not in {n.op for n in graph}
    torch.testing.assert_close(run(graph, [batch])[graph.outputs[0]], Windows()(batch))
