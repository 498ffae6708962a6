"""Loops over data run on the device of the model, decide what they decide on the CPU, and wait for no single layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from chipfit import Generation, Limits, Settings, generated, quantize
from chipfit.calibration.collect import Need, collect
from chipfit.calibration.data import batches
from chipfit.calibration.source import MemoryLimit
from chipfit.engine.torch_defaults import torch_defaults
from chipfit.errors import DataError
from chipfit.quantizers.grids import Grid
from chipfit.rounding.gptq_solver import round_columns
from chipfit.rounding.methods.learned import BlockReconstruction, Learned, network_blocks
from chipfit.rounding.streams import Stream
from tests.accelerators import moved, tolerance
from tests.build import model_of, randn

quantized = partial(quantize, progress=False)  # where the model is: `tests.build.quantized` moves it
FOUR = {"*": {"bits": 4}}
#: (name, platform, options); scales and weights differ in the last digits where kernels add in another order
USES: list[tuple[str, str, dict[str, Any]]] = [
    ("the default", "ort_cpu", {}),
    ("power-of-two scales, halves away from zero", "vitis_dpu", {}),
    ("histograms weighed by gradients", "ort_cpu", {"rule": "hmse", "weight_rule": "hmse"}),
    ("weights of 4 bits", "mqbench_academic", {"overrides": FOUR}),
    ("activations of 4 bits", "mqbench_academic", {"overrides": {"*": {"bits": 4, "activation_bits": 4}}}),
    ("tables", "coreml", {"overrides": FOUR}),
    ("learned in blocks", "ort_cpu", {"settings": Settings(reconstruct="block", reconstruct_steps=5)}),
    (
        "learned in one block, by gradients",
        "ort_cpu",
        {"settings": Settings(reconstruct="network", reconstruct_steps=5, reconstruct_fisher=True)},
    ),
    (
        "learned after 4 bits",
        "mqbench_academic",
        {"overrides": FOUR, "settings": Settings(rounding="gptq + learned", reconstruct_steps=5)},
    ),
    ("second moments", "ort_cpu", {"settings": Settings(correct_second_moment=True)}),
    ("biases", "ort_cpu", {"settings": Settings(correct_bias=True)}),
    ("inputs of few sizes", "ort_cpu", {"settings": Settings(smooth=0.5)}),
    ("half of the weights' memory", "mqbench_academic", {"limits": Limits(weights="50%")}),
]


class Residual(nn.Module):
    """Convolutions of several kinds around an addition, and class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.groups, self.down = nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.Conv2d(8, 12, 3, stride=2)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.stem(x)).relu()
        y = self.down(self.groups(y) + y).relu()
        return self.head(y.mean((2, 3)))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Residual().eval()


def data() -> list[torch.Tensor]:
    return list(randn(64, 3, 8, 8, seed=1).split(16))


