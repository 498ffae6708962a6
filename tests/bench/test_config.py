"""Configurations of experiments as files, and their errors."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from chipfit.bench.config import load, of
from chipfit.errors import ConfigError
from tests.bench.tiny import config
from tests.build import platform_file

ROOT = Path(__file__).parents[2]
#: the example of document 004
FRAGMENT = """
qparams:
    w_method: lsq
    a_method: lsq
    bit: 4

backend: academic
bnfold: 4
"""


#: a configuration without training
PTQ = {"qparams": None, "backend": None, "bnfold": None}
#: flags of snpe
FLAGS = {"name": "mine", "ada_sign": False, "symmetry": False, "per_channel": False, "pot_scale": False}


@pytest.fixture
def experiment(tmp_path):
    """Returns a function that writes the document's example over a base, perhaps with more lines, as a file."""
    shared = {k: v for k, v in config().items() if k not in ("qparams", "backend", "bnfold")}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(shared))
    return lambda more="": platform_file(tmp_path, f"extends: base.yaml\n{more}{FRAGMENT}", "config.yaml")


def test_the_documents_fragment_is_an_experiment_over_a_base_in_the_unified_setting(experiment):
    found = load(experiment())
    assert found.qparams.model_dump(exclude_none=True) == {"w_method": "lsq", "a_method": "lsq", "bit": 4}
    assert found.unified and found.lr_scheduler.kwargs.max_iter == 12
    assert found.notes == ["bnfold has no effect: 'academic' leaves batch norms as they are"]
    assert found.setting().bnfold == -1


def test_an_experiment_that_changes_the_training_setting_is_not_unified(experiment):
    assert not load(experiment("label_smooth: 0.2\n")).unified
    assert not of(config()).unified


def test_an_unknown_key_is_reported_with_file_line_and_similar_names(experiment):
    with pytest.raises(ConfigError) as e:
        load(experiment("lable_smooth: 0.2\n"))
    assert "config.yaml:2, key lable_smooth" in str(e.value) and "label_smooth" in str(e.value)


def test_an_error_in_a_base_is_reported_in_its_file(experiment, tmp_path):
    file, base = experiment(), tmp_path / "base.yaml"
    base.write_text(base.read_text() + "ema:\n  enabel: true\n")
    line = len(base.read_text().splitlines())
    with pytest.raises(ConfigError, match=rf"Key 'enabel' is unknown.*base.yaml:{line}, key ema.enabel"):
        load(file)
    with pytest.raises(ConfigError, match=r"config.yaml:2, key ema.enabel"):
        load(experiment("ema: {enabel: false}\n"))


@pytest.mark.parametrize(
    "over, words",
    [
        ({"backend": None}, "require 'backend'"),
        ({"backend": "tensorrtt"}, "'tensorrt'"),
        ({"qparams": {"w_method": "lsqq"}}, "'lsq'"),
        ({"qparams": {"bit": 17}}, "1 to 16"),
        ({"qparams": {"per_channel": True}}, "'per_channel' is unknown"),
        ({"backend": {**FLAGS, "name": "snpe", "per_channel": True}}, "'snpe' is a setting with another per_channel"),
        ({"backend": {**FLAGS, "ada_sign": True}}, "ada_sign is for academic settings only"),
        ({"qparams": None}, "give one of 'qparams' (training) and 'ptq'"),
        ({"ptq": {}}, "give one of 'qparams' (training) and 'ptq'"),
        ({"lr_scheduler": None}, "training requires 'lr_scheduler'"),
        ({"lr_scheduler": {"kwargs": {"base_lr": 0.1, "warmup_steps": 9, "max_iter": 9}}}, "less than max_iter"),
        ({"seed": -1}, "at least 0"),
        ({"optimizer": {"type": "LBFGS"}}, "'SGD'"),
        ({"deploy": ["ort_cpuu"]}, "'ort_cpu'"),
        ({"saver": {"pretrain": {"path": "w.safetensors", "epochs": 2}}}, "either 'path' or 'epochs'"),
        ({"qparams": {"w_method": "nowhere:Mine"}}, "cannot be imported"),
        ({**PTQ, "ptq": {"platform": "ort_cpuu"}}, "'ort_cpu'"),
        ({**PTQ, "ptq": {"rule": "msee"}}, "'mse'"),
        ({**PTQ, "ptq": {"settings": {"round": "gptq"}}}, "'rounding'"),
        ({**PTQ, "ptq": {"limits": {"weight": "50%"}}}, "'weight'"),
        ({**PTQ, "ptq": {"limits": {"weights": "half"}}}, "'half'"),
    ],
)
def test_invalid_and_contradictory_options_are_refused(over, words):
    with pytest.raises(ConfigError) as e:
        of(config(**over))
    assert words in str(e.value)


def test_the_json_schema_accepts_every_committed_experiment_and_rejects_what_the_reader_rejects():
    """By another reader of JSON Schemas."""
    text = (ROOT / "docs/schema/experiment.schema.json").read_text()
    check = jsonschema.Draft202012Validator(json.loads(text))
    files = [*ROOT.glob("qbench_zoo/settings/*.yaml"), *ROOT.glob("qbench_zoo/*/*/config.yaml")]
    assert len(files) > 300
    assert [str(f) for f in files if not check.is_valid(yaml.load(f.read_text(), yaml.CSafeLoader))] == []
    assert check.is_valid(config()) and check.is_valid({"extends": "base.yaml", "ptq": {}})
    wrong = {"lable_smooth": 0.1}, {"seed": -1}, {"optimizer": {"type": "LBFGS"}}, {"unified": True}, {"extends": 3}
    assert not any(check.is_valid(config(**over)) for over in wrong)
    assert not check.is_valid({"ptq": {}})


def test_files_that_extend_each_other_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ConfigError, match="extends itself"):
        load(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text("extends: c.yaml\n")
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "a.yaml")


def test_the_key_depends_on_everything_that_affects_results_and_not_on_paths():
    one = of(config())
    data = {**config()["data"], "root": "elsewhere", "num_workers": 3}
    assert of(config(data=data, study="other")).key == one.key
    for other in ({"seed": 1}, {"bnfold": 3}, {"label_smooth": 0.1}, {"data": {**data, "batch_size": 25}}):
        assert of(config(**other)).key != one.key


def test_a_backend_may_be_given_as_flags():
    flags = {"name": "mine", "ada_sign": True, "symmetry": True, "per_channel": False, "pot_scale": False, "graph": 2}
    found = of(config(backend=flags, bnfold=3))
    assert (found.setting().graph, found.setting().bnfold, found.notes) == (2, 3, [])
    assert found.name == "tests.bench.tiny:net_lsq_8bit_mine_bn3"


def test_results_are_filed_by_the_kind_of_a_named_device():
    free, cpu, first, second = (
        of(config(**d)).key for d in ({}, {"device": "cpu"}, {"device": "cuda"}, {"device": "cuda:1"})
    )
    assert len({free, cpu, first}) == 3 and second == first
    assert of(config(device="auto")).key == free and of(config()).on("cuda").key == first


@pytest.mark.parametrize("device", ["cuda:", "CUDA", "cuda:-1", "0", 0])
def test_a_device_is_a_kind_and_perhaps_an_index(device):
    with pytest.raises(ConfigError, match="device"):
        of(config(device=device))
