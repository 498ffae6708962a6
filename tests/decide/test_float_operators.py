"""Integers only: nothing of a file computes in floats, or the operators that would are named before calibration."""

import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from torch import nn

import chipfit
from chipfit import Settings
from chipfit.errors import UnsupportedError
from chipfit.platform.load import load
from chipfit.platform.schema import Platform
from chipfit.runtimes.tflm import operator_names
from tests.build import model_of, quantized, sequential

CHIPS = ["tflm_cmsis_nn", "ethos_u"]


def types_in(path) -> set[int]:
    graph = schema.ModelT.InitFromObj(schema.Model.GetRootAs(path.read_bytes(), 0)).subgraphs[0]
    return {t.type for t in graph.tensors}


def small(*last: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *last, nn.Flatten(), nn.Linear(8 * 16, 5), nn.Softmax(-1))


def without_tables(name: str) -> Platform:
    """A chip that does not look functions up in tables of its own."""
    chip = load(name)
    return chip.model_copy(update={"ops": tuple(rule for rule in chip.ops if "Curve" not in rule.match)})


@pytest.mark.parametrize("platform", CHIPS)
def test_no_tensor_of_a_file_is_float_and_its_ends_are_integers(tmp_path, platform):
    result = quantized(small(), [torch.randn(4, 3, 6, 6)], platform)
    path = result.export(tmp_path / "net.tflite")
    assert types_in(path) <= {schema.TensorType.INT8, schema.TensorType.INT32}
    assert not {"QUANTIZE", "DEQUANTIZE"} & {*operator_names(path.read_bytes())}
    assert result.verify([torch.randn(4, 3, 6, 6)], path=path).exact


def test_the_setting_gives_the_same_promise_on_a_chip_with_a_float_unit(tmp_path):
    data = [torch.randn(4, 3, 6, 6)]
    free = quantized(small(nn.GELU()), data, "tflite_int8").export(tmp_path / "free.tflite")
    assert "QUANTIZE" in operator_names(free.read_bytes())  # of its float input
    bound = quantized(small(nn.GELU()), data, "tflite_int8", settings=Settings(integer_only=True))
    path = bound.export(tmp_path / "bound.tflite")
    assert types_in(path) <= {schema.TensorType.INT8, schema.TensorType.INT32}
    assert bound.verify(data, path=path).exact
    floats = bound.export(tmp_path / "floats.tflite", io="float")  # what the user asks for is done
    assert schema.TensorType.FLOAT32 in types_in(floats)


@pytest.mark.parametrize(
    "layer, op, helps",
    [
        (nn.GELU(), "Gelu", "approximate='tanh'"),
        (nn.ELU(0.5), "Elu", "Elu with alpha 1"),
        (model_of(lambda m, x: torch.exp(x)), "Exp", "Softmax"),
        (model_of(lambda m, x: torch.cumsum(x, 1)), "CumSum", "outside the file"),
    ],
)
def test_operators_that_a_microcontroller_lacks_are_named_before_calibration(layer, op, helps):
    net, data, chip = small(layer), [torch.randn(4, 3, 6, 6)], without_tables("tflm_cmsis_nn")
    notes = chipfit.lint(net, data[0], chip).notes
    assert any(note.startswith("warning: ") and op in note and helps in note for note in notes), notes
    with pytest.raises(UnsupportedError, match="cannot run in integers on 'tflm_cmsis_nn'") as refused:
        quantized(net, data, chip)
    assert op in str(refused.value) and helps in str(refused.value)


def test_an_override_that_keeps_a_layer_in_float_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"Linear '3' cannot run in integers .* overrides"):
        quantized(small(), [torch.randn(4, 3, 6, 6)], "tflm_cmsis_nn", overrides={"3": "float"})
    result = quantized(small(), [torch.randn(4, 3, 6, 6)], "tflm_cmsis_nn")
    with pytest.raises(UnsupportedError, match="cannot run in integers"):
        result.edit({"3": "float"})


def test_indices_have_32_bits_in_the_file_and_64_in_the_model(tmp_path):
    torch.manual_seed(0)
    net = model_of(
        lambda m, t: m.head(m.table(t).flatten(1)).argmax(1), table=nn.Embedding(20, 4), head=nn.Linear(20, 6)
    )
    tokens = torch.randint(0, 20, (8, 5))
    result = quantized(net, [tokens], "tflm_cmsis_nn")
    path = result.export(tmp_path / "net.tflite")
    assert schema.TensorType.INT64 not in types_in(path)
    found = result.verify([torch.randint(0, 20, (8, 5))], path=path)
    assert found.exact and found.outputs[0].elements == 8, found.summary()