def chain(depth: int) -> nn.Module:
    torch.manual_seed(0)
    convs = [layer for k in range(depth) for layer in (nn.Conv2d(3 if k == 0 else 4, 4, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(256, 3)).eval()


@pytest.mark.parametrize(("platform", "options"), [u[1:] for u in USES], ids=[u[0] for u in USES])
def test_what_is_decided_is_what_the_cpu_decides(platform, options, accelerator):
    """Within the last digits: the order of sums belongs to a device's kernels. Batches come from both."""
    want = quantized(net(), data(), platform, **options)
    mixed = [x if k % 2 else moved(x) for k, x in enumerate(data())]
    got = quantized(moved(net()), mixed, platform, **options)
    assert got.plan.tensors.keys() == want.plan.tensors.keys()
    for name, t in want.plan.tensors.items():
        stored = got.plan.tensors[name].stored
        assert (stored is None) == (t.stored is None), name
        if t.stored is not None and stored is not None:
            torch.testing.assert_close(stored.scale, t.stored.scale, rtol=1e-5, atol=0)  # and its device: the CPU
            assert torch.equal(stored.zero_point, t.stored.zero_point), name
    for name, w in want.graph.weights.items():
        torch.testing.assert_close(got.graph.weights[name], w, rtol=1e-4, atol=tolerance(1e-6, 1e-4))


def test_losses_of_tensors_are_those_of_the_cpu(accelerator):
    want = quantized(net(), data()).sensitivity(data())
    got = quantized(moved(net()), data()).sensitivity(moved(data()))
    assert got.losses.keys() == want.losses.keys()
    for name, row in want.losses.items():
        assert got.losses[name] == pytest.approx(row, rel=1e-3, abs=1e-12), name


def counted(fake: Any, work: Callable[[], Any]) -> dict[str, int]:
    fake.reset()
    work()
    return {name: fake.counts()[name] for name in ("uploads", "downloads", "scalars", "launches")}


def test_calibration_waits_once_for_each_batch_however_many_layers_there_are(fake):
    waits = []
    for depth in (2, 5):
        graph = quantized(moved(chain(depth)), data()).graph
        needs = {v: Need(channel_axis=1, squares=True) for v in graph.values}
        found = counted(fake, lambda graph=graph, needs=needs: collect(graph, batches(data(), graph), tensors=needs))
        waits.append((found["downloads"], found["scalars"], found["uploads"] - len(graph.weights)))
    assert waits == [(4, 0, 4)] * 2  # of 4 batches; weights go there once


def test_calibration_waits_once_for_each_batch_however_many_steps_a_recurrent_layer_has(fake):
    def net() -> nn.Module:
        torch.manual_seed(0)
        return model_of(lambda m, x: m.head(m.layer(x)[0]), layer=nn.GRU(4, 6, batch_first=True), head=nn.Linear(6, 3))

    waits = []
    for steps in (3, 9):
        sequences = list(randn(16, steps, 4, seed=1).split(4))
        graph = quantized(moved(net()), sequences, "tflm_cmsis_nn").graph
        needs = dict.fromkeys(graph.values, Need())
        read = batches(sequences, graph)
        found = counted(fake, lambda graph=graph, read=read, needs=needs: collect(graph, read, tensors=needs))
        waits.append((found["downloads"], found["scalars"], found["uploads"] - len({*map(id, graph.weights.values())})))
    assert waits == [(4, 0, 4)] * 2  # of 4 batches


def test_statistics_of_a_device_are_exactly_those_of_the_cpu(accelerator):
    graph = quantized(net(), data()).graph
    there = quantized(moved(net()), data()).graph
    needs = {v: Need(channel_axis=1) if k % 2 else Need() for k, v in enumerate(graph.values)}
    needs[graph.inputs[0]] = Need(weights=torch.arange(8.0))
    with torch_defaults():  # without TF32, as `quantize` collects
        want = collect(graph, batches(data(), graph), tensors=needs)
        got = collect(there, batches(data(), there), tensors=needs)
    for name, s in want.items():
        assert got[name].count == s.count and got[name].histogram.reach == s.histogram.reach
        assert got[name].histogram.counts.sum() == s.histogram.counts.sum()
        torch.testing.assert_close(torch.tensor([got[name].low, got[name].high]), torch.tensor([s.low, s.high]))
    assert torch.equal(got[graph.inputs[0]].histogram.counts, want[graph.inputs[0]].histogram.counts)


def test_values_that_are_not_finite_are_found_on_a_device_by_batch_and_layer(accelerator):
    model = chain(2)
    nn.init.constant_(model[0].weight, 1e3)
    graph = quantized(moved(model), data()).graph
    bad = [*data()[:1], torch.full((1, 3, 8, 8), 1e36), *data()[1:]]
    with pytest.raises(DataError, match=r"Batch 1 makes NaN or infinite values in layer '0'"):
        collect(graph, batches(bad, graph), tensors=dict.fromkeys(graph.values, Need()))


@pytest.mark.parametrize(("rounding", "most"), [("half_even", 6), ("half_away", 9)])
def test_a_column_takes_few_launches_and_no_wait(rounding, most, fake):
    w, shares, scale = randn(1, 6, 32, seed=2), torch.eye(32)[None], torch.full((1, 6, 32), 0.3)
    rows = [x.to("fakegpu") for x in (w, shares, scale, torch.zeros(1, 6, 32, dtype=torch.int32))]
    grid = Grid(bits=4, qmin=-7, qmax=7, rounding=rounding)
    few, many = (
        counted(fake, lambda k=k: round_columns(*(x[..., :k, :k] if x is rows[1] else x[..., :k] for x in rows), grid))
        for k in (16, 32)
    )
    assert many["scalars"] == many["downloads"] == many["uploads"] == 0
    assert many["launches"] - few["launches"] <= 16 * most


def test_a_step_of_learning_uploads_nothing_and_does_not_wait(fake):
    result = quantized(moved(chain(2)), data())
    samples = list(batches(data(), result.graph))

    def learned(steps: int) -> dict[str, int]:
        method = Learned(scope="layer", steps=steps, floats=0.5)
        engine = BlockReconstruction(result.graph, result.graph, result.plan, method, seed=0)
        (first,) = list(network_blocks(engine.out, "network"))
        list(engine.read_inputs(engine.out, samples))
        block = first.subgraph(engine.out, [])
        variables, _ = engine.variables(block)
        engine.floats |= {o: Stream(engine.memory) for o in block.outputs}
        for k in range(engine.chunks):
            got = engine.outputs(block, k)
            for o in block.outputs:
                engine.floats[o].append(got[o] + 0.1)
        return counted(fake, lambda: engine.learn(block, variables, 1.0))

    first, few, many = learned(2), learned(2), learned(12)
    assert many["launches"] > few["launches"] and first["uploads"] >= few["uploads"]
    assert all(many[kind] == few[kind] for kind in ("uploads", "downloads", "scalars"))


def test_a_step_of_generated_data_waits_as_often_for_many_norms_as_for_few(fake):
    def norms(depth: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(m for _ in range(depth) for m in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))).eval()

    def waits(depth: int, steps: int) -> int:
        options, example = Generation(steps=steps, bounds=(0.0, 1.0)), torch.zeros(2, 3, 8, 8)
        model = moved(norms(depth))
        found = counted(fake, lambda: generated(model, 8, example=example, options=options, progress=False))
        return found["scalars"] + found["downloads"] + found["uploads"]

    waits(2, 3)
    assert waits(2, 13) - waits(2, 3) == waits(6, 13) - waits(6, 3) == 10


def test_tables_are_uploaded_once(fake):
    stored = quantized(net(), data(), "coreml", overrides=FOUR).plan["head.weight"].with_()
    w = moved(net().head.weight.detach())
    assert stored.grid.table is not None
    first, second = (counted(fake, lambda: stored.dequantize(stored.quantize(stored.round(w)))) for _ in range(2))
    assert first["uploads"] > 0 and second["uploads"] == 0
    torch.testing.assert_close(stored.round(w).cpu(), stored.round(w.cpu()), rtol=0, atol=0)


def test_scales_that_are_changed_in_place_are_uploaded_again(accelerator):
    stored = quantized(net(), data()).plan["head.weight"]
    w = moved(net().head.weight.detach())
    stored.round(w)
    stored.scale.mul_(3)
    assert torch.equal(stored.round(w).cpu(), stored.round(w.cpu()))


def test_samples_that_are_kept_in_files_come_back_on_the_device(accelerator):
    memory = MemoryLimit(most=0)
    stream = Stream(memory, expected=1)
    x = randn(2, 3, 4, 4, seed=3)
    stream.append(moved(x))
    assert memory.spilled == x.nbytes and stream[0].device == accelerator
    assert torch.equal(stream[0].cpu(), x)
    stream.free()
    kept = MemoryLimit(most=1 << 20)
    there = kept.keep(moved(x))
    kept.release(there)
    assert kept.used == 0
