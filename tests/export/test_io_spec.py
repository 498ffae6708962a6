"""What files take and give: codes, labels, normalisation, and arrays of C."""

import io
import json
import re
import shutil
import subprocess
import zipfile

import flatbuffers
import numpy as np
import onnx
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from torch import nn
from typer.testing import CliRunner

import chipfit
from chipfit.cli.app import app
from chipfit.errors import ChipfitError, ConfigError, RuntimeUnavailable, UnsupportedError
from chipfit.export.io_spec import QuantizedIO, io_spec_of, io_types
from chipfit.export.tflite.arena import tensor_memory
from chipfit.graph.ir import Graph, Value
from chipfit.registry import entries
from tests.build import images, model_of, plan_of, quantized, stored
from tests.exactness.tamper import opened

UNSEEN = images(4, seed=2)
SUFFIX = {"ort_cpu": ".onnx", "tflite_int8": ".tflite", "tflite_int16x8": ".tflite"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scope, self.body = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.scope(x))
        x = torch.relu(self.body(x)) + x
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def results():
    torch.manual_seed(0)
    net, given = Net(), {"ort_cpu": {"settings": chipfit.Settings(results="codes")}}
    return {p: quantized(net, [images(4, seed=0), images(4, seed=1)], p, **given.get(p, {})) for p in SUFFIX}


WAYS = [("ort_cpu", way) for way in ("uint8", "int8", ("int8", "float"), ("float", "int8"))]
WAYS += [("tflite_int8", way) for way in ("uint8", "int8", ("uint8", "float"), ("float", "uint8"))]
WAYS += [("tflite_int16x8", "int16")]


@pytest.mark.parametrize("platform, way", WAYS)
def test_a_file_of_codes_computes_what_the_file_of_floats_does(results, tmp_path, platform, way):
    result = results[platform]
    check = result.verify([UNSEEN], path=result.export(tmp_path / f"codes{SUFFIX[platform]}", io=way))
    plain = result.verify([UNSEEN])
    assert check.exact and not check.departures and check.output_gap == 0.0
    assert [r.elements for r in check.rows] == [r.elements for r in plain.rows]


@pytest.mark.parametrize("platform, suffix", [("ort_cpu", ".onnx"), ("tflite_int8", ".tflite"), ("tflite_int8", ".h")])
def test_neither_files_nor_reports_reveal_which_samples_were_used(results, tmp_path, platform, suffix):
    result = results[platform]
    digests = result.plan.provenance["samples"]
    content = result.export(tmp_path / f"net{suffix}").read_bytes()
    if suffix == ".h":
        content = bytes(int(b, 16) for b in re.findall(rb"0x([0-9a-f]{2}),", content))
    assert len(digests) == 8 and result.plan.provenance["data_sha256"].encode() in content
    assert not [d for d in digests if d.encode() in content or d in str(result.report.to_dict())]
    assert result.verify([images(4, seed=0)]).calibrated == 4  # the plan still knows them


