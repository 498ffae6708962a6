"""Bad input: a typed error that says what to do, or a correct result; never a half-written file."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit.cli import app as command_line
from chipfit.errors import (
    CaptureError,
    ChipfitError,
    ConfigError,
    DataError,
    ExportError,
    ModelingError,
    NothingQuantizedError,
    PlanError,
    PlatformError,
    RuntimeUnavailable,
    UnknownNameError,
    UnsupportedError,
)
from chipfit.platform.save import export_platform
from chipfit.target_platform import export_target_platform_capabilities
from tests.zoo import make


def fit(model, data, **options):
    return chipfit.quantize(model, data, platform=options.pop("platform", "ort_cpu"), progress=False, **options)


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()


X = torch.randn(4, 3, 8, 8)


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("data", [[], iter([]), list])
def test_empty_data_are_refused(data):
    with pytest.raises(DataError, match="empty"):
        fit(small(), data)


def test_one_sample_is_enough():
    result = fit(small(), [X[:1]])
    assert result.verify([X]).exact


def test_a_single_tensor_is_cut_into_batches():
    assert fit(small(), X).verify(X).exact


def test_labels_of_a_data_loader_are_left_out():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, torch.arange(4)), batch_size=2)
    assert fit(small(), loader).verify(loader).samples == 4


def test_a_generator_function_can_be_given():
    assert fit(small(), lambda: (X for _ in range(2))).verify([X]).exact


def test_the_first_nan_names_its_layer():
    model = small()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with pytest.raises(DataError, match=r"NaN or infinite values in layer '2'"):
        fit(model, [X])


def test_infinite_inputs_are_named():
    with pytest.raises(DataError, match="input 'input'"):
        fit(small(), [torch.full((2, 3, 8, 8), float("inf"))])


def test_integer_images_for_a_float_model_are_refused_with_the_cure():
    with pytest.raises((DataError, CaptureError), match="float|dtype|type"):
        fit(small(), [torch.zeros(2, 3, 8, 8, dtype=torch.uint8)])


def test_a_batch_of_another_shape_is_named():
    with pytest.raises(DataError, match=r"\[2, 5, 8, 8\].*'batch', 3, 8, 8"):
        fit(small(), [X, torch.randn(2, 5, 8, 8)])


def test_a_smaller_last_batch_is_fine():
    assert fit(small(), [X, X[:1]]).verify([X[:3]]).exact


def test_a_string_is_not_data():
    with pytest.raises(DataError, match="not calibration data"):
        fit(small(), "images")


# ---------------------------------------------------------------- numbers at the edge


@pytest.mark.parametrize("value", [0.0, 1e-30, 3.0, 1e6])
def test_constant_inputs_give_an_exact_result(value):
    x = torch.full((2, 3, 8, 8), value)
    assert fit(small(), [x]).verify([x]).exact


def test_dead_channels_and_all_zero_weights_give_an_exact_result():
    model = small()
    with torch.no_grad():
        model[0].weight[1] = 0
        model[0].bias[1] = 5.0  # alone in its channel: the weight scale has to grow until int32 holds it
        model[2].weight.zero_()
    result = fit(model, [X])
    assert result.verify([X]).exact
    with torch.no_grad():
        assert torch.isfinite(result.model(X)).all()


def test_one_huge_outlier_does_not_break_anything():
    x = X.clone()
    x[0, 0, 0, 0] = 1e8
    assert fit(small(), [x]).verify([x]).exact


# ---------------------------------------------------------------- models, names, platforms


def test_branching_on_values_names_the_users_line():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(8, 8)

        def forward(self, x):
            y = self.l(x)
            return y.relu() if y.sum() > 0 else y

    with pytest.raises(CaptureError, match=r"test_bad_input.py:\d+, in forward") as e:
        fit(Branch(), [torch.randn(2, 8)])
    assert "torch.where" in str(e.value)


def test_a_model_that_fails_by_itself_is_reported_as_that():
    with pytest.raises(CaptureError, match="fails on the example input"):
        fit(small(), [torch.randn(2, 5, 8, 8)])


def test_a_class_is_not_a_model():
    with pytest.raises(CaptureError, match="instance"):
        fit(nn.Linear, [X])


def test_an_unknown_platform_lists_near_ones():
    with pytest.raises(UnknownNameError, match="ort_cpu"):
        fit(small(), [X], platform="ort-cpu")


def test_an_unknown_layer_lists_near_ones():
    model, batch = make("residual")
    with pytest.raises(UnknownNameError, match="'head'"):
        fit(model, [batch], overrides={"haed": "float"})


def test_an_unknown_rule_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match="mse"):
        fit(small(), [X], rule="msee")


def test_an_override_that_is_no_decision_is_refused():
    with pytest.raises(PlanError, match="not understood"):
        fit(small(), [X], overrides={"0": "int8"})


def test_bits_that_the_platform_does_not_have_are_refused():
    with pytest.raises(UnsupportedError, match="3-bit"):
        fit(small(), [X], overrides={"0": {"bits": 3}})


def test_quantizing_nothing_is_an_error():
    with pytest.raises(NothingQuantizedError, match="overrides keep"):
        fit(small(), [X], overrides={"Conv2D": "float", "Relu": "float"})


def test_a_platform_that_rejects_an_operator_says_so(tmp_path):
    file = tmp_path / "strict.yaml"
    file.write_text(
        "name: strict\nunlisted: reject\nformats: {a: {bits: 8, zero: any}}\n"
        "ops: [{match: [Relu], use: [{in: a, out: a}], src: [S], conf: I}]\nsources: {S: me}\n"
    )
    with pytest.raises(UnsupportedError, match="Conv2D '0' cannot run on 'strict'"):
        fit(small(), [X], platform=file)


# ---------------------------------------------------------------- files


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    result = fit(small(), [X])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ExportError, match="No space left"):
        result.export(tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_kill_during_export_leaves_the_old_file(tmp_path, monkeypatch):
    result = fit(small(), [X])
    file = result.export(tmp_path / "m.onnx")
    before = file.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        result.export(file)
    assert file.read_bytes() == before


def test_an_unknown_file_format_lists_the_known_ones(tmp_path):
    with pytest.raises(UnknownNameError, match=".onnx"):
        fit(small(), [X]).export(tmp_path / "m.onx")


def test_an_opset_that_is_too_old_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="opset 13"):
        fit(small(), [X]).export(tmp_path / "m.onnx", opset=11)


@pytest.mark.parametrize("name", ["plan.json", "plan.safetensors", "weights.safetensors"])
def test_a_truncated_saved_result_is_refused(tmp_path, name):
    folder = fit(small(), [X]).save(tmp_path / "saved")
    file = folder / name
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(PlanError, match=name):
        chipfit.load(folder)


def test_verifying_on_nothing_is_an_error():
    with pytest.raises(ChipfitError, match="no data"):
        fit(small(), [X]).verify([])


def test_numpy_arrays_and_float64_are_accepted():
    assert fit(small(), [np.asarray(X, dtype=np.float64)]).verify([X.numpy()]).exact


# ---------------------------------------------------------------- the disk


def refusal(error, words, act, *arguments, **options):
    """The refusal of a call, of its type and with its words; it stands for nothing but what the disk says."""
    with pytest.raises(error, match=words) as e:
        act(*arguments, **options)
    assert isinstance(e.value.__cause__, (type(None), OSError, ValueError, RecursionError))
    return e.value


@pytest.mark.parametrize(
    "code, cure", [(errno.ENOSPC, "free disk"), (errno.EACCES, "permissions"), (errno.EROFS, "can be written")]
)
def test_a_folder_that_takes_no_file_is_named_with_the_cure(tmp_path, monkeypatch, code, cure):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    result = fit(small(), [X])
    monkeypatch.setattr(os, "fsync", refuse)
    e = refusal(ExportError, os.strerror(code), result.export, tmp_path / "m.onnx")
    assert cure in e.hint and str(tmp_path) in e.where and list(tmp_path.iterdir()) == []


def test_a_limit_on_the_size_of_files_is_met_while_writing(tmp_path):
    result = fit(small(), [X])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        refusal(ExportError, "File too large", result.export, tmp_path / "m.onnx")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name, words", [("a" * 300 + ".json", "name too long"), ("file/m.json", "exists|directory"), ("a\0b.json", "null")]
)
def test_a_path_that_no_disk_takes_is_refused(tmp_path, name, words):
    (tmp_path / "file").write_text("")
    refusal(ExportError, words, fit(small(), [X]).export, tmp_path / name)


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "m.json").mkdir()
    refusal(ExportError, "directory", fit(small(), [X]).export, tmp_path / "m.json")


@pytest.mark.parametrize("write", ["save", "export"])
def test_a_folder_in_which_nothing_can_be_made_is_tried_once(monkeypatch, write):
    tries = iter(["0" * 16])
    monkeypatch.setattr("chipfit.files.secrets.token_hex", lambda _: next(tries))
    refusal(ExportError, "No such file", getattr(fit(small(), [X]), write), "/proc/m.onnx")


def test_a_folder_that_may_not_be_read_is_not_replaced(tmp_path, monkeypatch):
    def refuse(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    result, folder = fit(small(), [X]), tmp_path / "mine"
    folder.mkdir()
    monkeypatch.setattr("chipfit.files.Path.iterdir", refuse)
    refusal(PlanError, "it may not be read", result.save, folder)


@pytest.mark.parametrize("runtime", ["onnxruntime", "litert"])
@pytest.mark.parametrize("endless", ["/dev/zero", "pipe"])
def test_what_has_no_end_is_not_read(tmp_path, runtime, endless):
    os.mkfifo(tmp_path / "pipe")
    refusal(
        RuntimeUnavailable,
        "is a folder, a device or a pipe",
        fit(small(), [X]).verify,
        [X],
        runtime=runtime,
        path=tmp_path / endless,  # the absolute one as it is
    )


@pytest.mark.parametrize("path", [None, 5, b"x.json", ["x.json"]], ids=repr)
def test_what_is_no_path_is_refused(tmp_path, path):
    result, chip = fit(small(), [X]), chipfit.get_target_platform_capabilities("pytorch")
    for write in (result.export, result.save, result.report.save, partial(export_platform, "ort_cpu")):
        refusal(ExportError, "This is no path", write, path)
    refusal(PlanError, "This is no path", chipfit.load, path)
    refusal(ModelingError, "This is no path", export_target_platform_capabilities, chip, path)
    if path is not None:
        refusal(RuntimeUnavailable, "This is no path", result.verify, [X], path=path)


# ---------------------------------------------------------------- text that is none

LATIN = "name: café".encode("latin-1")
DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "content, words",
    [
        (LATIN, "not text in UTF-8.*byte 0xe9 at position 9"),
        (b"", "table of keys"),
        (bytes(range(256)), "not text in UTF-8"),
        (b"\0\0", "not valid YAML"),
        (b"name: " + DEEP, "nests deeper than 40 levels"),
        (b"a: &a [1]\nb: *a", "aliases"),
        (b"a: &a [*a]", "aliases"),
        (b"name: 2001-99-99", "no number and no date"),
        (b"name: " + b"9" * 5000, "no number"),
        (b"name: !!python/name:os.system x", "not valid YAML"),
        (b"name: x\nformats: {a: {bits: .nan}}", "a.bits"),
        (b"name: x\nformats: {a: {bits: 8, scale_min: .nan}}", "scale_min"),
        (b"name: x\nformats: {a: {bits: 8, grid: .inf}}", "grid"),
        (b"name: x\nformats: {a: {bits: 60, kind: log}}", "at most 16 bits"),
        (b"name: x\nformats: {a: {bits: 60, kind: lut}}", "at most 16 bits"),
        (b"name: x\nformats: {a: {bits: 1" + b"0" * 400 + b"}}", "bits is an integer of 1329 bits.*key formats.a"),
        (b"name: x\nextends: x", "extends itself"),
        (b'name: "\\ud800"', "surrogates not allowed|invalid Unicode character"),  # PyYAML's words, libyaml's
    ],
)
def test_a_platform_file_of_garbage_is_refused(tmp_path, content, words):
    file = tmp_path / "x.yaml"
    file.write_bytes(content)
    refusal(PlatformError, words, chipfit.load_platform, file)


def test_a_folder_is_no_platform_file(tmp_path):
    (tmp_path / "x.yaml").mkdir()
    refusal(PlatformError, "is a folder", chipfit.load_platform, tmp_path / "x.yaml")


@pytest.mark.parametrize(
    "content, words",
    [
        (LATIN, "not text in UTF-8"),
        (b"", "not JSON"),
        (DEEP, "nest too deep"),
        (b'{"SCHEMA_VERSION": NaN}', "NaN is no number"),
        (b'{"SCHEMA_VERSION": 1, "name": "\\ud800"}', "surrogates not allowed"),
        (b'{"SCHEMA_VERSION": ' + b"9" * 5000 + b"}", "not understood"),
        (b'{"SCHEMA_VERSION": 1}', "'name' is missing|'name' of the file is missing"),
        (b'{"SCHEMA_VERSION": 1, "name": "x", "version": "", "model": []}', "'model'.*a dictionary"),
    ],
)
def test_a_capabilities_file_of_garbage_is_refused(tmp_path, content, words):
    file = tmp_path / "x.json"
    file.write_bytes(content)
    e = refusal(ModelingError, words, chipfit.load_platform, file)
    assert str(file) in e.where


@pytest.mark.parametrize("content", [b"", b"garbage", bytes(range(256)) * 8, None])
@pytest.mark.parametrize("runtime, suffix", [("onnxruntime", "onnx"), ("litert", "tflite")])
def test_a_deployed_file_of_garbage_is_refused(tmp_path, content, runtime, suffix):
    file = tmp_path / f"m.{suffix}"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RuntimeUnavailable, match="TensorFlow Lite|not an ONNX model|refuses|does not exist") as e:
        fit(small(), [X]).verify([X], runtime=runtime, path=file)
    assert str(file) in e.value.where


# ---------------------------------------------------------------- arguments that are something else


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"settings": {"equalize": True}}, ConfigError, "'settings' is not understood"),
        ({"seed": "0"}, ConfigError, "'seed' is not understood"),
        ({"seed": 2**70}, ConfigError, "'seed' is not understood"),
        ({"seed": 2**63}, ConfigError, "'seed' is not understood"),
        ({"seed": -(2**63) - 1}, ConfigError, "'seed' is not understood"),
        ({"z_threshold": float("nan")}, ConfigError, "'z_threshold' is not understood"),
        ({"rule": list}, ConfigError, "no range rule"),
        ({"rule": [1]}, ConfigError, "no range rule"),
        ({"weight_rule": torch.relu}, ConfigError, "no range rule"),
        ({"rule": lambda sample: sample}, ConfigError, "no range rule"),
        ({"rule": lambda sample, grid: 3}, DataError, "returned no range"),
        ({"rule": "lp(p='x')"}, ConfigError, "Setting 'p'"),
        ({"rule": "lp(p=1e999)"}, ConfigError, "Setting 'p'"),
        ({"rule": "kl(steps=999999999)"}, ConfigError, "Setting 'steps'"),
        ({"rule": "percentile(share=2)"}, ConfigError, "'share'"),
        ({"overrides": ["0"]}, PlanError, "overrides are not understood"),
        ({"overrides": 3}, PlanError, "overrides are not understood"),
        ({"overrides": 0}, PlanError, "overrides are not understood"),
        ({"overrides": torch.ones(2)}, PlanError, "overrides are not understood"),
        ({"overrides": nn.Conv2d}, PlanError, "overrides are not understood"),
        ({"overrides": {nn.Conv2d: "float"}}, PlanError, "key of an override"),
        ({"overrides": {0: "float"}}, PlanError, "key of an override"),
        ({"overrides": {"0": list}}, PlanError, "not understood"),
        ({"overrides": {"0": [8]}}, PlanError, "not understood"),
        ({"overrides": {"0": np.array(["float", "float"])}}, PlanError, "not understood"),
        ({"overrides": {"0": {"bits": [8]}}}, PlanError, "'bits'"),
        ({"overrides": {"0": {"bits": int}}}, PlanError, "'bits'"),
        ({"overrides": {"0": {"method": ["x"]}}}, PlanError, "'method'"),
        ({"overrides": {"0": {"per": np.array(["tensor", "x"])}}}, PlanError, "'per'"),
        ({"overrides": {"0": {"rule": list}}}, ConfigError, "no range rule"),
        ({"overrides": {"0": {"range": (0, 10**400)}}}, PlanError, "'range'"),
        ({"overrides": {"0": {"range": (-1e300, 1e300)}}}, PlanError, "'range'"),
    ],
)
def test_an_option_of_another_kind_is_refused(options, error, words):
    refusal(error, words, fit, small(), [X], **options)


@pytest.mark.parametrize("name", [5, 1.5, b"AVX2", ("AVX2",), []], ids=repr)
def test_a_name_that_is_no_text_is_unknown(name):
    refusal(UnknownNameError, "no revision of 'ort_cpu'", chipfit.load_platform, "ort_cpu", name)
    refusal(UnknownNameError, "no runtime named", fit(small(), [X]).verify, [X], runtime=name)


@pytest.mark.parametrize("gives", [lambda: None, lambda: "ort_cpu", lambda: nn.Linear(1, 1)])
def test_what_gives_no_platform_is_none(gives):
    refusal(PlatformError, "This is no platform", chipfit.load_platform, SimpleNamespace(to_platform=gives))


@pytest.mark.parametrize(
    "data, words",
    [
        (lambda extra: [X], "needs arguments"),
        (torch.relu, "needs arguments"),
        ([np.array([["a"]])], "something else than numbers"),
        ([np.array([object()])], "something else than numbers"),
        ([X.to_sparse()], "without plain numbers"),
        ([X.to("meta")], "without plain numbers"),
        (X.to_sparse(), "without plain numbers"),
        (small(), "not calibration data"),
        ([{3: X}], "inputs of a batch have names"),
        ([(X, "cat")], "labels are no numbers"),
    ],
)
def test_data_of_another_kind_are_refused(data, words):
    refusal(DataError, words, fit, small(), data, example=X)


def test_a_batch_that_contains_itself_is_refused():
    batch = []
    batch.append(batch)
    refusal(DataError, "contains itself", fit, small(), [batch])


@pytest.mark.parametrize("form", [lambda x: x[::-1], lambda x: x.astype(">f4"), np.asfortranarray])
def test_arrays_of_any_strides_and_byte_order_are_read(form):
    x = form(X.numpy())
    result, same = fit(small(), [x]), fit(small(), [torch.tensor(x.tolist())])
    assert result.verify([x]).exact
    assert result.plan["input"].same_numbers(same.plan["input"])


def test_what_the_users_own_data_raise_comes_out_as_it_is():
    def broken():
        yield X
        raise TimeoutError("disk unplugged")

    with pytest.raises(TimeoutError, match="unplugged"):
        fit(small(), broken())


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, X)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_module_is_refused(make):
    refusal(CaptureError, "torch.jit.*pass the module that was scripted", fit, make(small()), [X])


@pytest.mark.parametrize("x", [X[0], X.unsqueeze(0), X.reshape(4, -1), torch.tensor(1.0)])
def test_inputs_of_another_rank_are_refused(x):
    result = fit(small(), [X])
    with pytest.raises(DataError, match="wrong shape|single number"):
        result.verify([x])


def test_a_table_for_60_bit_codes_is_refused_in_python_too():
    import chipfit.target_platform as tp

    weights = tp.AttributeQuantizationConfig(tp.QuantizationMethod.LUT_SYM_QUANTIZER, 60, True, True)
    config = tp.OpQuantizationConfig(weights, {}, tp.QuantizationMethod.SYMMETRIC, 8, 8, True)
    model = tp.TargetPlatformModel(tp.QuantizationConfigOptions([config]), operator_set=[])
    refusal(ModelingError, "at most 16 bits", fit, small(), [X], platform=model)


@pytest.mark.parametrize("part", ["math", "operator_set", "fusing_patterns"])
@pytest.mark.parametrize("given", [torch.ones(2), 0, 5, "x"], ids=str)
def test_parts_of_a_modelled_chip_are_of_their_kind(part, given):
    import chipfit.target_platform as tp

    weights = tp.AttributeQuantizationConfig(tp.QuantizationMethod.SYMMETRIC, 8)
    options = tp.QuantizationConfigOptions(
        [tp.OpQuantizationConfig(weights, {}, tp.QuantizationMethod.SYMMETRIC, 8, 8, True)]
    )
    refusal(ModelingError, f"'{part}' of TargetPlatformModel", tp.TargetPlatformModel, options, **{part: given})


@pytest.mark.parametrize("much", [10**30, 2**64, 10**400], ids=["1e30", "2^64", "1e400"])
def test_integers_that_no_tensor_holds(much):
    overrides = {"0": {"z_threshold": much}}
    if much < 10**300:  # further than any value: nothing is dropped
        fit(small(), [X], z_threshold=much)
        fit(small(), [X], overrides=overrides)
    else:
        refusal(ConfigError, "above 0", fit, small(), [X], z_threshold=much)
        refusal(PlanError, "standard deviations", fit, small(), [X], overrides=overrides)
        refusal(ConfigError, "a number above 0", chipfit.Limits, total=much)
        refusal(PlanError, "a number of at least 0", chipfit.Settings, shift_negative=much)


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 0, -1.0, "x"])
def test_a_fixed_scale_is_a_finite_number_above_zero(scale):
    import chipfit.target_platform as tp

    weights = tp.AttributeQuantizationConfig(tp.QuantizationMethod.SYMMETRIC, 8)
    given = (weights, {}, tp.QuantizationMethod.SYMMETRIC, 8, 8, True)
    refusal(ModelingError, "finite number above 0", tp.OpQuantizationConfig, *given, fixed_scale=scale)


@pytest.mark.parametrize(
    "rule, words", [(nn.Linear(2, 2), "TypeError"), (lambda sample, grid: sample.nothing, "AttributeError")]
)
def test_a_users_range_rule_that_fails_is_named(rule, words):
    with pytest.raises(ConfigError, match=f"range rule .* fails: {words}") as e:
        fit(small(), [X], weight_rule=rule)
    assert type(e.value.__cause__).__name__ == words


@pytest.fixture(scope="module")
def table():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)).eval()
    ids = torch.arange(5)
    return fit(model, [ids]), ids


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "uint64"])
def test_integers_of_another_type_are_read_as_those_of_the_example(table, kind):
    result, ids = table
    found = result.verify([ids.numpy().astype(kind)])
    assert found.exact and found.samples == 5


def test_integers_that_the_type_of_the_example_does_not_hold_are_refused(table):
    much = torch.tensor([1, 2**63 + 1], dtype=torch.uint64)
    refusal(DataError, "holds numbers that int64 does not.*9223372036854775809", table[0].verify, [much])
    refusal(DataError, "holds complex numbers", table[0].verify, [table[1].to(torch.complex64)])


def test_a_list_that_holds_itself_is_cut_off_in_filters():
    import chipfit.target_platform as tp

    loop: list = [1]
    loop.append(loop)
    said = repr(tp.LayerFilterParams(torch.nn.Conv2d, stride=loop))
    assert "..." in said and said.count("(1,") == 20


# ---------------------------------------------------------------- the command line


@pytest.fixture
def typed(monkeypatch, capsys):
    """What the command line answers to some words: exit status and standard error."""

    def answer(*words, raises=None):
        def fail():
            raise raises

        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["chipfit", *words])
        if raises is not None:
            monkeypatch.setattr(command_line, "app", fail)
        with pytest.raises(SystemExit) as e:
            command_line.main()
        return e.value.code, capsys.readouterr().err

    return answer


def test_a_bug_is_said_to_be_one_with_how_to_report_it(typed):
    status, err = typed("lint", "x", raises=ZeroDivisionError("nobody foresaw this"))
    assert status == 70 and "ZeroDivisionError: nobody foresaw this" in err and "Traceback" in err
    assert "bug of chipfit" in err and "report it" in err and "chipfit lint x" in err


@pytest.mark.parametrize(
    "raised, status, words",
    [
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 2, "not enough memory"),
        (DataError("No such thing", hint="look again"), 2, "look again"),
    ],
)
def test_what_ends_a_command_has_a_status_of_its_own_and_no_traceback(typed, raised, status, words):
    code, err = typed("lint", "x", raises=raised)
    assert code == status and words in err and "Traceback" not in err


@pytest.mark.parametrize(
    "command, option",
    [
        ("quantize", "--input-size"),
        ("quantize", "--seed"),
        ("verify", "--input-size"),
        ("train", "--epochs"),
        ("train", "--batch-size"),
        ("train", "--seed"),
    ],
)
def test_a_number_that_no_machine_counts_to_is_refused(typed, command, option):
    code, err = typed(command, ".", "--data", "d.npz", option, "9" * 20)
    assert code == 2 and f"'{option}': Input should be less than or equal to" in err


@pytest.mark.parametrize("words", [":y", "x:", "../x:y", "a.b.c:d", "json:dumps", "json:loads"])
def test_a_module_that_gives_no_model_is_refused(typed, words):
    code, err = typed("lint", words, "--input-shape", "1,3")
    assert code == 2 and "Traceback" not in err


def test_a_source_that_is_not_utf8_is_refused(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin_source.py").write_bytes("model = 'café'".encode("latin-1"))
    code, err = typed("lint", "latin_source:model", "--input-shape", "1,3")
    assert code == 2 and "cannot be imported" in err and "utf-8" in err


def test_a_reader_that_goes_away_ends_a_command_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "chipfit.cli", "platforms", "list"]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.returncode == 1 and done.stderr == b""


def test_ctrl_c_ends_a_command_with_130_and_no_traceback(tmp_path):
    (tmp_path / "slow.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    words = [sys.executable, "-m", "chipfit.cli", "platforms", "show", "slow:chip"]
    heard = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # what runs in the background ignores it, and so do its children
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, preexec_fn=heard)
    assert running.stdout.readline() == b"here\n"
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 130 and b"Traceback" not in err


# ---------------------------------------------------------------- saved results that were tampered with


def tampered(folder, name, change):
    """A saved result whose JSON was changed, with the check sums made right again."""
    import hashlib
    import json

    file, manifest = folder / name, json.loads((folder / "manifest.json").read_text())
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    content = file.read_bytes()
    manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("plan.json", lambda d: d["tensors"]["relu"]["grid"].update(qmax=256), "wider than its bits"),
        ("plan.json", lambda d: d["tensors"]["relu"]["grid"].update(qmin=255), "no codes"),
        ("plan.json", lambda d: d["tensors"]["relu"]["grid"].update(bits=65), "no codes"),
        ("plan.json", lambda d: d["tensors"]["relu"]["grid"].update(kind="log", table={"$tuple": [1, 0]}), "increase"),
        ("plan.json", lambda d: d["tensors"]["relu"]["grid"].update(scale_min=-1.0), "least scale"),
        ("plan.json", lambda d: d["tensors"]["relu"]["grid"].update(scale_min=1e-60), "least scale"),
        ("plan.json", lambda d: d["tensors"]["relu"]["grid"].update(zero="x"), "'zero.int' is malformed"),
    ],
)
def test_a_saved_result_whose_grid_cannot_be_is_refused(tmp_path, name, change, words):
    folder = tampered(fit(small(), [X]).save(tmp_path / "saved"), name, change)
    with pytest.raises(PlanError, match=words):
        chipfit.load(folder)
