"""Models and data as the command line names them: what is accepted, and what each mistake is told."""

import stat
import struct
import sys
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from chipfit import files
from chipfit.cli.inputs import example_of, load_data, load_model, parse_bits, parse_numbers
from chipfit.errors import CaptureError, ConfigError, DataError, PlanError
from chipfit.frameworks import load_model as load_model_proto
from tests.build import Trap

MINE = "tests.cli.mine"


# ---------------------------------------------------------------- models


def test_a_model_is_what_a_factory_returns_or_the_object_itself():
    assert isinstance(load_model(f"{MINE}:net"), nn.Sequential)
    assert isinstance(load_model(f"{MINE}:ready"), nn.Linear)


def test_weights_are_loaded_into_the_model_and_must_fit(tmp_path):
    file = tmp_path / "w.safetensors"
    save_file({"weight": torch.full((3, 2), 0.5), "bias": torch.zeros(3)}, file)
    assert torch.equal(load_model(f"{MINE}:ready", file).weight, torch.full((3, 2), 0.5))
    save_file({"weight": torch.zeros(3, 2)}, file)
    with pytest.raises(CaptureError, match="bias"):
        load_model(f"{MINE}:ready", file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("MINE:number", "must provide a Keras or ONNX or TensorFlow Lite or PyTorch model. Got: int"),
        ("MINE:absent", "AttributeError: module"),
        ("MINE:broken", r"ValueError: no such depth.*Where: .*mine\.py:\d+, in broken"),
        ("bad_syntax:net", "SyntaxError"),
        ("net.onnx", "does not exist"),
        ("net.weights", "must be a file or module:factory"),
        ("gone.pt2", "does not exist"),
        (f"{'a' * 5000}.pt2", "does not exist"),  # a name that no disk can have
        (f"{'a' * 5000}.keras", "does not exist"),
        ("a" * 5000, "must be a file or module:factory"),
        ("", "must be a file or module:factory"),
        ("garbage.pt2", "not a program that torch.export.save wrote"),
    ],
)
def test_a_model_that_is_none_is_refused(tmp_path, monkeypatch, text, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad_syntax.py").write_text("def net(:\n")
    (tmp_path / "garbage.pt2").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(CaptureError, match=words):
        load_model(text.replace("MINE", MINE))


def file_of(tmp_path, name):
    """Write a file of a kind that holds no model that can be loaded here."""
    path, net = tmp_path / name, nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    if name == "script.pt":
        torch.jit.save(torch.jit.trace(net, torch.ones(1, 2)), path)
    elif name == "module.pt":
        torch.save(net, path)
    elif name == "own.pth":
        torch.save({"model": Trap(), "epoch": 3}, path)
    elif name.startswith("weights"):
        content = {"state_dict": net.state_dict(), "epoch": 3} if "checkpoint" in name else net.state_dict()
        torch.save(content, path, _use_new_zipfile_serialization="old" not in name)
    elif name == "saved_model":
        path.mkdir()
        (path / "saved_model.pb").write_bytes(b"")
    else:
        start = {"lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "page": b"\n<!DOCTYPE html><html>"}
        path.write_bytes(start.get(path.stem, b""))
    return path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("script.pt", "is a TorchScript program.*Try: if you trust it.*net:build"),
        ("module.pt", r"is a pickled torch\.nn\.modules\.container\.Sequential.*torch\.export"),
        ("own.pth", r"is a pickled .*which could run any code"),
        ("weights.pth", "is a state dictionary.*load_state_dict.*weights_only=True"),
        ("weights_checkpoint.bin", "is a state dictionary"),
        ("weights_old.pt", "is a state dictionary"),
        ("w.safetensors", "is weights without a model.*--weights"),
        ("saved_model", "is a SavedModel of TensorFlow.*from_saved_model"),
        ("frozen.pb", "is a frozen graph of TensorFlow 1"),
        ("net.engine", "is a TensorRT engine"),
        ("bundle.task", r"is a bundle of MediaPipe.*unzip it"),
        ("net.ort", "is a model in ONNX Runtime's own format"),
        ("net.gguf", "is a language model of llama.cpp"),
        ("data.npz", "is arrays of numbers, not a model.*--data"),
        *[(f"lfs.{k}", "is a pointer of Git LFS.*git lfs pull") for k in ("onnx", "tflite", "pt2", "pt", "gguf")],
        *[(f"page.{k}", "is a web page.*download") for k in ("onnx", "tflite", "keras", "bin")],
        ("unknown.pt", "Model must be a file"),
    ],
)
def test_a_file_of_another_kind_is_named_with_what_makes_it_loadable(tmp_path, monkeypatch, name, words):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(CaptureError, match=words):
        load_model(str(file_of(tmp_path, name)))


def test_a_folder_of_transformers_is_a_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    size = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 20,
    }
    written = transformers.BertForSequenceClassification(transformers.BertConfig(**size)).eval()
    written.save_pretrained(tmp_path)
    ids = torch.arange(6).view(1, 6)
    torch.testing.assert_close(load_model(str(tmp_path))(ids)[0], written(ids)[0])
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    with pytest.raises(CaptureError, match="cannot be loaded"):
        load_model(str(tmp_path))