def fed(path, given):
    """What LiteRT itself makes of codes."""
    interpreter = Interpreter(model_path=str(path))
    entry = interpreter.get_input_details()[0]
    interpreter.resize_tensor_input(entry["index"], given.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(entry["index"], given)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"]), interpreter


def test_a_file_takes_the_codes_that_its_tensor_says(results, tmp_path):
    """QuantizedIO worked out here, and a runtime that is not asked through chipfit: uint8 are int8 and 128."""
    result = results["tflite_int8"]
    x, y = result.plan["x"], result.plan[result.graph.outputs[0]]
    q = np.clip(np.rint(UNSEEN.numpy() / x.scale.item()) + x.zero_point.item(), -128, 127).astype(np.int8)
    q = np.ascontiguousarray(q.transpose(0, 2, 3, 1))
    small, of_small = fed(result.export(tmp_path / "s.tflite", io="int8"), q)
    whole, of_whole = fed(result.export(tmp_path / "w.tflite", io="uint8"), (q.astype(np.int16) + 128).astype(np.uint8))
    assert small.dtype == np.int8 and whole.dtype == np.uint8
    assert np.array_equal(small.astype(int) + 128, whole.astype(int))
    for interpreter, shift in ((of_small, 0), (of_whole, 128)):
        for detail, held in ((interpreter.get_input_details()[0], x), (interpreter.get_output_details()[0], y)):
            assert detail["quantization"] == (held.scale.item(), held.zero_point.item() + shift)


def test_an_onnx_file_takes_codes_and_says_their_numbers(results, tmp_path):
    import onnxruntime

    result = results["ort_cpu"]
    session = onnxruntime.InferenceSession(str(result.export(tmp_path / "codes.onnx", io="uint8")))
    said = json.loads(session.get_modelmeta().custom_metadata_map["chipfit.io"])
    x, y = result.plan["x"], result.plan[result.graph.outputs[0]]
    assert said["inputs"]["x"]["scale"] == x.scale.item()
    assert said["outputs"]["output"]["zero_point"] == int(y.zero_point)
    q = np.clip(np.rint(UNSEEN.numpy() / x.scale.item()) + x.zero_point.item(), 0, 255).astype(np.uint8)
    (got,) = session.run(None, {"x": q})
    plain = onnxruntime.InferenceSession(str(result.export(tmp_path / "floats.onnx")))
    (floats,) = plain.run(None, {"x": UNSEEN.numpy()})
    assert got.dtype == np.uint8
    assert np.array_equal((got.astype(np.float32) - int(y.zero_point)) * np.float32(y.scale.item()), floats)


def change_notes(path, change):
    model = onnx.load(path)
    entry = next(p for p in model.metadata_props if p.key == "chipfit.io")
    entry.value = change(json.loads(entry.value))
    onnx.save(model, path)


@pytest.mark.parametrize("suffix", [".onnx", ".tflite"])
def test_a_file_that_says_other_numbers_departs(results, tmp_path, suffix):
    """The control: the first input's zero point is one off, as a careless editor leaves it."""
    result = results["ort_cpu" if suffix == ".onnx" else "tflite_int8"]
    path = result.export(tmp_path / f"codes{suffix}", io="int8")
    if suffix == ".onnx":

        def one_off(said):
            said["inputs"]["x"]["zero_point"] += 1
            return json.dumps(said)

        change_notes(path, one_off)
    else:
        spoilt = opened(path)
        spoilt.zero("x")
        spoilt.save()
    assert not result.verify([UNSEEN], path=path).exact


@pytest.mark.parametrize("notes", ["[]", '{"inputs": {"x": {}}}', '{"inputs": {"other": %s}}', '{"others": {}}'])
def test_malformed_notes_are_refused(results, tmp_path, notes):
    path = results["ort_cpu"].export(tmp_path / "codes.onnx", io="int8")
    change_notes(path, lambda said: notes.replace("%s", json.dumps(said["inputs"]["x"])))
    with pytest.raises(RuntimeUnavailable, match="notes in the file"):
        results["ort_cpu"].verify([UNSEEN], path=path)


VALUES = {"io": "int8", "labels": [*"abcde"], "mean": 0.5, "std": 0.25, "opset": 17, "batch": 2, "keep_layout": True}
BY_SUFFIX = [e.declares for e in entries("format").values() if not e.declares.named]
OPTIONS = [(s, o) for declared in BY_SUFFIX for s in declared.suffixes for o in declared.options]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("suffix, option", OPTIONS)
def test_every_option_of_a_format_changes_the_file_and_equal_ones_make_equal_files(results, tmp_path, suffix, option):
    result = results["ort_cpu" if suffix == ".onnx" else "tflite_int8"]
    plain = {} if suffix == ".pte" else {"mean": 1.0, "std": 1.0}
    made = [plain, plain, plain | {option: VALUES[option]}]
    one, again, other = (result.export(tmp_path / f"m{suffix}", **how).read_bytes() for how in made)
    assert one == again != other


# ---------------------------------------------------------------- labels and normalisation


def test_labels_and_normalisation_are_read_by_the_schema_of_tensorflow_lite(results, tmp_path):
    """Offsets followed by hand along the public schema (M001); labels in an archive that any tool opens."""
    names = ["cat", "dog", "fox", "owl", "Füchsin"]
    path = results["tflite_int8"].export(tmp_path / "m.tflite", labels=names, mean=[1, 2, 3.5], std=[4, 5, 6.5])
    raw = path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        assert archive.read("labels.txt").decode().splitlines() == names
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(raw, 0))
    (found,) = (m for m in model.metadata if m.name == b"TFLITE_METADATA")
    content = bytes(model.buffers[found.buffer].data)
    assert content[4:8] == b"M001"
    root = Table(content)
    (graph,) = root.tables(3)
    (x,), (y,) = graph.tables(2), graph.tables(3)
    (unit,) = x.tables(4)
    assert x.text(0) == "x" and y.text(0) == "output"
    assert x.table(3).byte(0) == 2 and x.table(3).table(1).byte(0) == 1  # ImageProperties, RGB
    assert unit.byte(0) == 1  # NormalizationOptions
    assert unit.table(1).floats(0) == [1, 2, 3.5] and unit.table(1).floats(1) == [4, 5, 6.5]
    (file,) = y.tables(6)
    assert file.text(0) == "labels.txt" and file.byte(2) == 2  # TENSOR_AXIS_LABELS
    assert results["tflite_int8"].verify([UNSEEN], path=path).exact