def test_repetitions_become_concatenations_where_the_runtime_has_no_kernel_for_them():
    result = quantized(
        model_of(lambda m, x: torch.sigmoid(x).repeat(1, 2, 1, 3)), [torch.randn(2, 3, 4, 4)], "tflm_cmsis_nn"
    )
    found = result.verify([torch.randn(2, 3, 4, 4)])
    assert found.exact and dict(found.executed)["CONCATENATION"] == 2, found.executed


#: name -> function of a module's parts and an image: a constant is repeated for each sample
REPEATED = {
    "a token before the others": lambda m, x: torch.cat([m.token.expand(x.shape[0], -1, -1), m.patches(x)], 1),
    "a token after the others": lambda m, x: torch.cat([m.patches(x), m.token.repeat(x.shape[0], 2, 1)], 1),
    "two tokens, 100 times apart": lambda m, x: torch.cat(
        [m.token.expand(len(x), -1, -1), (m.token * 100).expand(len(x), -1, -1), m.patches(x)], 1
    ),
    "positions": lambda m, x: m.patches(x) + m.positions.expand(x.shape[0], -1, -1),
    "factors of channels": lambda m, x: m.patches(x) * m.token.expand_as(m.patches(x)),
    "a token that is joined and added": lambda m, x: torch.cat(
        [token := m.token.expand(x.shape[0], -1, -1), m.patches(x) + token], 1
    ),
    "queries": lambda m, x: m.token.expand(x.shape[0], -1, -1) @ m.patches(x).mT,
}


def tokens_of(forward):
    torch.manual_seed(0)
    patches = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), Swapped())
    numbers = {"token": nn.Parameter(torch.randn(1, 1, 8)), "positions": nn.Parameter(torch.randn(1, 4, 8))}
    return model_of(forward, patches=patches, **numbers)


class Swapped(nn.Module):
    def forward(self, x):
        return x.mT


@pytest.mark.thinned(3)
@pytest.mark.parametrize("platform", ["tflm_cmsis_nn", "ethos_u", "tflite_int8", "tflite_int16x8"])
@pytest.mark.parametrize("what", REPEATED)
def test_a_constant_is_repeated_for_each_sample_in_integers(what, platform, tmp_path):
    net = tokens_of(lambda m, x: torch.relu(REPEATED[what](m, x)))
    result = quantized(net, [torch.randn(4, 3, 8, 8) for _ in range(3)], platform)
    assert {n.exec for n in result.plan.nodes.values() if n.op in ("Expand", "Concat")} <= {"int", "follow"}
    path = result.export(tmp_path / "net.tflite")
    assert "TILE" not in operator_names(path.read_bytes())
    found = result.verify([torch.randn(4, 3, 8, 8)], path=path)
    assert found.exact, found.summary()


class ImageTransformer(nn.Module):
    """Patches, a class token, positions, one block of attention, and a head that reads the token."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 5, 16))
        self.norm, self.qkv, self.out, self.head = (
            nn.LayerNorm(16),
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            nn.Linear(16, 5),
        )

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        q, k, v = self.qkv(self.norm(x)).reshape(-1, 5, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(-1, 5, 16))
        return self.head(x[:, 0])


@pytest.mark.parametrize("platform", ["tflm_cmsis_nn", "tflite_int8"])
def test_an_image_transformer_computes_in_integers_alone(platform, tmp_path):
    torch.manual_seed(0)
    net, x = ImageTransformer().eval(), torch.randn(4, 3, 8, 8)
    result = quantized(net, [torch.randn(4, 3, 8, 8) for _ in range(3)], platform, settings=Settings(integer_only=True))
    path = result.export(tmp_path / "net.tflite")
    assert types_in(path) <= {schema.TensorType.INT8, schema.TensorType.INT32}
    assert result.verify([x], path=path).exact
    token = result.plan.tensors["token"].stored
    assert torch.equal(token.scale, result.plan.tensors["cat"].stored.scale)
    assert (token.dequantize(token.quantize(net.token)) - net.token).abs().max() <= token.scale / 2 * 1.001
    assert torch.nn.functional.cosine_similarity(result.model(x).flatten(), net(x).flatten(), dim=0) > 0.98


@pytest.mark.parametrize("copies", [3, 20])
def test_a_row_of_each_sample_is_repeated_where_the_runtime_has_no_tile(copies, tmp_path):
    """A BROADCAST_TO holds the size of the batch; with an open one copies are joined, as far as these are few."""
    net = tokens_of(lambda m, x: m.patches(x)[:, :1].expand(-1, copies, -1).relu())
    result = quantized(net, [torch.randn(4, 3, 8, 8), torch.randn(2, 3, 8, 8)], "tflm_cmsis_nn")
    path = tmp_path / "net.tflite"
    if copies > 16:
        with pytest.raises(UnsupportedError, match="so many copies need a TILE"):
            result.export(path)
    options = {"batch": 1} if copies > 16 else {}
    found = result.verify([torch.randn(2, 3, 8, 8)], path=result.export(path, **options))
    assert found.exact, found.summary()