def test_timm_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(CaptureError, match="pip install timm"):
        load_model("timm:resnet18")


def test_a_pt2_file_knows_its_own_input(tmp_path):
    torch.export.save(torch.export.export(nn.Linear(2, 3).eval(), (torch.ones(4, 2),)), tmp_path / "m.pt2")
    (x,) = example_of(str(tmp_path / "m.pt2"), None)
    assert x.shape == (4, 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "positive integers") for text in ("", "1,x", "0,3", "1,-3", "1;3", "²", "1," + "9" * 5000)),
        *((text, "Not enough memory") for text in ("1,999999999999999", "1000000000,1000000000,1000000000")),
        (None, "--input-shape"),
    ],
)
def test_the_input_shape_of_a_factory_is_positive_integers_that_memory_holds(text, says):
    with pytest.raises(DataError, match=says):
        example_of("m:net", None if text is None else [text])


# ---------------------------------------------------------------- data


def test_an_npz_gives_batches_of_inputs_and_labels(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.zeros((20, 3)), y=np.arange(20, dtype=np.uint8))
    batches = load_data(str(tmp_path / "d.npz"))
    assert [(tuple(x.shape), y.dtype) for x, y in batches] == [((16, 3), torch.int64), ((4, 3), torch.int64)]
    assert batches[0][0].dtype is torch.float32  # NumPy's float64 was nobody's choice


def test_an_npz_gives_several_inputs_by_their_names(tmp_path):
    """In the order of the model, whatever the order in the file; a dict where one before the last is left out."""
    file, ids = tmp_path / "d.npz", np.arange(20)
    np.savez(file, mask=np.ones((20, 3), bool), ids=ids.reshape(20, 1), y=ids, note=np.zeros(2))
    (first, mask, y), _ = load_data(str(file), names=["ids", "mask"])
    assert first.shape == (16, 1) and mask.dtype is torch.bool and torch.equal(y, torch.arange(16))
    batch, _ = load_data(str(file), names=["ids", "positions", "mask"])
    assert [*batch] == ["ids", "mask"]
    np.savez(file, ids.reshape(20, 1), ids.reshape(20, 1) + 1)
    assert [int(b[0]) for b in load_data(str(file))[0]] == [0, 1]
    np.savez(file, data=ids, mask=ids)
    assert [*load_data(str(file), names=["ids", "mask"])[0]] == ["mask"]
    np.savez(file, ids=ids, mask=ids[:4])
    with pytest.raises(DataError, match=r"different numbers of samples.*mask \[4\].*module:iterable"):
        load_data(str(file), names=["ids", "mask"])
    with pytest.raises(DataError, match=r"no inputs.*ids int64\[20\].*named x.* or audio"):
        load_data(str(file), names=["audio"])