class Table(flatbuffers.table.Table):
    """A table in the bytes of a flatbuffer; without a position, the root."""

    def __init__(self, raw: bytes, at: int | None = None) -> None:
        super().__init__(raw, int.from_bytes(raw[:4], "little") if at is None else at)

    def has(self, field: int) -> bool:
        return self.Offset(4 + 2 * field) > 0

    def place(self, field: int) -> int:
        return self.Pos + self.Offset(4 + 2 * field)

    def byte(self, field: int) -> int:
        return self.Bytes[self.place(field)]

    def table(self, field: int) -> "Table":
        return Table(self.Bytes, self.Indirect(self.place(field)))

    def text(self, field: int) -> str:
        return self.String(self.place(field)).decode()

    def tables(self, field: int) -> list["Table"]:
        start, count = self.Vector(self.Offset(4 + 2 * field)), self.VectorLen(self.Offset(4 + 2 * field))
        return [Table(self.Bytes, self.Indirect(start + 4 * k)) for k in range(count)]

    def floats(self, field: int) -> list[float]:
        return self.GetVectorAsNumpy(flatbuffers.number_types.Float32Flags, self.Offset(4 + 2 * field)).tolist()


def test_onnx_files_hold_labels_as_json(results, tmp_path):
    model = onnx.load(results["ort_cpu"].export(tmp_path / "m.onnx", labels=list("abcde"), mean=0.5, std=0.25))
    notes = {p.key: p.value for p in model.metadata_props}
    assert json.loads(notes["chipfit.labels"]) == list("abcde")
    assert json.loads(notes["chipfit.mean"]) == [0.5] and json.loads(notes["chipfit.std"]) == [0.25]


# ---------------------------------------------------------------- an array of C


def test_the_array_of_c_holds_the_file(results, tmp_path):
    result = results["tflite_int8"]
    file, page = (result.export(tmp_path / f"my net{s}", io="int8", batch=1) for s in (".tflite", ".h"))
    text = page.read_text()
    body = text[text.index("{") : text.index("}")]
    assert bytes(int(b, 16) for b in re.findall(r"0x(..)", body)) == file.read_bytes()
    assert f"my_net_len = {len(file.read_bytes())};" in text and "#define MY_NET_TENSOR_ARENA" in text
    if compiler := shutil.which("cc"):
        source, main = tmp_path / "main.c", tmp_path / "main"
        source.write_text(
            f"#include \"{page.name}\"\nint main(void) {{ return my_net[4] != 'T' || my_net_len < 9; }}\n"
        )
        subprocess.run([compiler, "-std=c11", "-Wall", "-Werror", source, "-o", main], check=True)
        subprocess.run([main], check=True)


def branches(m, x):
    """Without sums and reshapes, whose results LiteRT writes over an operand, as microcontrollers do not."""
    x = torch.relu(m.a(x))
    return m.c(torch.cat([torch.relu(m.b(x)), nn.functional.max_pool2d(x, 3, 1, 1)], 1))


def test_litert_itself_takes_as_much(tmp_path):
    """From the addresses that its own planner gave to the same tensors; it aligns to 64 bytes, and keeps inputs."""
    torch.manual_seed(0)
    net = model_of(branches, a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(8, 8, 3, padding=1), c=nn.Conv2d(16, 2, 3))
    content = (
        quantized(net, images(4, seed=0), "tflite_int8").export(tmp_path / "m.tflite", io="int8", batch=1).read_bytes()
    )
    interpreter = Interpreter(model_content=content, experimental_op_resolver_type=OpResolverType.BUILTIN_REF)
    interpreter.allocate_tensors()
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
    computed = [k for k, t in enumerate(model.subgraphs[0].tensors) if model.buffers[t.buffer].data is None]
    arrays = [interpreter.tensor(k)() for k in computed]
    begins = [a.__array_interface__["data"][0] for a in arrays]
    taken = max(at + a.nbytes for at, a in zip(begins, arrays)) - min(begins)
    assert tensor_memory(content, 64) <= taken <= tensor_memory(content, 64) + arrays[0].nbytes


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "platform, options, error, words",
    [
        ("ort_cpu", {"io": "int9"}, ConfigError, "int9.*float, int8, uint8"),
        ("ort_cpu", {"io": "int16"}, UnsupportedError, "quantized to 8 bits.*Allowed: int8, uint8"),
        ("tflite_int8", {"labels": ["a"]}, ConfigError, "Got: 1. Allowed: 5"),
        ("tflite_int8", {"mean": 0, "std": 0}, ConfigError, "option 'std' is not allowed"),
        ("tflite_int8", {"opset": 17}, ConfigError, "has no option.*Allowed: "),
        ("ort_cpu", {"batch": 1}, ConfigError, "has no option.*Allowed: "),
        ("tflite_int8", {"batch": 0}, ConfigError, "'batch' must be a positive integer. Got: 0"),
        ("tflite_int16x8", {"io": "uint16"}, UnsupportedError, "this integer type. Got: io: uint16. Allowed: int8"),
    ],
)
def test_wrong_options_are_refused_and_nothing_is_written(results, tmp_path, platform, options, error, words):
    with pytest.raises(error, match=words):
        results[platform].export(tmp_path / f"m{SUFFIX[platform]}", **options)
    assert not list(tmp_path.iterdir())


