"""Matrices of experiments, and the committed files of qbench_zoo."""

from collections import Counter
from pathlib import Path

import pytest
import yaml

from chipfit.bench.config import load
from chipfit.bench.matrix import configs, experiments, files, generate, read
from chipfit.errors import ChipfitError, ConfigError, UnknownNameError

ZOO = Path(__file__).parents[2] / "qbench_zoo"
#: how many experiments each study has
COUNTS = {"algorithms": 5 * 5 * 7, "bn_fold": 2 * 2 * 6, "graph": 2 * 2 * 3, "calibration": 9 * 9, "bits": 2 * 6 * 3}
COUNTS |= {"small": 5 * 2 * 4, "tenth": 2 * 2, "small_ptq": 2 * 2 * 2 * 3, "small_ranges": 5}


def test_the_committed_files_are_those_that_the_matrix_generates():
    wanted = files(ZOO / "matrix.yaml")
    made = {p.relative_to(ZOO) for p in ZOO.glob("*/*/*")}
    assert made == set(wanted)
    assert [str(n) for n, text in wanted.items() if (ZOO / n).read_text() != text] == []
    assert all((ZOO / n).stat().st_mode & 0o111 for n in wanted if n.suffix == ".sh")


def test_studies_have_all_their_combinations():
    assert Counter(data["study"] for data in experiments(read(ZOO / "matrix.yaml")).values()) == COUNTS


def test_folder_names_agree_with_the_files():  # those of MQBench did not
    for folder, c in configs(ZOO / "matrix.yaml").items():
        words = folder.replace("_experiments/", "/")
        assert c.model.type in words
        if c.study in ("algorithms", "small", "tenth", "bits"):
            kind, _, rest = words.partition("/")
            method = rest if kind in ("small", "bit") else kind
            assert method.startswith("pact" if c.qparams.a_method == "pact" else c.qparams.w_method), folder
            assert f"{c.qparams.bit}bit" in rest and rest.endswith(c.setting_name), folder
        if c.study == "calibration":
            assert words.endswith(f"{c.qparams.w_observer}_{c.qparams.a_observer}"), folder
        if c.study == "bn_fold":
            assert words.endswith(f"bn{c.bnfold}"), folder
        assert c.unified or c.study in ("calibration",), folder


def test_the_documents_own_experiment_is_there():
    c = load(ZOO / "lsq_experiments/resnet18_4bit_academic/config.yaml")
    assert (c.model.type, c.qparams.w_method, c.qparams.a_method, c.qparams.bit) == ("resnet18", "lsq", "lsq", 4)
    assert (c.setting_name, c.bnfold, c.label_smooth, c.optimizer.kwargs["nesterov"]) == ("academic", 4, 0.1, True)
    rates = c.lr_scheduler.kwargs
    assert (rates.base_lr, rates.warmup_lr, rates.warmup_steps, rates.max_iter) == (0.004, 1e-4, 2500, 250_000)


MATRIX = {
    "axes": {"bit": {"b4": {"qparams": {"bit": 4}}, "b8": {"qparams": {"bit": 8}}}, "to": {"x": {"backend": "snpe"}}},
    "studies": {"s": {"of": ["bit", "to"], "folder": "{bit}/{to}", "config": {"extends": "base.yaml"}}},
}


def write(below: Path, **study: object) -> Path:
    data = {**MATRIX, "studies": {"s": {**MATRIX["studies"]["s"], **study}}}
    (below / "matrix.yaml").write_text(yaml.safe_dump(data))
    return below / "matrix.yaml"


def test_obsolete_generated_files_are_removed_and_others_stay(tmp_path):
    generate(write(tmp_path))
    (tmp_path / "b4/own").mkdir()
    (tmp_path / "b4/own/config.yaml").write_text("model: {type: mine}\n")
    generate(write(tmp_path, without=[{"bit": "b8"}]))
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/*/config.yaml"))
    assert left == ["b4/own/config.yaml", "b4/x/config.yaml"]


@pytest.mark.parametrize(
    "study, error, words",
    [
        ({"of": ["bits", "to"]}, UnknownNameError, "'bit'"),
        ({"only": {"bit": ["b5"]}}, UnknownNameError, "'b4'"),
        ({"folder": "{to}"}, ConfigError, "Two experiments have the folder 'x'"),
        ({"folders": "x"}, ConfigError, "matrix.yaml:"),
    ],
)
def test_an_invalid_matrix_is_refused(tmp_path, study, error, words):
    with pytest.raises(error) as e:
        files(write(tmp_path, **study))
    assert words in str(e.value)


def test_a_generated_file_edited_by_hand_is_refused(tmp_path):
    path = write(tmp_path)
    generate(path)
    with (tmp_path / "b4/x/config.yaml").open("a") as f:
        f.write("seed: 3\n")
    with pytest.raises(ChipfitError, match="missing or outdated"):
        configs(path)
