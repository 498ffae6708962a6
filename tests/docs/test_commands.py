"""Every command of chipfit on a page runs, on files with the names that the page uses; no other block escapes."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import chipfit
from chipfit.bench.config import load
from chipfit.cli.app import app, main
from tests.docs.pages import PAGES, ROOT, blocks, name, shell_lines
from tests.frameworks.tflite.test_read import float_file

AUTO = torch.export.Dim.DYNAMIC
NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.features = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(8, 4)

    def forward(self, x):
        return self.classifier(self.features(self.conv1(x).relu()).flatten(1))

class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])

def build():
    torch.manual_seed(0)
    return Net().eval()

def spotter():
    torch.manual_seed(0)
    return Spotter().eval()

def batches():
    yield from [(torch.randn(4, 3, 16, 16), torch.randint(4, (4,))) for _ in range(2)]

def loop(model, data):
    model.train()
    for epoch in range(2):
        for x, y in data:
            nn.functional.cross_entropy(model(x), y).backward()
    model.eval()
"""
CHIPS = """
from chipfit.target_platform import get_target_platform_capabilities

twin = get_target_platform_capabilities("pytorch", "tflite")
"""
#: commands that need hours, a cluster, a host, or runs of other commands -> tests that run them
ELSEWHERE = {"bench": "tests/bench", "demo": "tests/cli"}
#: what a page shows at full size, and the tests at a small one
SMALLER = {"generated:128 --input-size 224": "generated:4 --input-size 16", "1,3,224,224": "1,3,32,32"}
RUN = [(page, line) for page, line in shell_lines() if re.match(rf"chipfit (?!({'|'.join(ELSEWHERE)})\b)", line)]


