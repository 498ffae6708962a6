"""One core, two doors: chips written in Python and in YAML turn into one another."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from chipfit.cli.app import app
from chipfit.errors import ModelingError, PlatformError, UnknownNameError
from chipfit.facade.target_platform.model import TargetPlatformModel
from chipfit.facade.target_platform.targets import chip_descriptions, get_target_platform_capabilities
from chipfit.platform.load import load, names
from chipfit.platform.save import export_platform

CHIPS = [(n, v) for n, chip in chip_descriptions().items() for v in chip["versions"] if n != "default"]


def said(platform):
    return platform.model_dump(exclude={"extends"})  # what it extends is written out in full


@pytest.mark.parametrize("name", names())
def test_every_platform_file_is_what_its_export_loads_as(name, tmp_path):
    assert said(load(export_platform(name, tmp_path / "chip.yaml"))) == said(load(name))


@pytest.mark.parametrize("name", names())
def test_every_platform_is_reachable_as_capabilities(name, tmp_path):
    tpc = get_target_platform_capabilities("pytorch", name, "file" if name in chip_descriptions() else None)
    assert tpc.to_platform() == load(name)
    assert load(export_platform(tpc, tmp_path / "chip.json")).formats


@pytest.mark.parametrize(("name", "version"), CHIPS)
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_chip_described_in_python_loses_nothing_in_a_file(name, version, suffix, tmp_path):
    tpc = get_target_platform_capabilities("pytorch", name, version)
    assert said(load(export_platform(tpc, tmp_path / f"chip{suffix}"))) == said(tpc.to_platform())


def test_the_command_line_turns_either_into_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mychips.py").write_text(
        "from chipfit.target_platform import get_target_platform_capabilities\n"
        "def small():\n    return get_target_platform_capabilities('pytorch', 'qnnpack')\n"
        "ready = small()\n"
    )
    run = CliRunner()
    for what in ("mychips:small", "mychips:ready"):
        done = run.invoke(app, ["platforms", "export", what, "small.yaml"])
        assert done.exit_code == 0, done.output
        assert said(load("small.yaml")) == said(get_target_platform_capabilities("pytorch", "qnnpack").to_platform())
    assert run.invoke(app, ["platforms", "export", "small.yaml", "small.json"]).exit_code == 0
    shown = run.invoke(app, ["platforms", "show", "small.json"])
    assert shown.exit_code == 0
    assert "w8_sym" in shown.output


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UnknownNameError, match="txt"):
        export_platform("ort_cpu", tmp_path / "x.txt")
    with pytest.raises(PlatformError, match="int"):
        load(3)
    default = get_target_platform_capabilities("pytorch").tp_model.default_qco
    with pytest.raises(ModelingError, match="math"):
        TargetPlatformModel(default, math={"rounding": "half_even"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content, words",
    [
        ("name: café".encode("latin-1"), "not text in UTF-8"),
        (b"", "not JSON"),
        (b"[" * 100_000, "nest too deep"),
        (b'{"SCHEMA_VERSION": NaN}', "NaN is no number"),
        (b'{"SCHEMA_VERSION": 1, "name": "\\ud800"}', "surrogates not allowed"),
        (b'{"SCHEMA_VERSION": ' + b"9" * 5000 + b"}", "not understood"),
        (b'{"SCHEMA_VERSION": 1}', "'name' of the file is missing"),
        (b'{"SCHEMA_VERSION": 1, "name": "x", "version": "", "model": []}', "'model'.*a dictionary"),
    ],
)
def test_a_capabilities_file_of_garbage_is_refused(tmp_path, content, words):
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(ModelingError, match=words) as e:
        load(file)
    assert str(file) in e.value.where