def test_an_npz_with_a_state_is_one_call_and_a_folder_of_them_is_several(tmp_path):
    """Silero's network takes a state [2, batch, 128] and the rate of samples as a scalar."""
    call = {"input": np.zeros((3, 576)), "state": np.zeros((2, 3, 128), "f4"), "sr": np.array(16000)}
    sizes = {"input": (None, None), "state": (2, None, 128), "sr": ()}
    for k in range(2):
        np.savez(tmp_path / f"{k}.npz", **{**call, "input": call["input"] + k})
    for place, count in (("0.npz", 1), ("", 2)):
        batches = load_data(str(tmp_path / place), names=[*call], sizes=sizes)
        assert [float(x.mean()) for x, *_ in batches] == [*range(count)]
        shapes = [[tuple(x.shape) for x in b] for b in batches]
        assert shapes == [[(3, 576), (2, 3, 128), ()]] * count and batches[0][2].dtype is torch.int64
    np.savez(tmp_path / "0.npz", **{**call, "state": call["state"][:1]})
    with pytest.raises(DataError, match=r"different numbers of samples.*state \[1, 3, 128\].*declares"):
        load_data(str(tmp_path / "0.npz"), names=[*call], sizes=sizes)


def test_an_axis_of_calls_in_front_of_the_declared_ones_holds_several_calls(tmp_path):
    """An input whose first axis holds no samples, as a state or a sequence, has no other place for several of them."""
    sizes = {"input": (1, 576), "state": (2, 1, 128), "sr": ()}
    arrays = {"input": np.ones((5, 576)) * np.arange(5)[:, None], "state": np.zeros((5, 2, 1, 128)), "sr": np.array(16)}
    np.savez(tmp_path / "calls.npz", **arrays)
    batches = load_data(str(tmp_path / "calls.npz"), names=[*sizes], sizes=sizes)
    assert [[tuple(x.shape) for x in b] for b in batches] == [[(1, 576), (2, 1, 128), ()]] * 5
    assert [float(b[0].mean()) for b in batches] == [0, 1, 2, 3, 4]
    np.savez(tmp_path / "calls.npz", **{**arrays, "input": np.ones((7, 576))})
    with pytest.raises(
        DataError, match=r"different numbers of calls.*input \[7, 576\].*5 calls.*axis of calls in front"
    ):
        load_data(str(tmp_path / "calls.npz"), names=[*sizes], sizes=sizes)
    np.save(tmp_path / "frames.npy", np.zeros((6, 5, 8)))
    np.savez(tmp_path / "one.npz", frames=np.zeros((6, 5, 8)), y=np.arange(30))
    assert [len(x) for x in load_data(str(tmp_path / "frames.npy"), sizes={"frames": (5, 8)})] == [5] * 6
    one = load_data(str(tmp_path / "one.npz"), names=["frames"], sizes={"frames": (5, 8)})
    assert [(tuple(x.shape), len(y)) for x, y in one] == [((5, 8), 5)] * 6


def test_batches_have_the_size_that_the_model_declares(tmp_path):
    np.savez(tmp_path / "d.npz", a=np.zeros((40, 3)), b=np.zeros((40, 2)), y=np.arange(40))
    sizes = {"a": (20, 3), "b": (20, 2)}
    batches = load_data(str(tmp_path / "d.npz"), names=["a", "b"], sizes=sizes)
    assert [[len(x) for x in b] for b in batches] == [[20] * 3] * 2
    np.save(tmp_path / "wave.npy", np.zeros(5360, "f4"))
    assert [len(x) for x in load_data(str(tmp_path / "wave.npy"), sizes={"wave": (5360,)})] == [5360]
    assert len(load_data(str(tmp_path / "wave.npy"), sizes={"wave": (1,)})[0]) == 16


def test_the_only_array_is_the_only_input_whatever_its_name(tmp_path):
    """A tensor `serving_default_x:0` of a file is called x by its signature."""
    np.savez(tmp_path / "d.npz", **{"serving_default_x:0": np.zeros((20, 3)), "y": np.arange(20)})
    assert [len(x) for x, _ in load_data(str(tmp_path / "d.npz"), names=["features"])] == [16, 4]
    with pytest.raises(DataError, match="has no inputs"):
        load_data(str(tmp_path / "d.npz"), names=["ids", "mask"])
    for signature in ("serving_default", "add"):
        np.savez(tmp_path / "d.npz", **{f"{signature}_{k}:0": np.full((20, 3), k == "b") for k in "ba"})
        assert [x.any() for x in load_data(str(tmp_path / "d.npz"), names=["a", "b"])[0]] == [False, True]
    with pytest.raises(DataError, match="has no inputs"):
        load_data(str(tmp_path / "d.npz"), names=["features"])
    np.savez(tmp_path / "d.npz", **{"b": np.ones((20, 3)), "a;a/Conv2D": np.zeros((20, 3))})  # tensors that it fused
    assert [x.any() for x in load_data(str(tmp_path / "d.npz"), names=["a", "b"])[0]] == [False, True]


