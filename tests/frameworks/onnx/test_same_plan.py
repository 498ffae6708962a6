"""The plan of a float ONNX file is that of the model which it was written from, tensor for tensor."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.converters import torch_networks
from torch import nn

import chipfit
from chipfit.engine.run import run
from chipfit.export.onnx.writer import export_onnx
from chipfit.frameworks import capture
from tests.zoo import ZOO, make, unseen

#: networks whose file states less than the model: other operators or constants
LESS = {
    "chipfit": {"functional", "gru", "in_place_index", "lstm", "dict_out"}
    | {"transformer", "VisionTransformer"}  # attention is written in parts
    | {"padding_modes", "shapes"},  # pads in front of convolutions are written as theirs
    # pads, biases of zeros and parts of no effect are left out; loops are unrolled
    "torch": {"dict_out", "dataclass_out", "functional", "gru", "in_place_index", "lstm", "padding_modes", "shapes"}
    | {"transformer", "VisionTransformer"}
    # batch norms that are folded before differ in the last bit: counts of histograms move by 2e-4, as far as two ranges
    | {"ds_cnn", "Pyramid", "resnet8"},
    # PyTorch's exporter by TorchScript cannot write the last three
    "torchscript": {"Siamese", "attention_manual", "ds_cnn", "functional", "gru", "in_place_index", "lstm"}
    | {"resnet8", "resnet20", "VisionTransformer", "ShuffleNet", "dataclass_out", "dict_out"},
}
FAST = {
    "chipfit": "residual inverted_residual squeeze_excite unet_bilinear conv1d split mlp attention_manual".split(),
    "torch": "residual residual_silu squeeze_excite conv1d attention_fused pixel_shuffle_norms group_norm".split(),
    "torchscript": "residual_silu squeeze_excite conv1d attention_fused shared_and_tied".split(),
}
NAMES = sorted({*ZOO, *torch_networks.NETWORKS})


def network(name: str) -> tuple[nn.Module, list[Any]]:
    """Return a network and two batches of data."""
    if name in ZOO:
        model, batch = make(name)
        return model, [batch, unseen(batch)]
    factory, batches = torch_networks.NETWORKS[name]
    torch.manual_seed(0)
    model = torch_networks.with_statistics(factory())
    torch.manual_seed(1)
    return model, [batches(8) for _ in range(2)]


def write(writer: str, model: nn.Module, batch: Any, file: Path) -> None:
    args = batch if isinstance(batch, tuple) else (batch,)
    if writer == "chipfit":
        export_onnx(capture(model, args), None, file)
    elif writer == "torchscript":
        names = [f"i{k}" for k in range(len(args))]
        options: dict[str, Any] = {"dynamic_axes": {n: {0: "n"} for n in names}, "opset_version": 17}
        with warnings.catch_warnings(action="ignore"):
            torch.onnx.export(model, args, str(file), dynamo=False, input_names=names, **options)
    else:
        sizes = tuple({0: torch.export.Dim.DYNAMIC} for _ in args)
        torch.onnx.export(model, args, file, dynamo=True, verbose=False, dynamic_shapes=sizes)


def quantized(result: chipfit.Result) -> list[tuple[Any, ...]]:
    """Return storage, zero points and scales of all tensors in integers but those behind a dropout, in some order."""
    made = {o: n.op for n in result.graph.nodes for o in n.outputs}
    kept = [t for t in result.plan.tensors.values() if t.stored is not None and made.get(t.name) != "Dropout"]
    found = [(t.role, t.format, t.axis, tuple(t.zero_point.reshape(-1).tolist()), t.scale.reshape(-1)) for t in kept]
    return sorted(found, key=lambda t: (*t[:2], str(t[2]), len(t[4]), [float(f"{s:.3g}") for s in t[4]]))


def check_same_plan(name: str, writer: str, tmp_path: Path) -> None:
    model, data = network(name)
    file = tmp_path / "net.onnx"
    write(writer, model, data[0], file)
    ours, theirs = (quantized(chipfit.quantize(m, data, "ort_cpu", progress=False)) for m in (model, file))
    assert Counter(t[:3] for t in ours) == Counter(t[:3] for t in theirs) and ours
    for a, b in zip(ours, theirs, strict=True):
        assert a[:4] == b[:4]
        torch.testing.assert_close(a[4], b[4], rtol=2e-5, atol=0)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("writer, name", [(w, n) for w, names in FAST.items() for n in names])
def test_a_float_file_has_the_plan_of_its_model(writer, name, tmp_path):
    check_same_plan(name, writer, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["chipfit", "torch", "torchscript"])
@pytest.mark.parametrize("name", NAMES)
def test_fifty_float_files_have_the_plans_of_their_models(writer, name, tmp_path):
    assert len({*NAMES} - LESS[writer]) >= 50
    if name in LESS[writer]:
        pytest.skip("the file states less")
    check_same_plan(name, writer, tmp_path)


class Masked(nn.Module):
    """Attention of the tokens that a mask keeps, as in encoders of text; all channels but the first, and the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x[:, :, :99]).view(-1, 6, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None] > 0)
        return self.out(y.transpose(1, 2).flatten(2))


def test_attention_with_a_mask_in_a_file_of_the_torchscript_exporter_is_that_of_its_model(tmp_path):
    """A row without any token is zeros, not NaN."""
    torch.manual_seed(0)
    x, mask = torch.randn(5, 6, 16), (torch.arange(6) < torch.arange(5)[:, None]).long()
    model = Masked().eval()
    write("torchscript", model, (x, mask), tmp_path / "net.onnx")
    graph = capture(chipfit.load_model(tmp_path / "net.onnx"), (x, mask))
    assert {"SDPA", "Unstack"} <= {n.op for n in graph.nodes}
    assert {"Slice", "Split", "Softmax", "NotEqual"}.isdisjoint(n.op for n in graph.nodes)
    (y,) = run(graph, [x, mask]).values()
    torch.testing.assert_close(y, model(x, mask))
