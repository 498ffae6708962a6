"""`.tflite` files of whole networks: what is refused, what is written in float, open axes, and the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter
from torch import nn

from chipfit.errors import UnsupportedError
from chipfit.export.tflite.builder import code_type
from chipfit.export.tflite.file import INT4, TYPES
from chipfit.export.tflite.ops import OPERATORS, REFUSED
from chipfit.export.tflite.writer import content, export_tflite
from chipfit.frameworks.torch.capture import capture
from chipfit.operators.table import OPS
from chipfit.passes.decompose import RULES
from chipfit.plan.record import TensorPlan
from chipfit.registry import lookup
from chipfit.runtimes.litert import LiteRt
from tests.build import model_of, quantized, randn, sequential, stored
from tests.export.operators import alone
from tests.export.tflite.test_writer import operators, read
from tests.zoo import make


def test_the_signature_has_the_models_names(tmp_path):
    model, batch = make("dict_out")
    file = export_tflite(capture(model, (batch,)), None, tmp_path / "m.tflite")
    signature = Interpreter(model_path=str(file)).get_signature_list()["serving_default"]
    assert sorted(signature["inputs"]) == ["batch_x", "batch_y_z"]


def test_transposed_convolutions_fix_the_batch_and_the_runtime_cuts_batches_up(tmp_path):
    model, x = nn.ConvTranspose2d(3, 4, 2, 2), torch.randn(5, 3, 6, 6)
    file = export_tflite(capture(model, (x,)), None, tmp_path / "m.tflite", batch=1)
    assert Interpreter(model_path=str(file)).get_input_details()[0]["shape_signature"].tolist() == [1, 6, 6, 3]
    np.testing.assert_allclose(next(iter(LiteRt(file).run([x.numpy()]).values())), model(x).detach().numpy(), atol=1e-5)


def test_executed_tells_xnnpacks_operators_from_litert_s_own(tmp_path):
    result = quantized(sequential(nn.Conv2d(3, 4, 1), nn.GELU()), torch.randn(2, 3, 4, 4), "tflite_int8")
    file, kinds = result.export(tmp_path / "m.tflite"), ("CONV_2D", "DEQUANTIZE", "QUANTIZE")
    assert LiteRt(file).executed() == {"GELU": 1} | {f"XNNPACK {kind}": 1 for kind in kinds}
    assert lookup("runtime", "litert_optimized")(file).executed() == dict.fromkeys(("GELU", *kinds), 1)


def test_everything_that_the_file_cannot_hold_is_named_in_one_error_and_no_file_is_left(tmp_path):
    upside = nn.ConvTranspose2d(4, 4, 3, dilation=2)
    model = sequential(upside, nn.MaxPool2d(2, dilation=2), nn.Conv2d(4, 2, 1), nn.Upsample((9, 9), mode="bicubic"))
    with pytest.raises(UnsupportedError) as e:
        quantized(model, torch.randn(2, 4, 9, 9), "tflite_int8").export(tmp_path / "m.tflite")
    reasons = "TransposeConv2D '0': it has dilation", "MaxPool '1': its window is dilated", "Resize '3': mode 'cubic'"
    assert all(part in str(e.value) for part in (*reasons, "Try: replace these layers"))
    assert not list(tmp_path.iterdir())


def test_codes_that_move_between_unequal_scales_are_written_in_float(tmp_path):
    result = quantized(sequential(nn.Conv2d(3, 4, 1), nn.AvgPool2d(2)), torch.randn(2, 3, 4, 4), "xnnpack")
    x, y = (result.plan.tensors[v] for v in (result.graph.nodes[1].inputs[0], result.graph.outputs[0]))
    assert x.scale != y.scale  # the kernel would average the codes and call them the result's
    (g,) = read(result.export(tmp_path / "m.tflite").read_bytes()).subgraphs
    pool = next(o for o in g.operators if o.builtinOptionsType == schema.BuiltinOptions.Pool2DOptions)
    assert g.tensors[pool.inputs[0]].type == schema.TensorType.FLOAT32


def test_an_activation_that_the_kernel_cannot_apply_is_written_in_float_with_it(tmp_path):
    torch.manual_seed(0)
    x = 4 * torch.randn(2, 3, 4, 4)
    result = quantized(sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid()), x, "ethos_u")
    assert result.plan.groups == (("conv2d", "sigmoid"),)
    (got,) = LiteRt(result.export(tmp_path / "m.tflite")).run([x.numpy()]).values()
    assert np.abs(got - result.model(x).detach().numpy()).max() < 1.01 / 256


def test_what_is_written_in_integers_is_simulated_in_integers():
    integer = {op for op, row in OPERATORS.items() if row.integer}
    moving = {op for op in integer if OPERATORS[op].moves}
    for kernels in ("litert_reference", "litert_optimized", "litert_xnnpack"):
        profile = lookup("kernels", kernels)
        assert set(profile.kernels) >= integer - moving
        assert set(profile.kernels) <= integer
        assert set(profile.pass_through) <= moving


def test_every_canonical_operator_has_a_row_or_a_rule_or_a_reason_why_the_file_cannot_hold_it():
    assert set(OPERATORS) | set(RULES) | set(REFUSED) == set(OPS)
    assert not set(REFUSED) & (set(OPERATORS) | set(RULES))


def test_a_layer_whose_weight_is_computed_is_refused(tmp_path):
    drawn = model_of(lambda m, x, w: nn.functional.conv2d(x, w))
    graph = capture(drawn, (torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)))
    with pytest.raises(UnsupportedError, match="Conv2D 'conv2d': its weight is computed at run time"):
        export_tflite(graph, None, tmp_path / "m.tflite")


def apart(x):
    """How far each sample is from each other one, [N, N, 4]."""
    return x[:, None] - x[None]


OPEN, SAMPLES = "more than one axis .* run time, unless `batch` is given", "compares samples with each other.*Try: pass"


@pytest.mark.parametrize(
    "f, words",
    [
        (lambda x: apart(x).unsqueeze(-1), f"Unsqueeze '.*': {OPEN}"),
        (lambda x: apart(x)[..., :1].squeeze(-1), f"Squeeze '.*': {OPEN}"),
        (lambda x: apart(x).unflatten(2, (2, 2)), f"Reshape '.*': {OPEN}"),
        (lambda x: apart(x).flatten().view(x.shape[0], -1), SAMPLES),
        (lambda x: x @ torch.cat([torch.ones(1, 4).expand(x.shape[0], -1), x]).T, SAMPLES),
    ],
    ids=["unsqueeze", "squeeze", "reshape", "flatten", "product"],
)
def test_two_axes_that_follow_the_batch_are_written_for_a_batch_that_is_given(f, words, tmp_path):
    x, net = torch.randn(3, 4), model_of(lambda m, x: f(x) * 2)
    graph = capture(net, (x,))
    with pytest.raises(UnsupportedError, match=words):
        export_tflite(graph, None, tmp_path / "m.tflite")
    (got,) = LiteRt(export_tflite(graph, None, tmp_path / "m.tflite", batch=3)).run([x.numpy()]).values()
    np.testing.assert_allclose(got, net(x).numpy(), rtol=1e-5, atol=1e-5)


def test_a_transposed_convolution_that_same_places_is_one_operator(tmp_path):
    """Kernel 4, stride 2, padding 1 of 6 rows: 12 rows; SAME cuts (12/2 - 1) 2 + 4 - 12 = 2, one before, one behind."""
    for padding, more in ((1, []), (2, ["SLICE"]), (0, [])):
        graph = capture(nn.ConvTranspose2d(3, 4, 4, 2, padding), (torch.randn(2, 3, 6, 6),))
        assert operators(content(graph, None)) == ["TRANSPOSE_CONV", *more]


NARROWEST = [("weight", 4, None), *(("weight", b, "int8") for b in (5, 8))]
NARROWEST += [("activation", b, "int16" if b < 17 else "int32") for b in (9, 16, 17)]


@pytest.mark.parametrize("role, bits, kind", [("bias", 32, "int32"), ("bias", 33, "int64"), *NARROWEST])
def test_codes_take_the_narrowest_type_that_holds_them(role, bits, kind):
    t = TensorPlan(name="t", role=role, stored=stored(1.0, bits=bits))
    assert code_type(t) == (TYPES[kind] if kind else INT4)


ROWS = torch.tensor([3, 0, 2]).reshape(-1, 1, 1, 1)
#: name -> function of an image and of others, and these; zeros unless given
PICKED = {
    "constant indices, some from the end": (lambda x, i: x[:, [0, -1, 1]],),
    "the row that each sample names": (lambda x, i: x.gather(1, i.expand(-1, -1, 6, 6)), ROWS),
    "a token before the others": (lambda x, i: torch.cat([i.expand(x.shape[0], -1, -1), x[:, 0]], 1), randn(1, 1, 6)),
}


@pytest.mark.parametrize("what", PICKED)
def test_what_is_picked_and_repeated_is_what_torch_has(what, tmp_path):
    f, *index = PICKED[what]
    inputs = torch.randn(3, 4, 6, 6), *(index or [torch.zeros(2)])
    file = export_tflite(capture(model_of(lambda m, x, i: f(x, i)), inputs), None, tmp_path / "m.tflite")
    (got,) = LiteRt(file).run([x.numpy() for x in inputs]).values()
    np.testing.assert_allclose(got, f(*inputs).numpy(), rtol=1e-6, atol=1e-6)


def test_heads_that_share_keys_are_written_without_copies_of_these():
    written = operators(content(alone("heads that share keys")[0], None))
    assert {"BATCH_MATMUL", "TILE", "BROADCAST_TO"} & set(written) == {"BATCH_MATMUL"}