def test_an_npy_gives_batches_of_one_input(tmp_path):
    np.save(tmp_path / "d.npy", np.zeros((20, 3)))
    assert [x.shape[0] for x in load_data(str(tmp_path / "d.npy"))] == [16, 4]
    np.save(tmp_path / "d.npy", np.array(["a"]))
    with pytest.raises(DataError, match="has no inputs"):
        load_data(str(tmp_path / "d.npy"))


def test_a_folder_of_npy_files_has_one_sample_or_one_batch_in_each(tmp_path):
    for k in range(20):
        np.save(tmp_path / f"{k:02}.npy", np.full((49, 10), k, "f4"))
    batches = load_data(str(tmp_path), sizes={"x": (None, 49, 10)})
    assert [x.shape[0] for x in batches] == [16, 4] and batches[1][:, 0, 0].tolist() == [16, 17, 18, 19]
    assert [x.shape[0] for x in load_data(str(tmp_path / "03.npy"), sizes={"x": (1, 49, 10)})] == [1]
    assert len(load_data(str(tmp_path))[0][0]) == 10  # without declared sizes, axis 0 is the batch
    np.save(tmp_path / "20.npy", np.zeros((3, 52, 10), "f4"))
    assert [x.shape[0] for x in load_data(str(tmp_path), sizes={"x": (None, None, 10)})] == [1] * 20 + [3]


def test_shapes_of_several_inputs_are_given_by_name_in_the_types_of_the_model():
    from tests.onnx_models import onnx_node, onnx_of

    nodes, inputs = (onnx_node("f = Cast(ids)", to=1), "y = Add(f, x)"), {"ids": None, "x": ["n", "t"]}
    network = load_model_proto(onnx_of(*nodes, inputs=inputs, types={"ids": 7}))
    found = example_of("net.onnx", ["x=2,3", "ids=2,3"], network)
    assert [(v.dtype, *v.shape) for v in found.values()] == [(torch.float32, 2, 3), (torch.int64, 2, 3)]
    assert [*found] == ["x", "ids"]
    with pytest.raises(DataError, match="Try: --input-shape ids=1,12 --input-shape x=1,16"):
        example_of("net.onnx", None, network)
    with pytest.raises(DataError, match="names no input.*Allowed: ids, x"):
        example_of("net.onnx", ["z=2,3"], network)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"z": np.zeros(3)}, r"Got: z float64\[3\].*named x"),
        ({"x": np.array(3.0)}, r"x float64\[\]"),
        ({"x": np.array(["a"])}, "array of numbers"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(3, int)}, r"Got: int64\[3\]. Allowed: 4 integers"),
    ],
)
def test_an_npz_that_holds_no_inputs_is_refused(tmp_path, arrays, words):
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(DataError, match=words):
        load_data(str(tmp_path / "d.npz"))


def test_truncated_and_pickled_arrays_are_refused(tmp_path, trap):
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 2)))
    np.savez(tmp_path / "pickled.npz", x=np.array([Trap()], dtype=object))
    whole = (tmp_path / "d.npz").read_bytes()
    for content in (b"", whole[:3], whole[:100], (tmp_path / "pickled.npz").read_bytes()):
        (tmp_path / "x.npz").write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            load_data(str(tmp_path / "x.npz"))
    assert not trap.exists()


def test_images_are_scaled_to_0_1_and_normalised(tmp_path):
    from PIL import Image

    Image.new("RGB", (6, 4), (255, 0, 51)).save(tmp_path / "a.png")
    (batch,) = load_data(str(tmp_path), 2, mean="0.5", std="0.5,0.5,0.1")
    assert batch.shape == (1, 3, 2, 2)
    assert batch[0, :, 0, 0].tolist() == pytest.approx([1.0, -1.0, -3.0], abs=1e-6)  # (51/255 - 0.5) / 0.1 = -3


