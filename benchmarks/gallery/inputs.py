"""Real inputs of trained networks: photographs, printed text, speech, spectra, sentences.

Each function returns inputs for calibration and for measurement, `count` samples each, batch first, and labels of the
second or None. The two never share a picture or a recording.
"""

from __future__ import annotations

import csv
import wave
from collections.abc import Sequence
from typing import Any

import numpy as np
from benchmarks.gallery.files import names_of, path_of, paths_of
from benchmarks.gallery.runs import opened
from PIL import Image

Samples = tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...], np.ndarray | None]
_FACES = "imgs"
_COLOUR = [f"skimage/data/{n}" for n in ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")]
_TEXT = ["skimage/data/page.png", "skimage/data/text.png"]


def photographs(
    count: tuple[int, int],
    size: tuple[int, int],
    layout: str = "NCHW",
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
    what: str = "whole",
) -> Samples:
    """Return photographs of people and things, whole or in crops, as (pixels / 255 - mean) / std.

    Args:
        size: height and width.
        what: "whole" (crops of at least half the side), or "faces" (crops around faces that a detector has found).
    """
    pictures = [Image.open(p).convert("RGB") for p in _photographs()]
    if what == "faces":
        pictures = [face for p in pictures for face in faces(p)]
    halves = [_crops(pictures[k::2], n, size, k, least=0.9 if what == "faces" else 0.5) for k, n in enumerate(count)]
    first, second = (_scaled(x, layout, mean, std) for x in halves)
    return (first,), (second,), None


def printed_text(
    count: tuple[int, int], size: tuple[int, int], mean: float = 0.5, std: float = 0.5, lines: bool = False
) -> Samples:
    """Return crops of printed pages, or strips of about a line, as [N, 3, H, W]; the two halves of pages apart."""
    pages = [Image.open(p).convert("RGB") for p in paths_of("scikit_image", _TEXT)]
    halves = []
    for k, n in enumerate(count):
        parts = [p.crop((0, p.height * k // 2, p.width, p.height * (k + 1) // 2)) for p in pages]
        rng, out = np.random.default_rng(k), []
        for j in range(n):
            p = parts[j % len(parts)]
            height = int(p.height * (rng.uniform(0.2, 0.4) if lines else rng.uniform(0.6, 1)))
            width = min(p.width, height * size[1] // size[0])
            x, y = rng.integers(0, p.width - width + 1), rng.integers(0, p.height - height + 1)
            out.append(np.asarray(p.crop((x, y, x + width, y + height)).resize(size[::-1]), np.float32))
        halves.append(_scaled(np.stack(out), "NCHW", mean, std))
    return (halves[0],), (halves[1],), None


def cifar(count: tuple[int, int], mean: Any = 0.0, std: Any = 1.0, layout: str = "NCHW", top: float = 1.0) -> Samples:
    """Return CIFAR-10 images with labels; calibration takes training images. `top` is the value of white."""
    out, labels = [], []
    for split, n in zip(("train", "test"), count, strict=True):
        names = names_of("cifar", split, ".jpg")
        classes = sorted({p.split("/")[1] for p in names})
        chosen = [p for c in classes for p in [q for q in names if q.split("/")[1] == c][: -(-n // 10)]]
        pixels = np.stack([np.asarray(Image.open(p).convert("RGB"), np.float32) for p in paths_of("cifar", chosen)])
        out.append(_scaled(pixels, layout, mean, std) * np.float32(top))
        labels = [classes.index(p.split("/")[1]) for p in chosen]
    mixed = np.random.default_rng(0).permutation(len(out[1]))
    return (out[0],), (out[1][mixed],), np.array(labels)[mixed]


def keywords(count: tuple[int, int]) -> Samples:
    """Return MFCCs of Speech Commands [N, 49, 10, 1] with labels, from the data set kws01 of EEMBC."""
    folder = "datasets/kws01"
    rows = list(csv.reader(path_of(f"energyrunner:{folder}/y_labels.csv").open()))
    codes = [np.fromfile(p, np.int8) for p in paths_of("energyrunner", [f"{folder}/{r[0]}" for r in rows])]
    scale, zero = _input_scale("tiny:benchmark/training/keyword_spotting/trained_models/kws_ref_model.tflite")
    x = (np.stack(codes).reshape(-1, 49, 10, 1).astype(np.float32) - zero) * np.float32(scale)
    mixed = np.random.default_rng(0).permutation(len(x))
    x, y = x[mixed], np.array([int(r[2]) for r in rows])[mixed]
    return (x[: count[0]],), (x[count[0] : sum(count)],), y[count[0] : sum(count)]


def spectra_of_wake_words(count: tuple[int, int]) -> Samples:
    """Return features of the streaming wake word [N, 30, 1, 40] with labels."""
    held = np.load(path_of("tiny:benchmark/training/streaming_wakeword/calibration_samples.npz"))
    arrays = sorted((held[k] for k in held.files), key=lambda a: -a.ndim)
    x, y = arrays[0].astype(np.float32), arrays[1].reshape(len(arrays[0]), -1)
    y = y.argmax(1) if y.shape[1] > 1 else y[:, 0]
    return (x[: count[0]],), (x[count[0] :],), y[count[0] :].astype(int)


def log_mel(count: tuple[int, int], frames: int = 5, bands: int = 128) -> Samples:
    """Return windows of log-mel spectra [N, frames * bands] of speech, as anomaly detectors read of machines."""
    from scipy.signal import stft

    halves = []
    for k, n in enumerate(count):
        power = np.abs(stft(_speech(k), 16000, nperseg=1024, noverlap=512)[2][:512]) ** 2
        mel = 20 / 2 * np.log10(power.reshape(bands, -1, power.shape[1]).mean(1) + 1e-10)
        stacked = np.lib.stride_tricks.sliding_window_view(mel, frames, 1).transpose(1, 2, 0)
        halves.append(_spread(stacked.reshape(len(stacked), -1), n).astype(np.float32))
    return (halves[0],), (halves[1],), None


def waves(count: tuple[int, int], length: int, top: float = 1.0, normed: bool = False) -> Samples:
    """Return windows of speech [N, length] at 16 kHz; `normed` windows have mean 0 and deviation 1."""
    halves = []
    for k, n in enumerate(count):
        x = _spread(np.lib.stride_tricks.sliding_window_view(_speech(k), length)[:: length // 4], n)
        if normed:
            x = (x - x.mean(1, keepdims=True)) / np.maximum(1e-10, x.std(1, keepdims=True))
        halves.append((x * top).astype(np.float32))
    return (halves[0],), (halves[1],), None


def wake_words(count: tuple[int, int], frames: int = 0) -> Samples:
    """Return inputs of openWakeWord: mel spectra [N, 76, 32, 1], or with `frames` embeddings [N, frames, 96].

    Embeddings are of clips with the wake words, which both halves hold, the first with less gain and 40 ms later.
    """
    halves = []
    models = "openwakeword:openwakeword/resources/models"
    for k, n in enumerate(count):
        clips = [f"tests/data/{word}.wav" for word in ("alexa_test", "hey_mycroft_test", "hey_jane")]
        spoken = _recorded(clips) if frames else _speech(k)
        spoken = spoken if k else np.pad(spoken * np.float32(0.6), (640, 0))
        mel = _onnx(f"{models}/melspectrogram.onnx")(spoken[None, : 16000 * 60] * np.float32(32767))
        windows = np.lib.stride_tricks.sliding_window_view(mel.squeeze() / 10 + 2, 76, 0)[::8].swapaxes(1, 2)[..., None]
        if frames:
            embedded = _onnx(f"{models}/embedding_model.onnx")(np.ascontiguousarray(windows, np.float32))
            windows = np.lib.stride_tricks.sliding_window_view(embedded.reshape(-1, 96), frames, 0).swapaxes(1, 2)
        halves.append(np.ascontiguousarray(_spread(windows, n), np.float32))
    return (halves[0],), (halves[1],), None


def digits(count: tuple[int, int]) -> Samples:
    """Return handwritten digits [N, 28, 28] in 0..1 with labels."""
    names = names_of("tflite_micro", "tensorflow/lite/micro/examples/mnist_lstm/samples", ".png")
    pixels = [np.asarray(Image.open(p).convert("L"), np.float32) / 255 for p in paths_of("tflite_micro", names)]
    labels = np.array([int(n[-5]) for n in names])
    shifted = [np.roll(p, (j // 3 - 1, j % 3 - 1), (0, 1)) for j in range(9) for p in pixels]  # by one pixel
    x = np.stack(shifted)
    return (x[len(pixels) : len(pixels) + count[0]],), (np.stack(pixels),), labels


def angles(count: tuple[int, int]) -> Samples:
    """Return angles [N, 1] in 0..2 pi, of which a network computes the sine."""
    first, second = (np.random.default_rng(k).uniform(0, 2 * np.pi, (n, 1)).astype("f") for k, n in enumerate(count))
    return (first,), (second,), None


def faces(picture: Image.Image) -> list[Image.Image]:
    """Return square crops, with a margin of a quarter, around the faces that a float detector finds in a picture."""
    session = opened(path_of("faces:models/onnx/version-RFB-320.onnx"))
    x = _scaled(np.asarray(picture.resize((320, 240)), np.float32)[None], "NCHW", 127 / 255, 128 / 255)
    scores, boxes = session.run(None, {session.get_inputs()[0].name: x})
    kept: list[np.ndarray] = []
    for k in np.argsort(-scores[0, :, 1])[:200]:
        box, centre = boxes[0, k], boxes[0, k].reshape(2, 2).mean(0)
        if scores[0, k, 1] > 0.8 and all((np.abs(centre - b.reshape(2, 2).mean(0)) > 0.05).any() for b in kept):
            kept.append(box)
    out = []
    for x0, y0, x1, y1 in (b * np.tile(picture.size, 2) for b in kept):
        half = 0.75 * max(x1 - x0, y1 - y0)
        if half > 20:
            x, y = (x0 + x1) / 2, (y0 + y1) / 2
            out.append(picture.crop((int(x - half), int(y - half), int(x + half), int(y + half))))
    return out


def _photographs() -> list[Any]:
    people = paths_of("faces", names_of("faces", _FACES, ".jpg"))
    return [*paths_of("scikit_image", _COLOUR), *people]


def _crops(pictures: Sequence[Image.Image], count: int, size: tuple[int, int], seed: int, least: float) -> np.ndarray:
    """Return pictures resized to a size, float32 [N, H, W, 3] in 0..255: first whole ones, then random crops."""
    rng, out = np.random.default_rng(seed), []
    for k in range(count):
        p = pictures[k % len(pictures)]
        part = rng.uniform(least, 1) if k >= len(pictures) else 1
        w, h = max(1, int(p.width * part)), max(1, int(p.height * part))
        x, y = int(rng.integers(0, p.width - w + 1)), int(rng.integers(0, p.height - h + 1))
        out.append(np.asarray(p.crop((x, y, x + w, y + h)).resize(size[::-1], Image.Resampling.BILINEAR), np.float32))
    return np.stack(out)


def _scaled(pixels: np.ndarray, layout: str, mean: Any, std: Any) -> np.ndarray:
    x = (pixels / np.float32(255) - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2) if layout == "NCHW" else x, np.float32)


def _speech(half: int) -> np.ndarray:
    """Return recordings of one half of the clips, one after the other, float32 in -1..1 at 16 kHz."""
    return _recorded(names_of("wake_word_clips", "notebooks/training_tutorial_data/positive", ".wav")[half::2])


def _recorded(names: Sequence[str]) -> np.ndarray:
    clips = []
    for path in paths_of("wake_word_clips", names):
        with wave.open(str(path)) as w:
            clips.append(np.frombuffer(w.readframes(w.getnframes()), np.int16).reshape(-1, w.getnchannels())[:, 0])
    return np.concatenate(clips).astype(np.float32) / 32768


def _spread(x: np.ndarray, count: int) -> np.ndarray:
    return x[np.linspace(0, len(x) - 1, count).astype(int)]


def _onnx(file: str) -> Any:
    session = opened(path_of(file))
    return lambda x: session.run(None, {session.get_inputs()[0].name: x})[0]


def _input_scale(file: str) -> tuple[float, int]:
    from ai_edge_litert.interpreter import Interpreter

    scale, zero = Interpreter(str(path_of(file))).get_input_details()[0]["quantization"]
    return scale, zero
