"""Bad input drawn at random, a small share of `make fuzz`; and that its four kinds of failure are noticed."""

from __future__ import annotations

import json
import os
import time
import zipfile

import pytest
import torch
import yaml

pytest.importorskip("onnxruntime")
pytest.importorskip("keras")

from benchmarks.fuzz import sense
from benchmarks.fuzz.__main__ import run
from benchmarks.fuzz.run import Case, all_of, one
from torch import nn

import chipfit
from chipfit.cli.inputs import load_model
from chipfit.errors import CaptureError, DataError, PlanError, PlatformError
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
    assert one("planted", planted, 0, seed=1, limit=0.3).what == what


def test_a_case_that_ends_the_process_is_told_and_the_next_ones_still_run():
    kinds = {"dies": dies, "sound": sound}
    outcomes = list(all_of(kinds, [("sound", 0), ("dies", 0), ("sound", 1)], seed=1, limit=1))
    assert [o.what for o in outcomes] == ["accepted", "died", "accepted"]


def test_the_same_seed_draws_the_same_case_and_another_seed_another(tmp_path):
    def numbers(seed: int) -> list[float]:
        return [Case("saved", k, seed, tmp_path).random.random() for k in range(4)]

    assert numbers(7) == numbers(7) != numbers(8)


@pytest.mark.parametrize("kind, cases", [("platforms", 100), ("models", 80)])
def test_drawn_files_end_in_a_result_or_in_a_refusal(kind, cases):
    outcomes = run(seed=777001, cases=cases, minutes=2, limit=20, only=kind)
    assert [o for o in outcomes if o.failed] == [] and len(outcomes) == cases
    assert {o.what for o in outcomes} == {"accepted", "refused"}


# ------------------------------------------------------------------------------------------- what drawing has found


@pytest.mark.parametrize(
    "platform, change, words",
    [
        ("k210", lambda d: d["formats"]["w8"].update(zero=[]), "zero is an empty set"),
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


def test_a_name_that_no_disk_can_have_is_no_platform():
    with pytest.raises(PlatformError):
        chipfit.load_platform(f"{'a' * 5000}.yaml")
