"""Beyond the calibrated range: where codes saturate in a file, and in its simulation."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.export.onnx.writer import export_onnx
from chipfit.plan.record import Plan
from chipfit.platform.load import load, names
from chipfit.platform.schema import Platform
from chipfit.platform.support import kernels_of
from chipfit.quantizers.grids import Grid
from chipfit.registry import lookup
from chipfit.simulate.integer import kernel_groups, simulate
from tests import build
from tests.build import graph_of, model_of

LITERT = ("litert_reference", "litert_optimized", "litert")


def quantized(
    platform: Any, curve: Any = torch.sigmoid, last: Any = F.relu6, **settings: Any
) -> tuple[chipfit.Result, torch.Tensor]:
    """A network of layers, rectifiers, a sum, a pool, a mean and a curve, and data of three times its range."""

    def forward(m, x):
        y = torch.relu(m.a(x))
        z = F.max_pool2d(m.b(y) + y, 2)
        return m.fc(z.mean((2, 3))), curve(z), last(m.a(z[:, :3]))

    torch.manual_seed(0)
    x = torch.rand(8, 3, 8, 8) * 2 - 1
    net = model_of(forward, a=nn.Conv2d(3, 6, 3, padding=1), b=nn.Conv2d(6, 6, 3, padding=1), fc=nn.Linear(6, 4))
    result = build.quantized(net, torch.cat((x, -x)), platform, rule="no_clipping", **settings)
    return result, 3 * (torch.rand(8, 3, 8, 8) * 2 - 1)


def narrower(grid: Grid) -> bool:
    return (grid.qmin, grid.qmax) != grid.file_ends


def narrow_ports(p: Platform) -> bool:
    """Operators may read or write values whose grids are narrower than the types of a file."""
    ports = {p.formats[f] for o in p.ops for u in o.use for f in (*u.ins, u.out) if f in p.formats}
    return any(narrower(f.grid(True)) for f in ports if f.kind == "int" and not f.dynamic)


#: 16 bits are asked for by ethos_u's users; what nxp_neutron computes in such a format is not in the network
NARROW = {n for n in names() if narrow_ports(load(n))} - {"ethos_u", "nxp_neutron", "x86_onednn"}
WITHOUT_RELU6 = {"esp_dl"}  # and without operators in float
#: tflite_dynamic leaves weights as few as those of the network in float
SIMULATED = [n for n in names() if kernels_of(load(n)) is not None and n != "tflite_dynamic"]


@pytest.mark.parametrize(
    ("name", "bits"), [*((n, None) for n in sorted(NARROW)), *(("mqbench_academic", b) for b in (3, 6, 12))]
)
def test_no_code_of_an_onnx_file_lies_beyond_its_grid(tmp_path, name, bits):
    result, x = quantized(name, overrides={"*": {"activation_bits": bits}} if bits else {})
    stored = {v: t.stored for v, t in result.plan.tensors.items() if t.role == "activation" and t.quantized}
    stored = {v: s for v, s in stored.items() if narrower(s.grid)}
    assert stored
    path = export_onnx(result.graph, result.plan, tmp_path / "m.onnx")
    asked = [] if bits == 3 else [f"{v}_q" for v in stored]  # numpy has no type of 4 bits
    got = lookup("runtime", "onnxruntime")(path, asked).run([x.numpy()])
    codes = {v: got[f"{v}_q"].astype(np.int64) for v in stored if f"{v}_q" in got}
    for v, q in codes.items():
        assert stored[v].grid.qmin <= q.min() and q.max() <= stored[v].grid.qmax, v
    with torch.no_grad():
        for y, want in zip(got.values(), result.model(x)):
            assert float((torch.from_numpy(y) - want).abs().mean()) < 0.02
    i = result.graph.inputs[0]
    if i in codes:
        assert np.array_equal(codes[i], stored[i].quantize(x).numpy()) and codes[i].max() == stored[i].grid.qmax


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", SIMULATED)
def test_what_is_exact_inside_the_calibrated_range_is_exact_beyond_it(name):
    """What ONNX Runtime does not compute as the platform says differs inside, too."""
    result, x = quantized(name, last=torch.relu if name in WITHOUT_RELU6 else F.relu6)
    for runtime in load(name).runtimes or ("onnxruntime",):
        inside, beyond = ({r.tensor for r in result.verify([d], runtime=runtime).rows if r.fault} for d in (x / 3, x))
        assert beyond <= inside, (runtime, beyond - inside)


def narrowed(name: str, least: int, most: int) -> Platform:
    platform = load(name)
    port = next(f for f in ("a8", "a16") if f in platform.formats)
    format_ = platform.formats[port].model_copy(update={"range": (least, most)})
    return platform.model_copy(update={"formats": {**platform.formats, port: format_}})


def without_table(z: torch.Tensor) -> torch.Tensor:
    """A curve whose result has no fixed numbers, as a table's has."""
    return F.leaky_relu(z, 0.1) * z


@pytest.mark.parametrize(
    ("platform", "bits", "least"),
    [
        (narrowed("tflite_int8", -127, 127), 8, -128),
        (narrowed("tflite_int8", -32, 31), 8, -128),
        (narrowed("tflite_int16x8", -2048, 2047), 16, -32768),
        (load("ethos_u").model_copy(update={"float_unit": True}), 16, -32768),
    ],
    ids=["without_the_lowest_of_8", "6_of_8", "12_of_16", "ethos_u"],
)
def test_litert_saturates_at_the_ends_of_its_types(platform, bits, least):
    wide = {"Conv2D": {"activation_bits": 16}} if platform.name == "ethos_u" else {}
    result, x = quantized(platform, without_table, overrides=wide)
    i = result.graph.inputs[0]
    stored = result.plan[i]
    assert (stored.grid.bits, stored.grid.file_ends[0]) == (bits, least) and stored.grid.qmin > least
    x = x * (least / stored.grid.qmin)
    for runtime in LITERT:
        found = result.verify([x], runtime=runtime)
        assert found.integers and not [r.fault for r in found.rows if r.fault], found.summary()
    codes = simulate(result.graph, result.plan, [x], platform, keep=[i])[i]
    assert int(codes.min()) == least < stored.grid.qmin


@pytest.mark.parametrize("bits", [7, 5])
def test_values_of_other_widths_on_a_chip_made_free_for_a_study_saturate_at_the_ends_of_their_type(bits):
    chip = load("tflite_int8")
    free = {name: f.model_copy(update={"free": True}) for name, f in chip.formats.items() if f.bits <= 8}
    chip = chip.model_copy(update={"formats": {**chip.formats, **free}})
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval(), torch.randn(4, 3, 8, 8)
    result = build.quantized(net, x, chip, overrides={"0": {"activation_bits": bits}})
    assert bits in {t.grid.bits for t in result.plan.tensors.values() if t.quantized}
    found = result.verify([3 * x], runtime="litert")
    assert found.integers and not [r.fault for r in found.rows if r.fault], found.summary()


def test_the_members_of_a_fused_group_are_one_kernel_and_no_others():
    graph = graph_of("a = Relu(x)", "b = Relu(a)", "c = Relu(b)", "d = Relu(c)")
    found = kernel_groups(graph, Plan(groups=(("a", "b", "c"),)))
    assert [[n.name for n in group] for group in found] == [["a", "b", "c"], ["d"]]
