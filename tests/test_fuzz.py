"""Bad input drawn at random, a small share of `make fuzz`; and that its four kinds of failure are noticed."""

from __future__ import annotations

import ast
import json
import math
import os
import time
import zipfile
from dataclasses import replace

import pytest
import torch
import yaml

pytest.importorskip("onnxruntime")
pytest.importorskip("keras")

from benchmarks.fuzz import sense
from benchmarks.fuzz.__main__ import KINDS, plan, run, share
from benchmarks.fuzz.run import FOREIGN, FORESEEN, SOURCE, Case, all_of
from torch import nn

import chipfit
from chipfit.cli.inputs import load_model
from chipfit.errors import (
    CaptureError,
    ChipfitError,
    DataError,
    ModelingError,
    PlanError,
    PlatformError,
    RuntimeUnavailable,
)
from chipfit.plan.record import Plan, TensorPlan


def untyped(case: Case) -> None:
    {}["planted"]


def wrapped(case: Case) -> None:
    try:
        untyped(case)
    except KeyError as e:
        raise PlanError("It is malformed") from e


def hang(case: Case) -> None:
    while True:
        time.sleep(0.01)


def dies(case: Case) -> None:
    os._exit(3)


def nonsense(case: Case) -> None:
    sense.check_plan(Plan(tensors={"x": TensorPlan(name="x", role="activation", low=2.0, high=1.0)}))


def refused(case: Case) -> None:
    raise PlanError("No such thing")


def sound(case: Case) -> None:
    sense.check_plan(Plan(tensors={"x": TensorPlan(name="x", role="activation", low=1.0, high=2.0)}))


@pytest.mark.parametrize(
    "planted, what",
    [
        (untyped, "untyped"),
        (wrapped, "untyped"),
        (hang, "hang"),
        (nonsense, "nonsense"),
        (refused, "refused"),
        (sound, "accepted"),
    ],
)
def test_what_a_case_does_is_told_apart(planted, what):
    (outcome,) = all_of({"planted": planted}, [("planted", 0)], seed=1, limit=1)
    assert outcome.what == what, outcome
    assert outcome.what != "hang" or "test_fuzz.py" in outcome.detail


def test_a_case_that_ends_the_process_is_told_and_the_next_ones_still_run():
    kinds = {"dies": dies, "sound": sound}
    outcomes = list(all_of(kinds, [("sound", 0), ("dies", 0), ("sound", 1)], seed=1, limit=1))
    assert [o.what for o in outcomes] == ["accepted", "died", "accepted"]


def test_the_same_seed_draws_the_same_case_and_another_seed_another(tmp_path):
    def numbers(seed: int) -> list[float]:
        return [Case("saved", k, seed, tmp_path).random.random() for k in range(4)]

    assert numbers(7) == numbers(7) != numbers(8)


def test_drawn_input_of_every_kind_ends_in_a_result_or_in_a_refusal():
    outcomes = run(seed=1001, cases=300, minutes=30, limit=60)
    assert [o for o in outcomes if o.failed] == [] and len(outcomes) == 300
    for kind in KINDS:
        assert {o.what for o in outcomes if o.kind == kind} == {"accepted", "refused"}


def test_several_processes_share_the_cases_and_go_on_where_they_stopped():
    whole = plan(1000)
    parts = [share(whole, f"{k}/3", 0) for k in (1, 2, 3)]
    assert sorted(x for p in parts for x in p) == sorted(whole) and max(map(len, parts)) - min(map(len, parts)) <= 1
    assert share(whole, "2/3", 10) == parts[1][10:] and {k for k, _ in parts[2]} == set(KINDS)


# ------------------------------------------------------------------------------------------- what drawing has found


