"""Files of chips: platforms in YAML, capabilities in JSON, and conversion between them."""

import functools
import json
import operator

import pytest

from chipfit.errors import ModelingError, PlatformError, UnknownNameError
from chipfit.mct.target_platform.model import TargetPlatformModel
from chipfit.mct.target_platform.targets import chip_descriptions, get_target_platform_capabilities
from chipfit.platform.load import load, names
from chipfit.platform.save import export_platform
from chipfit.target_platform import export_target_platform_capabilities, load_target_platform_capabilities
from tests.build import command

CHIPS = [(n, v) for n, chip in chip_descriptions().items() for v in chip["versions"] if n != "default"]


def record(platform):
    return platform.model_dump(exclude={"extends"})  # an export has no `extends`


@pytest.mark.parametrize("name", names())
def test_an_exported_platform_is_read_back_unchanged(name, tmp_path):
    assert record(load(export_platform(name, tmp_path / "chip.yaml"))) == record(load(name))


@pytest.mark.parametrize("name", names())
def test_every_platform_converts_to_capabilities_and_back(name, tmp_path):
    tpc = get_target_platform_capabilities("pytorch", name, "file" if name in chip_descriptions() else None)
    assert tpc.to_platform() == load(name)
    assert load(export_platform(tpc, tmp_path / "chip.json")).formats


@pytest.mark.parametrize(("name", "version"), CHIPS)
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_exported_capabilities_describe_the_same_platform(name, version, suffix, tmp_path):
    tpc = get_target_platform_capabilities("pytorch", name, version)
    assert record(load(export_platform(tpc, tmp_path / f"chip{suffix}"))) == record(tpc.to_platform())


@pytest.mark.parametrize("name", ["imx500 v4", "imx500 v3_lut", "tflite", "qnnpack", "ort_cpu"])
def test_capabilities_are_read_back_unchanged(name, tmp_path):
    tpc = get_target_platform_capabilities("pytorch", *name.split())
    file = export_target_platform_capabilities(tpc, tmp_path / "new/folder/chip.json")
    back = load_target_platform_capabilities(file)
    assert back.tp_model == tpc.tp_model and back == tpc
    assert load_target_platform_capabilities(back) is back
    if tpc.source is None:
        assert back.to_platform().model_dump() == tpc.to_platform().model_dump()


def test_missing_and_wrong_capabilities_files_are_named(tmp_path):
    tpc = get_target_platform_capabilities("pytorch", "qnnpack")
    with pytest.raises(FileNotFoundError):
        load_target_platform_capabilities(tmp_path / "none.json")
    for name, text in {"list.json": "[]", "chip.txt": "{}"}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=name):
            load_target_platform_capabilities(tmp_path / name)
    with pytest.raises(TypeError):
        load_target_platform_capabilities(3)
    with pytest.raises(TypeError):
        export_target_platform_capabilities(3, tmp_path / "x.json")
    with pytest.raises(ValueError, match="chip.txt"):
        export_target_platform_capabilities(tpc, tmp_path / "chip.txt")


def test_the_command_line_converts_between_both(tmp_path, monkeypatch, drop_ins):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mychips.py").write_text(
        "from chipfit.target_platform import get_target_platform_capabilities\n"
        "def small():\n    return get_target_platform_capabilities('pytorch', 'qnnpack')\n"
        "ready = small()\n"
    )
    qnnpack = get_target_platform_capabilities("pytorch", "qnnpack").to_platform()
    for what in ("mychips:small", "mychips:ready"):
        done = command("platforms", "export", what, "small.yaml")
        assert done.exit_code == 0, done.output
        assert record(load("small.yaml")) == record(qnnpack)
    assert command("platforms", "export", "small.yaml", "small.json").exit_code == 0
    shown = command("platforms", "show", "small.json")
    assert shown.exit_code == 0 and "w8_sym" in shown.output


def test_invalid_arguments_are_refused(tmp_path):
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
        (b'{"SCHEMA_VERSION": NaN}', "NaN is not a number"),
        (b'{"SCHEMA_VERSION": 1, "name": "\\ud800"}', "surrogates not allowed"),
        (b'{"SCHEMA_VERSION": ' + b"9" * 5000 + b"}", "invalid number or text"),
        (b'{"SCHEMA_VERSION": 1}', "'name' is missing"),
        (b'{"SCHEMA_VERSION": 1, "name": "x", "version": "", "model": []}', "'model'.*a table of keys"),
    ],
)
def test_an_invalid_capabilities_file_is_refused(tmp_path, content, words):
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(ModelingError, match=words) as e:
        load(file)
    assert str(file) in e.value.where


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data["layers"][0]["members"][0].update(op=["Conv2"]), "no operator named 'Conv2'.*'Conv2D'"),
        (lambda data: data["model"]["default"]["options"][0].update(activation_quantization_method={}), "SYMMETRIC"),
        (lambda data: data["model"]["fusings"][0]["groups"].append("Con"), "no operator set named 'Con'.*Conv"),
        (lambda data: data["model"]["default"].update(base=3), "'base' must be an index of 'options'"),
    ],
)
def test_a_contradictory_capabilities_file_is_refused(tmp_path, change, words):
    file = export_platform(get_target_platform_capabilities("pytorch", "qnnpack"), tmp_path / "x.json")
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(ModelingError, match=words):
        load(file)


def places(data, at=()):
    """Yield the path of each value of nested data."""
    for k, v in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield (*at, k)
        yield from places(v, (*at, k))


@pytest.mark.parametrize("value", [{"a": 1}, [["x"]], "zzz", None, -1, 10**400], ids=str)
def test_a_value_of_another_type_anywhere_in_a_capabilities_file_is_a_typed_error(tmp_path, value):
    """One place of each kind: lists count once."""
    file = export_platform(get_target_platform_capabilities("pytorch", "imx500"), tmp_path / "x.json")
    text = file.read_text()
    kinds = {tuple("#" if isinstance(k, int) else k for k in at): at for at in places(json.loads(text))}
    refused = 0
    for *above, last in kinds.values():
        data = json.loads(text)
        functools.reduce(operator.getitem, above, data)[last] = value
        file.write_text(json.dumps(data))
        try:
            load(file)
        except PlatformError:
            refused += 1
    assert refused > len(kinds) // 3
