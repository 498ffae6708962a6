"""A shared bias becomes one for each operator that reads it; everything else stays as it is."""

from operator import itemgetter

import pytest
import torch
from torch import nn

import chipfit
from chipfit.graph.check import check
from chipfit.graph.ir import Graph
from chipfit.passes.duplicate_shared_biases import duplicate_shared_biases
from tests.build import graph_of, model_of


def graph(*rows: tuple[str, str, str], trainable: tuple[str, ...] = ()) -> Graph:
    """Return a chain of (name, operator, operands beside the result before it)."""
    texts = [
        f"{n} = {op}({', '.join([last, *read.split()])})"
        for (n, op, read), last in zip(rows, ["x", *map(itemgetter(0), rows)])
    ]
    weights = {"w": torch.eye(2), "v": 2 * torch.eye(2), "b": torch.tensor([1.0, 2.0])}
    return graph_of(*texts, weights=weights, trainable=set(trainable))


def inputs(g: Graph) -> list[tuple[str | None, ...]]:
    return [n.inputs[1:] for n in g.nodes]


@pytest.mark.parametrize("trainable", [(), ("b",), ("w",)])
def test_every_reader_after_the_first_gets_a_copy_under_the_next_number(trainable):
    shared = graph(("one", "Linear", "w b"), ("two", "Linear", "v b"), ("three", "Linear", "w b"), trainable=trainable)
    new, notes = duplicate_shared_biases(shared)
    assert inputs(new) == [("w", "b"), ("v", "b_1"), ("w", "b_2")]
    assert [n.data for n in new.nodes] == ["x", "one", "two"]
    assert notes == [
        "bias 'b' is used again by 'two', which now reads its own copy 'b_1'",
        "bias 'b' is used again by 'three', which now reads its own copy 'b_2'",
    ]
    copies = [new.weights[n] for n in ("b", "b_1", "b_2")]
    assert [c.tolist() for c in copies] == [[1.0, 2.0]] * 3
    assert len({c.data_ptr() for c in copies}) == 3  # one can change without the others
    more = {"b_1", "b_2"} if "b" in trainable else set()
    assert new.trainable == set(trainable) | more
    assert inputs(shared) == [("w", "b"), ("v", "b"), ("w", "b")] and set(shared.weights) == {"w", "v", "b"}


@pytest.mark.parametrize(
    "rows",
    [
        (("one", "Linear", "w b"), ("two", "Linear", "v -"), ("three", "Linear", "v")),  # a bias with one reader
        (("one", "LayerNorm", "b b"), ("two", "LayerNorm", "b b")),
        (("one", "Linear", "w b"), ("two", "Relu", ""), ("three", "Linear", "one b")),  # a computed weight
        (("one", "Linear", "w x"), ("two", "Linear", "v x")),  # a computed bias
    ],
)
def test_what_is_no_bias_of_several_linear_operators_stays(rows):
    before = graph(*rows)
    new, notes = duplicate_shared_biases(before)
    assert new.nodes == before.nodes and notes == [] and set(new.weights) == {"w", "v", "b"}


def test_what_reads_a_bias_as_another_operand_gets_a_copy():
    shared = graph(("one", "Linear", "w b"), ("two", "Add", "b"), ("three", "Mul", "b"), trainable=("b",))
    new, notes = duplicate_shared_biases(shared)
    assert inputs(new) == [("w", "b"), ("b_operand",), ("b_operand",)] and new.trainable == {"b", "b_operand"}
    assert notes[0] == "bias 'b' is an operand of 'two' too, which now reads its own copy 'b_operand'"


@pytest.mark.parametrize("platform", ["tflite_int8", "tflm_cmsis_nn", "ort_cpu"])
def test_a_vector_that_is_a_bias_and_an_addend_is_exact_on_the_runtime(platform):
    torch.manual_seed(0)
    data = [torch.randn(16, 8) for _ in range(2)]
    tied = model_of(lambda m, x: m.norm(m.layer(x)) + m.layer.bias, layer=nn.Linear(8, 8), norm=nn.LayerNorm(8))
    nn.init.zeros_(tied.layer.bias)
    tied.norm.bias = tied.layer.bias
    result = chipfit.quantize(tied, data, platform=platform, progress=False)
    assert result.verify(data).exact


def test_biases_are_counted_apart():
    before = graph(("one", "Linear", "w b"), ("two", "Linear", "w c"), ("three", "Linear", "w c"))
    before.weights["c"] = torch.tensor([5.0, 6.0])
    new, _ = duplicate_shared_biases(before)
    assert inputs(new) == [("w", "b"), ("w", "c"), ("w", "c_1")] and new.weights["c_1"].tolist() == [5.0, 6.0]


def test_a_copy_does_not_take_the_name_of_a_result():
    """Files of TensorFlow number results and constants alike."""
    shared = graph(("one", "Linear", "w b"), ("b_1", "Linear", "v b"), ("b_2", "Linear", "w b"))
    new, _ = duplicate_shared_biases(shared)
    check(new, blame="duplicate_shared_biases")
    biases = [n.bias for n in new.nodes]
    assert len({*biases, "b_1", "b_2"}) == 5
    assert all(new.weights[b or ""].tolist() == [1.0, 2.0] for b in biases)


@pytest.mark.parametrize("platform", ["ort_cpu", "ort_dynamic"])
def test_a_weight_that_is_read_along_two_axes_is_as_accurate_as_two_weights(platform):
    """Rows of the weight differ by a factor of 100; scales of its rows would be wrong for its columns."""

    def coder(tied):
        torch.manual_seed(0)
        layer = nn.Linear(8, 16, bias=False)
        layer.weight.data *= torch.logspace(0, 2, 16)[:, None]
        other = layer.weight if tied else nn.Parameter(layer.weight.detach().clone())
        return model_of(lambda m, x: m.l(x).relu() @ other, l=layer)

    data = [torch.randn(8, 8) for _ in range(2)]
    tied, apart = (chipfit.quantize(coder(t), data, platform, progress=False) for t in (True, False))
    assert torch.equal(tied.device_model(data[0]), apart.device_model(data[0]))
    assert any("'l.weight' of 'l' is read along its other axis too" in note for note in tied.plan.rewrites)
