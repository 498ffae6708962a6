"""Mistakes that people make on their first day: each message says what is wrong, and what to try."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.calibration.data import iterate
from chipfit.cli.inputs import generated_data, load_model
from chipfit.errors import CaptureError, ConfigError, DataError, PlanError, RuntimeUnavailable, UnknownNameError
from chipfit.import_by_name import load_target
from tests.build import images, quantized, sequential

NETS = "from torch import nn\ndef build(): return nn.Linear(2, 2)\nchip = 3\n"


def small():
    torch.manual_seed(0)
    return sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


@pytest.fixture(scope="module")
def result():
    return quantized(small(), [images()], platform="tflite_int8")


@pytest.mark.parametrize("name", ["nets", "nets.py"])
def test_a_python_file_in_the_place_of_a_factory_is_turned_into_one(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    with pytest.raises(CaptureError, match=r"Try: nets:build, if nets\.py has a function build\(\)"):
        load_model(name)


def test_a_number_in_the_place_of_a_platform_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_nets.py").write_text(NETS)
    with pytest.raises(chipfit.errors.PlatformError, match=r"'own_nets:chip' is not a platform\. Got: int\."):
        load_target("own_nets:chip")


def test_a_folder_with_nearly_this_name_is_offered(result, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result.save("fitted")
    with pytest.raises(PlanError, match=r"'fited' is not a saved result: it does not exist\. Try: 'fitted'"):
        chipfit.load("fited")
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="it is a file"):
        chipfit.load("file")


@pytest.mark.parametrize(
    "data, words",
    [
        ("calibration.npz", r"Got: str.*load the file, as np\.load\(path\)"),
        (
            [torch.full((2, 3, 8, 8), torch.nan)],
            r"Batch 0 holds NaN or infinite values for input.*how the data are read",
        ),
        (["cat.png"], r"A batch holds text.*Got: cat\.png\. Try: read the files"),
    ],
)
def test_data_that_are_no_numbers_are_named_with_the_way_to_read_them(data, words):
    with pytest.raises(DataError, match=words):
        chipfit.quantize(small(), data, platform="ort_cpu", progress=False)


def test_a_shape_in_the_place_of_an_example_is_turned_into_one():
    with pytest.raises(DataError, match=r"Try: torch\.randn\(1, 3, 8, 8\) has this shape"):
        chipfit.lint(small(), (1, 3, 8, 8), "ort_cpu")


def test_generated_images_of_a_size_that_the_model_does_not_take_are_named():
    model = sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3))
    with pytest.raises(DataError, match="does not take generated images of 32 x 32 pixels.*--input-shape 1,3,32,32"):
        list(iterate(generated_data("generated:2", model, input_size=32)))


def test_options_of_files_are_known_by_name(result, tmp_path):
    with pytest.raises(UnknownNameError, match=r"no option of \.tflite files named 'keeplayout'.*'keep_layout'"):
        result.export(tmp_path / "net.tflite", keeplayout=True)
    with pytest.raises(ConfigError, match=r"no suffix.*Allowed: \.h, "):
        result.export(tmp_path / "net")
    assert [*tmp_path.iterdir()] == []


def test_a_file_that_no_runtime_loads_is_refused_by_its_suffix(result):
    with pytest.raises(RuntimeUnavailable, match=r"No runtime loads files with this suffix\. Got: \.py"):
        result.verify([images()], path="net.py")


@pytest.mark.parametrize(
    "labels, words",
    [
        (torch.zeros(3, dtype=torch.long), "not one class for each row of scores (labels [3], first output [8, 3])"),
        (torch.full((8,), 99), "label 99 is none of the 3 classes"),
    ],
)
def test_labels_that_are_no_classes_are_a_warning(result, labels, words):
    found = result.verify([(torch.rand(8, 3, 8, 8), labels)])
    assert any(words in warning for warning in found.warnings)


def test_a_share_above_the_whole_network_prunes_nothing_and_is_refused():
    with pytest.raises(ConfigError, match="more than the network takes.*Got: 130%.*at most 100%"):
        chipfit.prune(small(), [images()], limits=chipfit.Limits(bops="130%"))


def test_a_table_in_the_place_of_settings_and_limits_shows_how_to_write_them():
    with pytest.raises(ConfigError, match="as in Settings\\(rounding='gptq'\\)"):
        quantized(small(), [images()], settings={"rounding": "gptq"})
    with pytest.raises(ConfigError, match="as in Limits\\(weights='60%'\\)"):
        quantized(small(), [images()], limits={"weights": "60%"})