def test_what_a_file_computes_in_float_does_not_come_out_in_codes(tmp_path):
    torch.manual_seed(0)
    result = quantized(Net(), images(4, seed=0), overrides={"head": "float"})
    with pytest.raises(UnsupportedError, match=r"not quantized with one scale.*io=\(\.\.\., \"float\"\)"):
        result.export(tmp_path / "m.onnx", io="uint8")
    assert result.verify([UNSEEN], path=result.export(tmp_path / "m.onnx", io=("uint8", "float"))).exact


def test_the_command_line_delivers_such_files(tmp_path):
    np.savez(tmp_path / "x.npz", x=images(4, seed=0).numpy())
    (tmp_path / "labels.txt").write_text("a\nb\nc\nd\ne\n")
    command = ["quantize", "tests.export.test_io_spec:Net", "--data", str(tmp_path / "x.npz"), "-p", "tflite_int8"]
    labels = ["--io", "uint8,int8", "--labels", str(tmp_path / "labels.txt")]
    done = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "out"), *labels])
    assert done.exit_code == 0, done.output
    interpreter = Interpreter(model_path=str(tmp_path / "out" / "model.tflite"))
    ends = interpreter.get_input_details()[0], interpreter.get_output_details()[0]
    assert [d["dtype"] for d in ends] == [np.uint8, np.int8]
    done = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "c"), "--format", "h", "--io", "int8"])
    assert done.exit_code == 0 and (tmp_path / "c" / "model.h").exists(), done.output
    done = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "no"), "--io", "int7"])
    assert isinstance(done.exception, ChipfitError) and "int7" in str(done.exception)
    assert not (tmp_path / "no").exists()


# ---------------------------------------------------------------- numbers of what goes in and comes out


def small(x=(None, 3, 4), y=(None, 5), plan=None, edges=()):
    """Two values, stored as `plan` says."""
    values = {"x": Value("x", x), "y": Value("y", y), "ids": Value("ids", (None, 2), "int64")}
    return Graph([], ["x", "ids"], ["y"], values, {}), plan_of(**(plan or {}), float_edges=edges)


@pytest.mark.parametrize(
    "kind, bits, signed, zero, want",
    [
        ("int8", 8, True, 3, (3, True)),
        ("uint8", 8, True, 3, (131, False)),
        ("int8", 8, False, 131, (3, False)),
        ("uint8", 8, False, 131, (131, True)),
        ("uint8", 8, True, -128, (0, False)),
        ("int8", 5, True, 3, (3, True)),
        ("int16", 16, True, -7, (-7, True)),
        ("uint16", 16, True, -7, (32761, False)),
        ("int16", 16, False, 32761, (-7, False)),
        ("int16", 12, True, 5, (5, True)),
    ],
)
def test_codes_of_the_other_sign_are_shifted_by_half_of_the_types_range(kind, bits, signed, zero, want):
    graph, plan = small(plan={"x": stored(bits=bits, signed=signed, zero=zero)})
    ends = io_spec_of(graph, plan, io=(kind, "float"))
    assert ends.inputs == {"x": QuantizedIO(kind, 0.5, *want)} and ends.outputs == {} and ends.notes == {}


@pytest.mark.parametrize(
    "io", ["int4", "", None, 8, (), ("int8",), ("int8",) * 3, ("int8", 8), ("int8", None), {"int8"}]
)
def test_a_type_that_does_not_exist_is_refused(io):
    with pytest.raises(ConfigError, match="Allowed: float, int8, uint8, int16, uint16, or two of them"):
        io_types(io)
    assert io_types("int8") == ("int8", "int8") and io_types(["float", "uint16"]) == ("float", "uint16")


