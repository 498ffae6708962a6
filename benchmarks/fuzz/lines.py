"""The kind of input that is a command line; it runs in this process."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from benchmarks.fuzz import mutate
from benchmarks.fuzz.files import IMAGES, ROWS, kept, model_files, saved_results
from benchmarks.fuzz.run import Bug, Case

from chipfit.cli.app import main
from chipfit.errors import ChipfitError
from chipfit.platform.load import names


@functools.cache
def _given() -> dict[str, list[str]]:
    """Return valid words by what they name."""
    folder = Path(tempfile.mkdtemp(prefix="given.", dir=kept()))  # each worker makes its own
    np.savez(folder / "images.npz", x=IMAGES.numpy(), y=np.array([0, 1]))
    np.savez(folder / "rows.npz", x=ROWS.numpy())
    np.savez(folder / "wrong.npz", a=np.array(["x"]))
    (folder / "empty.npz").write_bytes(b"")
    (folder / "chips.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def images():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Conv2d(3, 2, 1), nn.ReLU())\n"
        "def classes():\n    torch.manual_seed(0)\n    return nn.Sequential(nn.Flatten(), nn.Linear(108, 2))\n"
        "data = [torch.randn(2, 3, 6, 6)]\nlabelled = [(data[0], torch.tensor([0, 1]))]\n"
        "number = 3\ndef fails():\n    raise ValueError('mine')\n"
        "def stops():\n    raise SystemExit(5)\n"
    )
    (folder / "latin.yaml").write_bytes("name: caf\xe9".encode("latin-1"))
    from PIL import Image

    (folder / "pictures").mkdir()
    Image.fromarray(np.zeros((6, 6, 3), np.uint8)).save(folder / "pictures" / "a.png")
    (folder / "pictures" / "b.jpg").write_bytes(b"no picture")
    saved = [str(p) for p, _ in saved_results()]
    models = [str(p) for p, _ in model_files().values() if p.suffix in (".pt2", ".keras")]
    return {
        "model": [
            *models,
            "chips:images",
            "chips:classes",
            "chips:number",
            "chips:fails",
            "chips:none",
            "none:images",
            str(folder / "images.npz"),
        ],
        "data": [
            *(str(folder / f"{n}.npz") for n in ("images", "rows", "wrong", "empty")),
            "chips:data",
            "chips:labelled",
            "chips:fails",
            str(folder / "pictures"),
            str(folder),
        ],
        "saved": [*saved, str(folder), str(kept())],
        "platform": [*names(), "ort_cpu@AVX2", "ort_cpu@x", str(folder / "latin.yaml"), "chips:number", str(folder)],
        "folder": [str(folder)],
    }


def _odd(rng: Random) -> str:
    """Draw a word that somebody might type."""
    words = (
        "",
        "-",
        "--",
        ".",
        "..",
        "/",
        "/dev/null",
        "/proc/1/mem",
        "nan",
        "-1",
        "1e999",
        "0",
        "9" * 400,
        "a" * 300,
        "é\udcff",
        "x:y",
        ":",
        "x:",
        ":y",
        "a.b:c",
        "x.yaml",
        "x.json",
        "x.pt2",
        "x.keras",
        "x.npz",
        "1,2,3",
        ",",
        "0,0,0",
        "[bold]x",
        "--help",
        "~",
        "\n",
        "*",
        "os:system",
        "a\x00b",
    )
    return rng.choice(words)


def command_line(case: Case) -> None:
    """Run one command with some words odd, missing or repeated."""
    rng = case.random
    words = _words(rng, case)
    words = [w.replace("OUT", str(case.folder / "out")) for w in words]
    case.note(" ".join(words))
    os.chdir(_given()["folder"][0])
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["chipfit", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        status: Any = 0
    except SystemExit as e:
        status = e.code
    finally:
        sys.argv = argv
    nothing_promised = 3 if words[:1] == ["verify"] else None
    if status not in (0, 1, 2, None, nothing_promised) or "Traceback" in err.getvalue():
        raise Bug(f"exit status {status}: {err.getvalue().partition('╭')[0][-400:]}")
    if status == 2:
        raise ChipfitError("refused")  # with a panel, or by the reader of options


def _words(rng: Random, case: Case) -> list[str]:
    def w(name: str) -> str:
        return _odd(rng) if rng.random() < 0.12 else rng.choice(_given()[name])

    def options(**known: Any) -> list[str]:
        out: list[str] = []
        for name, choices in known.items():
            if rng.random() < 0.25:
                out += [f"--{name.replace('_', '-')}", _odd(rng) if rng.random() < 0.3 else str(rng.choice(choices))]
        return out

    of_images = {"input_size": (6, 8), "mean": ("0.5", "0,0,0"), "std": ("1", "1,1,0")}
    commands = {
        "quantize": lambda: [
            w("model"),
            "--data",
            w("data"),
            "--platform",
            w("platform"),
            "--out",
            "OUT" if rng.random() < 0.9 else w("folder"),
            *options(
                rule=("mse", "kl", "lp(p=0)"),
                weight_rule=("mse", "x"),
                float=("0", "Conv2D", "*"),
                bits=("0=4", "*=8", "0=0", "x", "=", "0=99999999999"),
                format=("onnx", "tflite", "json", "x"),
                seed=(0, 1, 2**70),
                weights=("x.safetensors",),
                **of_images,
            ),
            *rng.choice(([], ["--no-verify"], ["--verify"])),
        ],
        "verify": lambda: [
            w("saved"),
            "--data",
            w("data"),
            *options(
                runtime=("onnxruntime", "litert", "openvino", "x"),
                report=("OUT.html", "OUT.json", "OUT.x"),
                file=("chips.py", "images.npz"),
                **of_images,
            ),
        ],
        "train": lambda: [
            rng.choice((w("saved"), w("model"), "chips:classes")),
            "--data",
            rng.choice((w("data"), "chips:labelled")),
            "--out",
            "OUT" if rng.random() < 0.9 else w("folder"),
            *options(
                platform=names(),
                method=("lsq", "ste", "lsq(x=1)", "chips:number"),
                epochs=(1, 2),
                rate=("0.01", "1e30", "1e300"),
                batch_size=(1, 64),
                seed=(0, 2**70),
                loop=("chips:fails", "chips:images"),
                bits=("0=4", "x"),
                format=("onnx", "x"),
            ),
        ],
        "lint": lambda: [w("model"), *options(input_shape=("1,3,6,6", "2,4", "1,3,6"), platform=names())],
        "explain": lambda: [w("saved"), rng.choice(("0", "Conv2D", "*", _odd(rng)))],
        "platforms show": lambda: [w("platform")],
        "platforms check": lambda: [w("platform")],
        "platforms export": lambda: [w("platform"), rng.choice(("OUT.yaml", "OUT.json", "OUT", _odd(rng)))],
        "platforms list": list,
        "platforms": list,
        "": list,
    }
    command = rng.choice([*commands, *["quantize", "train", "verify", "explain", "lint"] * 2])
    words = [*command.split(), *commands[command]()]
    if rng.random() < 0.15 and words:
        k = rng.randrange(len(words))
        words[k : k + 1] = rng.choice(([], [words[k]] * 2, [_odd(rng)], [words[k], _odd(rng)]))
    return words


__all__ = ["command_line", "mutate"]
