"""What a verification says of itself: what was compared, on which data, and what was not."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import DataError, VerificationError
from chipfit.platform.support import unsupported_features
from chipfit.verify import Verification
from chipfit.verify.comparisons import ConstantComparison, OutputComparison, TensorComparison
from tests.build import model_of, quantized
from tests.zoo import make, unseen


def row(name, elements=200, **facts):
    return TensorComparison(name, name, "Conv2D", elements=elements, **{"end_to_end_elements": elements, **facts})


def test_the_summary_says_what_a_person_asks_in_lines():
    floats = [row(f"f{k}", in_float=True) for k in range(7)]
    off = row("c", differing=3, largest=2, op_differing=1, op_largest=1)
    rows = [row("a"), row("b", in_float=True), off, row("d", wrong="bad"), *floats]
    found = Verification("chip", True, 4, 4, rows=rows)
    found.held = [ConstantComparison("a", "activation"), ConstantComparison("w", "weight")]
    found.held.append(ConstantComparison("v", "weight", elements=9, differing=2))
    assert found.first_difference is off
    assert found.summary().splitlines()[:8] == [
        "chip: 3 of 2200 integers differ over 4 samples",
        "compared 11 of 11 tensors; 1 of 2 weights and biases read back from the file; "
        "81.82 % of all integers compared without tolerance",  # 9 of 11 tensors are without fault
        "departs: weight 'v' in the file: 2 of its 9 quantized values are not the plan's; and 2 more",
        "first difference: Conv2D 'c', 1.5000 % of its integers, at most 2",
        "each operator by itself, given the device's inputs: 1 of 2200 differ over 4 samples, largest difference 1",
        "computed in float by the runtime: Conv2D 'b', Conv2D 'f0', Conv2D 'f1', Conv2D 'f2', Conv2D 'f3', "
        "Conv2D 'f4' and 2 more",
    ]
    found.rows = [row("w", wrong="bad"), *floats]
    assert "first difference: Conv2D 'w', 0.0000 %" in found.summary()
    assert found.summary().endswith("Conv2D 'f5' and 1 more")
    found.rows = floats[:6]
    assert found.summary().endswith("Conv2D 'f5'")
    found = Verification(
        "chip", True, 9, 4, rows=[row("a"), row("c", end_to_end_elements=100, differing=3, op_differing=2)]
    )
    assert found.summary().splitlines()[0] == "chip: 3 of 300 integers differ over the first 4 of 9 samples"
    assert "given the device's inputs: 2 of 400 differ over 9 samples" in found.summary()
    found.rows = [row("a", end_to_end_elements=100)]
    assert found.summary().splitlines()[0] == "chip: 0 of 200 integers differ over 9 samples" and found.exact


def test_integers_that_differ_behind_the_first_samples_are_sound_and_not_exact():
    off = row("tanh", end_to_end_elements=100, op_differing=1, op_largest=1, ties=1, float_ops=("Tanh",))
    found = Verification("chip", True, 9, 4, rows=[row("a", end_to_end_elements=100), off])
    assert found.differing == 0 and found.verdict == "sound" and found.first_difference is off
    assert (found.integers, found.out_of) == (400, 200)
    assert "first difference: Conv2D 'tanh', 0.0000 %" in found.summary()
    off.op_differing = off.op_largest = 0
    assert found.verdict == "exact" and found.first_difference is None and found.out_of == 400


@pytest.mark.parametrize("count, more", [(8, ""), (11, "; and 3 more")])
def test_an_error_names_eight_faults_and_counts_the_others(count, more):
    found = Verification("chip", True, samples=1, rows=[row(f"r{k}", wrong="bad") for k in range(count)])
    with pytest.raises(VerificationError) as e:
        found.require()
    assert str(e.value).count("'r") == 9 and more in str(e.value) and ("and" in str(e.value)) is bool(more)


@pytest.mark.parametrize("float_ops, gap", [((), 2.0**-22), (("Erf",), 1e-4)])
def test_an_output_in_reals_may_be_off_by_as_much_as_its_kernels_round(float_ops, gap):
    """(q - z) s rounds twice, q s - z s three times: each by at most 2^-24 of the span, and float operators more."""
    for times, sound in ((0.75, True), (1.5, False)):
        out = OutputComparison("y", "y", float_ops, span=4.0)
        alone = torch.tensor([1.0, 0.0], dtype=torch.float64)
        out.add(alone + torch.tensor([0.0, 4.0 * gap * times]), alone, alone)
        assert (out.fault == "") is sound and (out.elements, out.differing) == (2, 1)


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    x = torch.randn(20, 3, 8, 8)
    return quantized(model, [x[:6], x[6:12]]), x


def test_calibration_data_are_told_in_other_batches_and_after_saving(fitted, tmp_path):
    result, x = fitted
    found = result.verify([x[9:16]])
    assert found.calibrated == 3 and "3 of the 7 samples are calibration data" in found.summary()
    assert result.verify([x[12:]]).calibrated == 0
    loaded = chipfit.load(result.save(tmp_path / "saved"))
    found = loaded.verify([x[:4]])
    assert found.calibrated == 4 and "\nall samples are calibration data: " in found.summary()


def test_samples_are_counted_behind_the_steps_that_come_first():
    x, last = torch.randn(10, 4, 6), model_of(lambda m, x: m.steps(x)[0][-1], steps=nn.LSTM(6, 8))
    assert (found := quantized(last, x, "tflite_int8").verify([x])).samples == found.calibrated == 4


def test_accuracy_comes_with_its_number_of_samples(fitted):
    result, x = fitted
    found = result.verify([(x[:5], torch.zeros(5, dtype=torch.long)), (x[12:], torch.ones(8, dtype=torch.long))])
    assert found.labelled == 13 and "top-1 of 13 samples: float" in found.summary()
    from chipfit.report.terminal import accuracy_samples

    assert accuracy_samples(result.report) == "top-1 of 13 samples, 5 of the 13 verified are calibration data"


def test_a_batch_without_samples_counts_for_nothing(fitted):
    result, x = fitted
    none, some = (x[:0], torch.zeros(0, dtype=torch.long)), (x[12:], torch.ones(8, dtype=torch.long))
    assert result.verify([none, some]).labelled == 8
    with pytest.raises(DataError, match="no data to verify on"):
        result.verify([none])


def test_what_the_platform_states_and_nothing_models_is_in_the_verification(fitted):
    known = fitted[0].platform
    pieces = known.math.model_copy(update={"act_table": {"kind": "pieces"}})
    decision = replace(fitted[0].decision, platform=known.model_copy(update={"math": pieces}))
    result = replace(fitted[0], decision=decision)
    found = result.verify([fitted[1][12:]])
    assert found.not_modelled == [*unsupported_features(result.platform)] and found.not_modelled
    assert "not modelled: math.act_table" in found.summary()
    assert json.loads(json.dumps(found.to_dict()))["not_modelled"] == found.not_modelled


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8", "tflite_int16x8"])
def test_every_output_is_compared_whatever_its_shape_and_type(platform):
    """Integers, a scalar, indices, something in float."""

    def ends(m, x):
        y = m.conv(x).relu()
        return y, y.mean(), y.mean((2, 3)).argmax(1), y.cumsum(3)

    torch.manual_seed(0)
    result = quantized(
        model_of(ends, conv=nn.Conv2d(3, 4, 3), unused=nn.Conv2d(3, 4, 3)), torch.randn(4, 3, 8, 8), platform
    )
    found = result.verify([torch.randn(5, 3, 8, 8)])
    assert found.sound, found.summary()
    assert [o.elements for o in found.outputs] == [5 * 4 * 36, 1, 5, 5 * 4 * 36]
    assert "CumSum" in found.outputs[3].float_ops and not found.outputs[0].float_ops
    assert found.outputs[0].gap == 0 and [o["fault"] for o in found.to_dict()["outputs"]] == [""] * 4


def test_a_tensor_that_a_layout_absorbs_is_counted_as_elided(tmp_path):
    pytest.importorskip("ai_edge_litert")
    model, batch = make("attention_manual")
    found = chipfit.quantize(model, [batch], platform="tflite_int8", progress=False).verify([unseen(batch)])
    assert found.not_compared == {"elided by the runtime": 2}
    assert found.coverage().startswith(f"compared {len(found.rows) - 2} of {len(found.rows)} tensors, 2 elided by the")
    missed = [r for r in found.rows if r.why]
    assert all(r.missed and not r.elements and not r.fault for r in missed)
    strict = sum(r.elements for r in found.rows if not r.float_ops)
    assert found.exact_share == strict / (found.integers + sum(r.missed for r in missed)) < 1


def tied() -> nn.Module:
    """Return a table of words that scores them too: its rows are looked up in float and multiplied in integers."""
    return model_of(
        lambda m, words: nn.functional.linear(m.between(m.table(words)), m.table.weight),
        table=nn.Embedding(20, 8),
        between=nn.Linear(8, 8),
    )


def numbered() -> nn.Module:
    """Return a network with two constants that are named like copies of one in a file."""
    model = model_of(lambda m, x: (m.linear(x) - m.centre) / m.centre_1, linear=nn.Linear(6, 3))
    model.register_buffer("centre", torch.tensor([0.1, -0.3, 0.2]))
    model.register_buffer("centre_1", torch.tensor([1.5, 0.7, 2.0]))
    return model


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8"])
@pytest.mark.parametrize(
    "model, draw", [(tied, lambda: torch.randint(0, 20, (4, 5))), (numbered, lambda: torch.randn(4, 6))]
)
def test_what_is_read_in_float_and_what_is_named_alike_is_known_in_the_file(platform, model, draw, tmp_path):
    torch.manual_seed(0)
    result = quantized(model(), draw(), platform)
    path = result.export(tmp_path / f"m.{'onnx' if platform == 'ort_cpu' else 'tflite'}")
    assert result.verify([draw()], path=path).departures == []