#: pages whose models take images with channels last
CHANNELS_LAST = {"docs/from-tflite.md", "docs/keras.md"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with models and data under the names that the pages use."""
    import keras  # noqa: TID251 -- a page quantizes a file of Keras
    from PIL import Image

    folder = tmp_path_factory.mktemp("files")
    (folder / "nets.py").write_text(NETS)
    (folder / "mychips.py").write_text(CHIPS)
    namespace: dict = {}
    exec(NETS, namespace)
    net, draw = namespace["build"](), np.random.default_rng(0)
    images = draw.normal(size=(24, 3, 16, 16)).astype("float32")
    np.savez(folder / "sequences.npz", x=draw.normal(size=(8, 12, 8)).astype("float32"))
    write_data(folder, images)
    for kind in ("images", "samples"):
        (folder / kind).mkdir()
    for k in range(4):
        np.save(folder / f"samples/{k}.npy", images[k])
        Image.fromarray(draw.integers(0, 255, (16, 16, 3)).astype("uint8")).save(folder / f"images/{k}.png")
    save_file(net.state_dict(), folder / "net.safetensors")
    for file, side in (("net.pt2", 224), ("model.pt2", 16)):
        program = torch.export.export(net, (torch.zeros(2, 3, side, side),), dynamic_shapes=({0: AUTO},))
        torch.export.save(program, folder / file)
    options = {"dynamo": True, "external_data": False, "verbose": False}
    torch.onnx.export(  # noqa: TID251 -- a page quantizes a file of PyTorch
        net, (torch.from_numpy(images[:2]),), folder / "net.onnx", **options
    )
    made = {"model_int8.onnx": "ort_cpu", "tool.onnx": "ort_cpu", "other.tflite": "tflite_int8"}
    for file, platform in made.items():
        chipfit.quantize(net, images, platform=platform, progress=False).export(folder / file)
    layers = [keras.Input((16, 16, 3)), keras.layers.Conv2D(4, 3), keras.layers.GlobalAveragePooling2D()]
    model, last = keras.Sequential([*layers, keras.layers.Dense(4)]), images.transpose(0, 2, 3, 1)
    model.save(folder / "model.keras")
    whole = chipfit.quantize(model, last, platform="tflite_int8", progress=False)
    whole.export(folder / "model_int8.tflite")
    float_file(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (torch.zeros(1, 3, 16, 16),), folder / "model.tflite")
    shutil.copy(folder / "model.tflite", folder / "net.tflite")
    return folder


def write_data(folder: Path, images: np.ndarray) -> None:
    """Write calibration, test and training data."""
    np.savez(folder / "calibration.npz", x=images)
    for file in ("test", "train"):
        np.savez(folder / f"{file}.npz", x=images, y=np.arange(len(images)) % 4)


def smaller(line: str) -> list[str]:
    for whole, part in SMALLER.items():
        line = line.replace(whole, part)
    return shlex.split(line)[1:]


@pytest.mark.parametrize("page", sorted({page for page, _ in RUN}))
def test_the_commands_of_a_page_run_in_their_order(page, files, tmp_path, monkeypatch, drop_ins):
    folder = tmp_path / "page"
    shutil.copytree(files, folder)
    monkeypatch.chdir(folder)
    for _, rest, text, _ in blocks(ROOT / page):
        if title := re.search(r'title="([^"]+)"', rest):
            Path(title[1]).write_text(text)
    if page in CHANNELS_LAST:
        write_data(folder, np.load("calibration.npz")["x"].transpose(0, 2, 3, 1))
    lines = [line for where, line in RUN if where == page]
    if any("chipfit_out" in line for line in lines):
        lines.insert(0, "chipfit quantize nets:build --data calibration.npz --no-verify")
    for line in lines:
        done = CliRunner().invoke(app, smaller(line))
        assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"


#: (page, language) of blocks that are neither Python, nor commands, nor files of their page -> the number of them
CHECKED = {
    ("docs/command-line.md", "json"): 1,
    ("docs/concepts.md", ""): 1,  # a drawing
    ("docs/experiments.md", "yaml"): 3,
    ("docs/from-aimet.md", "py"): 1,
    ("docs/from-nncf.md", "py"): 1,
    ("docs/from-tflite.md", "py"): 1,
    ("docs/from-torchao.md", "py"): 1,
    ("docs/recurrent.md", "text"): 1,
}


def test_no_block_of_a_page_escapes_the_tests():
    found: Counter[tuple[str, str]] = Counter()
    for page in PAGES:
        for fence in re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)[::2]:
            language, _, rest = fence.partition(" ")
            if language not in ("python", "console") and "title=" not in rest:
                found[name(page), language] += 1
    assert found == CHECKED


def of(page: str, language: str) -> list[str]:
    return [text for found, _, text, _ in blocks(ROOT / page) if found == language]


def test_the_json_of_an_error_is_what_the_command_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file in ("other.tflite", "calibration.npz"):
        Path(file).touch()
    monkeypatch.setattr(sys, "argv", "chipfit verify other.tflite --data clibration.npz --json".split())
    with pytest.raises(SystemExit):
        main()
    assert [json.loads(capsys.readouterr().out)] == [json.loads(text) for text in of("docs/command-line.md", "json")]


def test_the_experiments_of_the_page_are_read(tmp_path):
    whole, without_training, own = of("docs/experiments.md", "yaml")
    folder = tmp_path / "study/one"
    shutil.copytree(ROOT / "qbench_zoo/settings", tmp_path / "settings")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(whole)
    (folder.parent / "ptq.yaml").write_text(without_training)
    assert load(folder / "config.yaml").qparams.w_method == "lsq"
    assert load(folder.parent / "ptq.yaml").ptq.bit == 4
    assert set(yaml.safe_load(own)["qparams"]) <= set(yaml.safe_load(whole)["qparams"])


def test_the_drift_of_the_page_is_what_its_code_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for text in of("docs/recurrent.md", "python"):
        exec(compile(text, "recurrent.md", "exec", dont_inherit=True), namespace)
    (shown,) = of("docs/recurrent.md", "text")
    printed = capsys.readouterr().out
    rows = [[line.split() for line in table.splitlines()] for table in (shown, printed[printed.index("  step") :])]
    assert rows[0][0] == rows[1][0] and [r[0] for r in rows[0]] == [r[0] for r in rows[1]]
    assert [float(x) for r in rows[0][1:] for x in r] == pytest.approx(
        [float(x) for r in rows[1][1:] for x in r], abs=1
    )


@pytest.mark.parametrize("page", ["docs/from-aimet.md", "docs/from-nncf.md"])
def test_the_code_of_a_tool_that_is_not_installed_is_python(page):
    (text,) = of(page, "py")
    compile(text, page, "exec")


#: names that the code of another tool reads -> Python that defines them
OTHER_TOOLS = {
    "docs/from-tflite.md": "import tensorflow as tf",
    "docs/from-torchao.md": "import torch\nexample = torch.zeros(16, 3, 8, 8)",
}


@pytest.mark.slow
@pytest.mark.parametrize("page", OTHER_TOOLS)
def test_the_code_of_another_tool_runs(page, tmp_path):
    """In a process of its own, with the network of the page."""
    (text,), python = of(page, "py"), "\n".join(of(page, "python")).replace("import chipfit\n", "")
    script = "\n".join([OTHER_TOOLS[page], python.partition("result = ")[0], text])
    env = {**os.environ, "KERAS_BACKEND": "tensorflow" if "tflite" in page else "torch"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