@pytest.mark.parametrize(
    "plan, io, words",
    [
        ({}, "int8", "'x' is not quantized with one scale. Got: io: int8"),
        ({"x": stored(scale=[0.5, 1.0, 2.0], axis=1)}, "int8", "'x' is not quantized with one scale"),
        ({"x": stored(bits=16)}, "uint8", "quantized to 16 bits.*Allowed: int16, uint16"),
        ({"x": stored(bits=4)}, "int8", "quantized to 4 bits.*Allowed: float"),
        ({"x": stored(bits=8)}, "uint16", "quantized to 8 bits.*Allowed: int8, uint8"),
    ],
)
def test_values_that_are_not_stored_so_are_refused(plan, io, words):
    with pytest.raises(UnsupportedError, match=words):
        io_spec_of(*small(plan=plan), io=(io, "float"))


def test_a_value_that_is_read_before_it_is_rounded_is_no_input_of_codes():
    """Up to four readers are named; an output may be read so."""
    edges = {("x", k) for k in "fedcba"} | {("y", "z")}
    with pytest.raises(UnsupportedError, match="'x' is read in float, by a, b, c, d. Got: io: int8"):
        io_spec_of(*small(plan={"x": stored()}, edges=edges), io=("int8", "float"))
    assert io_spec_of(*small(plan={"y": stored()}, edges=edges), io=("float", "int8")).outputs


def test_a_constant_is_no_output_of_codes():
    graph, plan = small(plan={"w": stored()})
    graph.weights["w"], graph.outputs = torch.ones(2), ["w"]
    with pytest.raises(UnsupportedError, match="'w' is not quantized"):
        io_spec_of(graph, plan, io=("float", "int8"))


@pytest.mark.parametrize(
    "y, names, wrong",
    [
        ((None, 5), 5, None),
        ((None, 5), 4, "Got: 4. Allowed: 5"),
        ((None, 7, 5), 7, None),
        ((None, 7, 5), 6, "Got: 6. Allowed: 5 or 7"),
        ((6, 5), 6, "Got: 6. Allowed: 5"),
        ((None, None), 9, None),
        ((None,), 9, None),
    ],
)
def test_there_is_a_label_for_each_class_along_an_axis(y, names, wrong):
    labels = tuple(f"n{k}" for k in range(names))
    if wrong:
        with pytest.raises(ConfigError, match=f"Labels do not fit the first output. {wrong}"):
            io_spec_of(*small(y=y), labels=labels)
    else:
        assert io_spec_of(*small(y=y), labels=labels).notes == {"labels": list(labels)}


@pytest.mark.parametrize("labels", [["a", ""], ["a", "b\nc"], ["a", 2], {"a": 1}, "ab"])
def test_labels_are_lines_of_text(labels):
    with pytest.raises(ConfigError, match="Labels must be a list of lines of text"):
        io_spec_of(*small(y=(None, None)), labels=labels)


@pytest.mark.parametrize(
    "mean, std, want",
    [
        (0, 1, ([0.0], [1.0])),
        (-3.5, 1e-9, ([-3.5], [1e-9])),
        ([1, -2, 3], (4, 5, 6), ([1.0, -2.0, 3.0], [4.0, 5.0, 6.0])),
        ([1] * 4, [2] * 4, ([1.0] * 4, [2.0] * 4)),
    ],
)
def test_means_are_any_numbers_and_deviations_are_above_0(mean, std, want):
    assert io_spec_of(*small(), mean=mean, std=std).notes == {"mean": want[0], "std": want[1]}


@pytest.mark.parametrize(
    "mean, std, words",
    [
        ([], [], "option 'mean' is not allowed. Got: ... Allowed: finite numbers"),
        (object(), 1, "option 'mean' is not allowed"),
        (10**400, 1, "option 'mean' is not allowed"),
        (1, 0, "option 'std' is not allowed. Got: 0. Allowed: finite numbers above 0"),
        (1, -1.0, "option 'std' is not allowed"),
        ([1, float("nan")], 1, "option 'mean' is not allowed"),
        (1, "2", "option 'std' is not allowed"),
        (None, 1, "go together. Got: mean None, std 1"),
        (1, None, "go together"),
        ([1, 2, 3], 1, "go together"),
        ([1, 2], [1, 2], "do not fit the first input. Got: 2 numbers. Allowed: 1 or .3, 4."),
        ([1] * 5, [2] * 5, "do not fit the first input. Got: 5 numbers"),
    ],
)
def test_means_and_deviations_that_fit_nothing_are_refused(mean, std, words):
    with pytest.raises(ConfigError, match=words):
        io_spec_of(*small(), mean=mean, std=std)