def test_folders_without_readable_images_and_unknown_words_are_refused(tmp_path):
    with pytest.raises(DataError, match="holds no images"):
        load_data(str(tmp_path))
    with pytest.raises(DataError, match="must be a file"):
        load_data("images")
    (tmp_path / "a.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(DataError, match=r"a\.png"):
        load_data(str(tmp_path))


@pytest.mark.parametrize(("text", "what"), [("a", "mean"), ("1,2", "mean"), ("nan", "mean"), ("0", "std"), ("", "std")])
def test_mean_and_std_are_numbers(text, what):
    with pytest.raises(DataError, match=f"--{what}"):
        parse_numbers(text, what)


def test_an_iterable_can_be_read_twice_even_when_it_is_a_generator():
    data = load_data(f"{MINE}:once")
    assert (len(list(data)), len(list(data))) == (3, 3)


@pytest.mark.parametrize("text", ["a", "a=", "=4", "a=four", "a=-4", "a=0", "a=" + "9" * 5000])
def test_bits_are_layer_and_number(text):
    with pytest.raises(PlanError, match="LAYER=BITS"):
        parse_bits([text])


def test_a_whole_disk_is_no_folder_of_images(tmp_path, monkeypatch):
    monkeypatch.setattr("chipfit.cli.inputs._MOST_FILES", 5)
    for k in range(2):
        (tmp_path / str(k)).mkdir()
        for name in ("a.txt", "b.txt"):
            (tmp_path / str(k) / name).touch()
    with pytest.raises(DataError, match="too many files.*at most 5 files"):
        load_data(str(tmp_path))


# ---------------------------------------------------------------- files that attack

ARCHIVES = {
    "a path outside": lambda z: z.writestr("../../evil", "x"),
    "an absolute path": lambda z: z.writestr("/etc/evil", "x"),
    "a drive": lambda z: z.writestr("C:\\evil", "x"),
    "a name twice": lambda z: [z.writestr("model/a", "x"), z.writestr("model/a", "y")],
    "a link": lambda z: z.writestr(link("model/a"), "/etc/passwd"),
    "a bomb": lambda z: z.writestr("model/a", b"0" * (1 << 20), compress_type=zipfile.ZIP_DEFLATED),
}


def link(name):
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("suffix", ["pt2", "keras"])
@pytest.mark.parametrize("write", ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_holds_plain_files_inside_it(tmp_path, monkeypatch, suffix, write):
    pytest.importorskip({"pt2": "torch"}.get(suffix, suffix))
    monkeypatch.setattr(files, "LARGE", 1 << 16)  # so that the bomb is a small one
    path = tmp_path / f"model.{suffix}"
    with zipfile.ZipFile(path, "w") as z:
        write(z)
    with pytest.raises(CaptureError, match=r"holds links, paths outside or a name twice|its content would take"):
        load_model(str(path))


@pytest.mark.parametrize("suffix, inside", [("pt2", "model.json"), ("keras", "config.json")])
def test_an_archive_that_ends_before_it_says_is_refused_by_name(tmp_path, suffix, inside):
    pytest.importorskip({"pt2": "torch"}.get(suffix, suffix))
    path = tmp_path / f"model.{suffix}"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("archive/byteorder" if suffix == "pt2" else inside, "{}")
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"PK\1\2") + 20  # its sizes, packed and not, in the directory
    raw[at : at + 8] = struct.pack("<II", 10_000, 10_000)
    path.write_bytes(raw)
    with pytest.raises((EOFError, zipfile.BadZipFile)), zipfile.ZipFile(path) as z:  # the second since Python 3.12
        z.read(z.namelist()[0])
    with pytest.raises(CaptureError):
        load_model(str(path))


@pytest.mark.parametrize(
    ("text", "device", "words"),
    [
        ("no.such:factory", "cuda:999", "no device 'cuda:999' here"),  # before the model is loaded
        ("tests.cli.mine:net", "gpu", "no device 'gpu' here"),
        ("net.keras", "cuda", "placed by Keras itself.*KERAS_TORCH_DEVICE"),
        ("tests.bench.test_keras_experiments:net", "cpu", "placed by Keras itself"),
    ],
)
def test_a_device_that_is_absent_or_the_choice_of_keras_is_refused(text, device, words):
    with pytest.raises(ConfigError, match=words):
        load_model(text, None, device)