@pytest.mark.parametrize(
    "platform, change, words",
    [
        ("k210", lambda d: d["formats"]["w8"].update(zero=[]), "zero is an empty set"),
        ("inc_tensorflow", lambda d: d["math"].update(acc=[{"bits": 32}, {"bits": -32}]), "greater than or equal to 1"),
        ("axis_artpec9", lambda d: d["ops"][0].update(where={"channels": {"min": math.nan}}), "where.channels is nan"),
        ("qnn_htp", lambda d: d["ops"][0]["rules"][0].update(eq=10**400), "an integer of 1329 bits"),
        ("xnnpack", lambda d: d["ops"][0]["rules"][0]["mono"].update(in0=10**400), "less than or equal to 8"),
        ("coreml", lambda d: d["formats"]["p4q"]["lut"].update(value_bits=-1), "value_bits"),
    ],
)
def test_a_format_that_holds_nothing_is_refused(tmp_path, platform, change, words):
    from benchmarks.fuzz.files import _BUILTIN

    data = yaml.safe_load((_BUILTIN / f"{platform}.yaml").read_text())
    change(data)
    (tmp_path / "chip.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(PlatformError, match=words):
        chipfit.load_platform(tmp_path / "chip.yaml")


@pytest.mark.parametrize("platform", ["tflite_int8", "ort_cpu"])
def test_numbers_that_would_overflow_inside_a_kernel_are_refused_before_a_runtime_meets_them(platform):
    x = torch.randn(4, 4)
    with pytest.raises(DataError, match="too large for any kernel"):  # LiteRT ends the process on such a sum
        chipfit.quantize(nn.Linear(4, 4), [x * 1e35], platform, progress=False)
    assert chipfit.quantize(nn.Linear(4, 4), [x * 1e20], platform, progress=False).verify([x * 1e20]).sound


def test_a_batch_of_nothing_proves_nothing():
    x = torch.randn(4, 4)
    result = chipfit.quantize(nn.Linear(4, 4), [x], "ort_cpu", progress=False)
    with pytest.raises(DataError):
        result.verify([x[:0]])


def test_a_saved_bias_of_another_length_is_refused(tmp_path):
    from chipfit.plan.validate import check_runs

    result = chipfit.quantize(nn.Sequential(nn.Conv2d(3, 4, 3)), [torch.randn(2, 3, 6, 6)], "ort_cpu", progress=False)
    graph = result.graph.copy()
    check_runs(graph)
    graph.weights = {name: w[:1] if w.dim() == 1 else w for name, w in graph.weights.items()}
    with pytest.raises(PlanError, match=r"has the shape \[1\], not \[4\]"):
        check_runs(graph)
    image = result.graph.copy()
    name = image.inputs[0]
    image.values = {**image.values, name: replace(image.values[name], shape=(None, 3, 6, 6, None, 3))}
    with pytest.raises(PlanError, match="a weight of 4 axes for 6"):
        check_runs(image)
    soft = chipfit.quantize(nn.Softmax(-1), [torch.randn(2, 4)], "imx500", progress=False).graph.copy()
    check_runs(soft)
    soft.nodes = [n.with_(attrs={**n.attrs, "axis": 64}) for n in soft.nodes]
    with pytest.raises(PlanError, match="is 64, and it works on 2 axes"):  # torch's kernel without numbers takes it
        check_runs(soft)


def test_a_saved_platform_without_a_revision_that_it_uses_is_refused():
    from chipfit.platform.load import check_consistent

    platform = chipfit.load_platform("ort_cpu")
    check_consistent(platform, "platform.json")
    with pytest.raises(PlatformError, match="no revision named .VNNI."):
        check_consistent(platform.model_copy(update={"arch": ("AVX2", "V")}), "platform.json")
    with pytest.raises(ChipfitError, match="named 'V'"):
        check_consistent(platform.model_copy(update={"arch_selected": "V"}), "platform.json")


@pytest.mark.parametrize(
    "first, good, words",
    [
        (nn.Embedding(3, 2), torch.tensor([[0], [2]]), "holds floats, the model was captured with integers"),
        (nn.Linear(1, 2), torch.tensor([[0.0], [2.0]]), "holds integers, the model was captured with floats"),
    ],
)
def test_numbers_of_another_kind_are_refused_before_the_model_runs(first, good, words):
    bad = good.float() if good.dtype == torch.int64 else good.long()
    with pytest.raises(DataError, match=words):
        chipfit.quantize(nn.Sequential(first, nn.Linear(2, 2)), [good, bad], "ort_cpu", progress=False)


@pytest.mark.parametrize(
    "config", [[], {"class_name": {"Dense": "Dense"}}, {"layers": [{"class_name": ["Dense"]}]}], ids=str
)
def test_a_keras_configuration_of_another_shape_is_refused(tmp_path, config):
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as z:
        z.writestr("config.json", json.dumps(config))
    with pytest.raises(CaptureError, match="not a Keras model|is not data"):
        load_model(str(tmp_path / "m.keras"))


@pytest.mark.parametrize("ending", ["pt2", "keras"])
def test_a_name_that_no_disk_can_have_is_no_model(ending):
    with pytest.raises(CaptureError, match="does not exist"):
        load_model(f"{'a' * 5000}.{ending}")


def test_a_name_that_no_disk_can_have_is_no_platform(tmp_path):
    with pytest.raises(PlatformError):
        chipfit.load_platform(f"{'a' * 5000}.yaml")
    (tmp_path / "chip.yaml").write_text(yaml.safe_dump({"name": "chip", "extends": "a" * 5000}))
    with pytest.raises(PlatformError, match="does not exist"):
        chipfit.load_platform(tmp_path / "chip.yaml")
    with pytest.raises(ModelingError):
        chipfit.target_platform.load_target_platform_capabilities(f"{'a' * 5000}.json")


def test_a_litert_file_without_a_network_is_refused_before_it_ends_the_process(tmp_path):
    from ai_edge_litert import schema_py_generated as schema

    x, file = torch.randn(2, 4), tmp_path / "m.tflite"
    result = chipfit.quantize(nn.Sequential(nn.Linear(4, 2)), [x], "tflite_int8", progress=False)
    content = bytearray(result.export(file).read_bytes())
    model = schema.Model.GetRootAs(content, 0)._tab.Pos
    fields = model - int.from_bytes(content[model : model + 4], "little", signed=True)
    content[fields + 8 : fields + 10] = b"\0\0"  # "subgraphs", the third field of the schema's Model, is absent
    file.write_bytes(content)
    with pytest.raises(RuntimeUnavailable, match="holds no network"):
        result.verify([x], path=file)
    content[0:4] = (0x80000000).to_bytes(4, "little")  # the root lies beyond the file
    file.write_bytes(content)
    with pytest.raises(RuntimeUnavailable, match="LiteRT refuses the file"):
        result.verify([x], path=file)


def noted(**changed):
    """A change of the notes in a LiteRT file; a field is left out where it is None."""

    def change(model):
        buffer = model.buffers[model.metadata[0].buffer]
        notes = {**json.loads(bytes(buffer.data)), **changed}
        buffer.data = list(json.dumps({k: v for k, v in notes.items() if v is not None}).encode())

    return change


def numbers(**changed):
    """Change the scale or zero point of the first tensor in codes."""

    def change(model):
        coded = next(t for t in model.subgraphs[0].tensors if t.type == 9)
        for name, value in changed.items():
            setattr(coded.quantization, name, [value])

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.subgraphs[0], "outputs", [999]),
        lambda m: setattr(m.metadata[0], "buffer", 999),
        lambda m: setattr(m.subgraphs[0], "outputs", None),
        lambda m: setattr(m.subgraphs[0], "inputs", None),
        lambda m: setattr(m.subgraphs[0].operators[0], "outputs", None),
        lambda m: setattr(m.subgraphs[0].tensors[0], "name", None),
        lambda m: setattr(m.buffers[m.metadata[0].buffer], "data", None),
        numbers(zeroPoint=-268435492),
        numbers(scale=float("nan")),
        numbers(scale=-0.5),
        noted(outputs=None),
        noted(outputs=[]),
        noted(outputs=[[None, 0], [None, 0]]),
        noted(outputs=[[None, 2]]),
        noted(outputs=[[[1, 1], 0]]),
        noted(outputs=[[None, -1]]),
        noted(outputs=[[None]]),
        noted(inputs=[[0, 1, 2]]),
        noted(inputs=[None, None]),
        noted(inputs=3),
        noted(forms={"x": ["a"]}),
        noted(batch_axis=[]),
        noted(speed=1),
    ],
)
def test_a_litert_file_whose_parts_are_absent_or_do_not_fit_is_refused(tmp_path, change):
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    x, file = torch.randn(2, 4), tmp_path / "m.tflite"
    result = chipfit.quantize(nn.Sequential(nn.Linear(4, 2)), [x], "tflite_int8", progress=False)
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(result.export(file).read_bytes(), 0))
    change(model)
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    file.write_bytes(bytes(builder.Output()))
    with pytest.raises(ChipfitError):
        result.verify([x], path=file)


def test_a_layer_named_with_half_a_character_is_refused():
    model = nn.Sequential()
    model.add_module("\ud800", nn.Linear(4, 4))
    with pytest.raises(CaptureError, match="half a character"):
        chipfit.quantize(model, [torch.randn(4, 4)], "ort_cpu")


def test_what_may_stand_behind_a_refusal_is_said_of_functions_that_catch_something():
    """An entry for a function that has moved would let nothing pass, and hide nothing: it is only out of date."""
    for key in (*FORESEEN, *FOREIGN):
        file, _, name = key.partition(":")
        functions = [
            n
            for n in ast.walk(ast.parse((SOURCE / file).read_text()))
            if isinstance(n, ast.FunctionDef) and n.name == name
        ]
        assert any(isinstance(n, ast.ExceptHandler) for f in functions for n in ast.walk(f)), key
