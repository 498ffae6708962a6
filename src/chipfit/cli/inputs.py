"""Models, data and options from the texts of the command line."""

import os
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chipfit import frameworks
from chipfit.cli.images import MEAN, SIDE, STD
from chipfit.errors import (
    CaptureError,
    ConfigError,
    DataError,
    PlanError,
    UnknownNameError,
    import_optional,
    short_message,
)
from chipfit.files import ARCHIVE_ERRORS, existing_file, names_object, near_path, wrap_read_errors
from chipfit.frameworks import adapter_of, all_facts, facts_of, framework_of, framework_of_file, is_model, load
from chipfit.graph.ir import Graph
from chipfit.import_by_name import call_factory, import_by_name, import_or_call
from chipfit.reading import load_weights
from chipfit.search.limits import Limits, amounts

_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp")
_BATCH = 16
#: limit for a folder of images, in case a user passes a whole disk
_MOST_FILES = 200_000


def load_model(text: str, weights: Path | None = None, device: str | None = None, *, requantize: bool = False) -> Any:
    """Load a model from a file, by name, or as the result of `module:factory`, with weights from a safetensors file.

    Args:
        requantize: see `chipfit.load_model`.
        device: device that it is moved to, see `Framework.device_named`; None leaves it where it is.

    Raises:
        CaptureError: there is no such file or factory, or the weights do not fit.
        ConfigError: there is no such device, or the framework itself places its models.
    """
    if device is not None:  # before any work
        adapter_of(framework_of_file(text) or "torch").device_named(device)
    imported = names_object(text) and not text.startswith("timm:") and not os.path.exists(text)
    model = import_or_call(text, "model", CaptureError, is_model) if imported else text
    model = frameworks.load_model(model, requantize=requantize)
    if not is_model(model):
        known = " or ".join(f.title for f in all_facts().values())
        raise CaptureError(f"'{text}' must provide a {known} model", got=type(model).__name__)
    if weights is not None:
        load_weights(model, weights, CaptureError)
    return model if device is None else model.to(adapter_of(framework_of(model)).device_named(device))


def load_data(
    text: str,
    input_size: int | None = None,
    mean: str | None = None,
    std: str | None = None,
    *,
    framework: str = "torch",
    names: Sequence[str] = (),
    sizes: Mapping[str, Sequence[int | None]] | None = None,
) -> Any:
    """Load batches from an `.npz` or `.npy` file, a folder of images or of such files, or `module:iterable`.

    An array of a `.npy` file with the shape of one sample is a sample; others have the batch on axis 0.

    Args:
        input_size: side length to which images are resized [pixels]; None for `SIDE`.
        mean, std: of images in 0..1: one number, or three separated by commas; None for `MEAN` and `STD`.
        framework: framework of the model, which decides between images [N, H, W, C] and [N, C, H, W].
        names: of the model's inputs, under which an `.npz` file may have one array each.
        sizes: of the model's inputs by name, None for open ones: where an input has no axis of samples, or not as its
            first, an `.npz` file holds one call.

    Raises:
        DataError: the data cannot be read.
        ConfigError: an option of images is given for other data.
    """
    path = Path(text)
    archives, arrays = ([path] if text.endswith(end) else _inside(path, end) for end in (".npz", ".npy"))
    if os.path.isdir(path) and not (archives or arrays):
        center = parse_numbers(MEAN if mean is None else mean, "mean")
        spread = parse_numbers(STD if std is None else std, "std")
        images = _images(path, input_size or SIDE, center, spread)
        return [x.permute(0, 2, 3, 1).contiguous() for x in images] if facts_of(framework).channels_last else images
    _check_options({"--input-size": input_size, "--mean": mean, "--std": std}, text)
    if archives:
        return [batch for file in archives for batch in _npz(file, names, sizes or {})]
    if arrays:
        return _npy(arrays, sizes or {})
    if not names_object(text):
        allowed = "an .npz or .npy file, a folder of images or of such files, or module:iterable"
        raise DataError(
            "Data must be a file, a folder or module:iterable", got=text, allowed=allowed, hint=near_path(path)
        )
    thing = import_by_name(text, "data", DataError)
    if callable(thing) and not isinstance(thing, Iterable):
        return lambda: call_factory(thing, text, "data", DataError)  # called for each pass
    return list(thing) if isinstance(thing, Iterator) else thing  # read twice: calibration and verification


def _check_options(given: Mapping[str, Any], text: str) -> None:
    """Raise a ConfigError for an option of images: other data are not resized or normalized."""
    if named := [name for name, value in given.items() if value is not None]:
        hint = "leave the option out: arrays are taken as they are"
        raise ConfigError(f"{named[0]} is for a folder of images", got=f"--data {text}", hint=hint)


def inputs_of(model: Any) -> dict[str, Any]:
    """Return what `load_data` has to know of a model, or of a captured network."""
    if isinstance(model, Graph):
        shapes = {name: model.shape(name) for name in model.inputs}
        return {"framework": model.framework, "names": model.inputs, "sizes": shapes}
    framework = framework_of(model)
    adapter = adapter_of(framework)
    return {"framework": framework, "names": adapter.input_names(model), "sizes": adapter.input_sizes(model)}


def generated_data(
    text: str, model: Any, input_size: int = 224, seed: int = 0, shapes: Sequence[str] | None = None
) -> Any:
    """Return data made from a model's batch norms for the text "generated" or "generated:COUNT"; None for others.

    Args:
        input_size: side length of images, for a model that does not know its inputs [pixels].
        shapes: of the inputs, see `example_of`.

    Raises:
        DataError: see `chipfit.generated`; or shapes are given for data that have shapes.
    """
    word, _, count = text.partition(":")
    if word != "generated" or not (text == word or count.isdecimal()):
        if shapes:
            hint = "leave it out, or give --data generated"
            raise DataError(
                "--input-shape is for generated data, and these have shapes", got=f"--data {text}", hint=hint
            )
        return None
    from chipfit.generation.generate import generated

    shape = (input_size, input_size, 3) if facts_of(framework_of(model)).channels_last else (3, input_size, input_size)
    known = example_of("", shapes, model) if shapes else adapter_of(framework_of(model)).example(model)
    example = torch.zeros(2, *shape) if known is None else known
    try:
        return generated(model, _count(count or "128"), example=example, seed=seed)
    except CaptureError as e:
        if shapes or known is not None:
            raise
        what = f"The model does not take generated images of {input_size} x {input_size} pixels"
        hint = "--input-size 32, or the shape of the inputs as in --input-shape 1,3,32,32"
        raise DataError(what, got=e.what, hint=hint) from e


def _npz(path: Path, names: Sequence[str], sizes: Mapping[str, Sequence[int | None]]) -> list[Any]:
    try:
        with wrap_read_errors(path, DataError, "The data file"), zipfile.ZipFile(path) as archive:
            arrays = {k.removesuffix(".npy"): _array(archive, k) for k in archive.namelist() if k.endswith(".npy")}
    except (*ARCHIVE_ERRORS, ValueError, MemoryError, RuntimeError) as e:
        # truncated, pickled, larger than memory, damaged, encrypted, or with an unknown compression
        raise DataError(f"The data file cannot be read as .npz: {short_message(e)}", where=str(path)) from e
    y = next((arrays[k] for k in ("y", "labels", "targets") if k in arrays and k not in names), None)
    scalars = {k for k, s in sizes.items() if not s}
    inputs = {k: v for k, v in arrays.items() if v.dtype.kind in "fiub" and (v.ndim or k in scalars) and v is not y}
    given, by_name = _chosen(inputs, names)
    if not given:
        got = ", ".join(f"{k} {v.dtype}{list(v.shape)}" for k, v in arrays.items()) or "nothing"
        allowed = "an array of numbers named x, batch first (and y for labels)"
        allowed += f"; or {', '.join(names)}" if {*names} - {"x"} else ""
        raise DataError("Data file has no inputs", where=str(path), got=got, allowed=allowed)
    if y is not None and y.dtype.kind in "iu":
        y = y.astype(np.int64)
    if stacked := [k for k, x in given.items() if _is_stacked(x.shape, sizes.get(k, ()))]:
        columns = _calls(path, _tensors(given | ({} if y is None or by_name else {"y": y})), stacked)
        return _batches(columns, list(given) if by_name else [])
    counted = _with_samples(path, given, sizes)
    first, whole = given[counted[0]], len(counted) < len(given)
    if y is not None and (y.shape[:1] != first.shape[:1] or y.dtype.kind not in "iu"):
        got, allowed = f"{y.dtype}{list(y.shape)}", f"{len(first)} integers, the numbers of classes"
        hint = "leave the labels out of the file, or keep them under another name: they only serve to measure accuracy"
        raise DataError("Labels do not fit the inputs", where=str(path), got=got, allowed=allowed, hint=hint)
    count = len(first) if whole else _batch_of(given, sizes)
    columns = [torch.split(x, count) if k in counted else (x,) for k, x in _tensors(given).items()]
    if y is not None and not by_name:
        columns.append(torch.from_numpy(y).split(count))
    return _batches(columns, list(given) if by_name else [])


def _batches(columns: Sequence[Sequence[torch.Tensor]], names: Sequence[str]) -> list[Any]:
    """Return calls of which each column has one argument, by name if there are names."""
    if names:
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return list(columns[0]) if len(columns) == 1 else list(zip(*columns, strict=True))


def _is_stacked(shape: Sequence[int], declared: Sequence[int | None]) -> bool:
    """Return whether an array has an axis of calls in front of those that the model declares."""
    rest = zip(shape[1:], declared, strict=False)
    return len(shape) == len(declared) + 1 > 1 and all(d in (None, s) for s, d in rest)


def _calls(path: Path, arrays: Mapping[str, torch.Tensor], stacked: Sequence[str]) -> list[Sequence[torch.Tensor]]:
    """Return the part of each call by array: an element of a stacked one, an equal share of rows, or the whole scalar.

    Raises:
        DataError: they do not have as many calls.
    """
    count = len(arrays[stacked[0]])
    for k, x in arrays.items():
        if x.dim() and (not count or (len(x) != count if k in stacked else len(x) % count)):
            got, allowed = f"{k} {list(x.shape)}", f"{count} calls on axis 0, as in {stacked[0]}"
            hint = "give every array an axis of calls in front, or a folder of .npz files with one call each"
            what = "Arrays of the data file have different numbers of calls"
            raise DataError(what, where=str(path), got=got, allowed=allowed, hint=hint)
    shared = {k: x.split(len(x) // count) if x.dim() else [x] * count for k, x in arrays.items()}
    return [x.unbind(0) if k in stacked else shared[k] for k, x in arrays.items()]


def _with_samples(path: Path, given: Mapping[str, np.ndarray], sizes: Mapping[str, Sequence[int | None]]) -> list[str]:
    """Return the names of arrays whose first axis counts samples: all, or those without another size in the model.

    Raises:
        DataError: they have different numbers of samples.
    """
    if all(v.ndim for v in given.values()) and len({len(v) for v in given.values()}) == 1:
        return [*given]
    counted = [k for k, v in given.items() if v.ndim and (k not in sizes or tuple(sizes[k][:1]) != v.shape[:1])]
    counted = counted or [k for k, v in given.items() if v.ndim][:1] or [*given]
    first = given[counted[0]]
    if other := next((k for k in counted if given[k].shape[:1] != first.shape[:1]), None):
        got, allowed = f"{other} {list(given[other].shape)}", f"{len(first)} samples on axis 0"
        what = "Arrays of the data file have different numbers of samples"
        hint = "only an input whose first axis the model declares with another size may differ; the file is one call "
        hint += "then. Otherwise give module:iterable, one call after the other"
        raise DataError(what, where=str(path), got=got, allowed=allowed, hint=hint)
    return counted


def _batch_of(given: Iterable[str], sizes: Mapping[str, Sequence[int | None]]) -> int:
    """Return the number of samples in a call that all inputs of a model declare, or a usual one."""
    declared = {(*sizes.get(k, ()), None)[0] for k in given}
    (fixed,) = declared if len(declared) == 1 else (None,)
    return fixed if fixed is not None and fixed > 1 else _BATCH


def _chosen(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> tuple[dict[str, np.ndarray], bool]:
    """Return the inputs among arrays in order, and whether they are given by name because some inputs are left out.

    They are those with the names of the inputs; one with a usual name; arrays without names; or the only one, whatever
    its name, of a model with one input.
    """
    called = {k.partition(";")[0].removesuffix(":0"): v for k, v in arrays.items()}  # as TensorFlow names tensors
    called.update(arrays)
    signatures = {k[: -len(n) - 2] for n in names for k in arrays if k.endswith(f"_{n}:0")}
    heads = ["", "serving_default_", *sorted(signatures)]
    head = max(heads, key=lambda h: sum(h + n in called for n in names))
    named = [n for n in names if head + n in called]
    if named:
        return {n: called[head + n] for n in named}, named != list(names[: len(named)])
    usual = [k for k in ("x", "inputs", "images", "data") if k in arrays][:1]
    places = sorted((k for k in arrays if k.startswith("arr_")), key=lambda k: (len(k), k))
    only = list(arrays) if len(arrays) == len(names) == 1 else []
    return {k: arrays[k] for k in usual or places or only}, False


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return arrays as tensors; float64 is NumPy's default type, rarely a choice, and becomes float32."""
    found = {k: torch.from_numpy(np.asarray(x)) for k, x in arrays.items()}
    return {k: x.float() if x.dtype is torch.float64 else x for k, x in found.items()}


def _inside(folder: Path, suffix: str) -> list[Path]:
    found = folder.glob(f"*{suffix}") if os.path.isdir(folder) else ()  # False for a name that is too long
    return sorted(islice(found, _MOST_FILES))


def _npy(files: Sequence[Path], sizes: Mapping[str, Sequence[int | None]]) -> list[torch.Tensor]:
    """Return the batches in `.npy` files; samples of equal shape are joined."""
    (declared,) = sizes.values() if len(sizes) == 1 else ((),)
    found: list[torch.Tensor] = []
    for x in (_array_of(f) for f in files):
        fits = [d in (None, s) for d, s in zip(declared[1:], x.shape, strict=False)]
        sample = len(x.shape) == len(declared) - 1 and all(fits)
        found += x.unbind(0) if _is_stacked(x.shape, declared) else [x[None] if sample else x]
    if len({x.shape[1:] for x in found}) == 1:
        found = [torch.cat(found)]
    return [part for x in found for part in x.split(_batch_of(sizes, sizes) if declared else _BATCH)]


def _array_of(path: Path) -> torch.Tensor:
    try:
        with wrap_read_errors(path, DataError, "The data file"):
            x: np.ndarray = np.load(path, allow_pickle=False)
    except (*ARCHIVE_ERRORS, ValueError, MemoryError, RuntimeError) as e:
        raise DataError(f"The data file cannot be read as .npy: {short_message(e)}", where=str(path)) from e
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "fiub" or not x.ndim:
        got = f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else "an archive"
        raise DataError("Data file has no inputs", where=str(path), got=got, allowed="numbers, batch first")
    return _tensors({"x": x})["x"]


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read one array of an archive; raise for objects, which would have to be unpickled."""
    with archive.open(name) as file:
        array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _images(folder: Path, side: int, mean: torch.Tensor, std: torch.Tensor) -> list[torch.Tensor]:
    Image = import_optional("PIL.Image", "A folder of images", DataError, extra="images")
    entries = list(islice(folder.rglob("*"), _MOST_FILES + 1))  # skips unreadable folders
    if len(entries) > _MOST_FILES:
        allowed = f"at most {_MOST_FILES:,} files; about a hundred images are enough"
        raise DataError("Folder holds too many files to search for images", where=str(folder), allowed=allowed)
    files = sorted(f for f in entries if f.suffix.lower() in _IMAGES)
    if not files:
        allowed = ", ".join((*_IMAGES, ".npz", ".npy"))
        raise DataError("Folder holds no images or arrays", where=str(folder), allowed=allowed)
    out = []
    for f in files:
        try:
            with Image.open(existing_file(f, DataError, "The image")) as image:
                pixels = np.asarray(image.convert("RGB").resize((side, side)), dtype=np.float32) / 255
        except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as e:
            raise DataError("Image cannot be read", where=str(f), got=short_message(e)) from e
        out.append((torch.from_numpy(pixels).permute(2, 0, 1) - mean) / std)
    return list(torch.stack(out).split(_BATCH))


def parse_numbers(text: str, what: str) -> torch.Tensor:
    """Parse one number or three as [C, 1, 1].

    Raises:
        DataError: the text holds no numbers, or a standard deviation is not positive.

    >>> parse_numbers("0.5", "mean").shape
    torch.Size([1, 1, 1])
    """
    try:
        numbers = torch.tensor([float(p) for p in text.split(",")])
    except ValueError:
        numbers = torch.tensor([])
    if len(numbers) not in (1, 3) or not numbers.isfinite().all() or (what == "std" and (numbers <= 0).any()):
        allowed = "one number, or three separated by commas: 0.485,0.456,0.406"
        raise DataError(f"--{what} is invalid", got=text, allowed=allowed)
    return numbers.view(-1, 1, 1)


def example_of(model: str, shapes: Sequence[str] | None, network: Any = None) -> Any:
    """Return an example input for capture: random numbers of shapes like "1,3,224,224", or of the shapes in the file.

    Args:
        shapes: one for each input, in order, or by name as "ids=1,12".
        network: the loaded model.

    Raises:
        DataError: a shape is not a list of positive integers, or is missing.
    """
    if not shapes:
        framework = framework_of_file(model)
        adapter = adapter_of(framework) if framework else None
        network = network if network is not None or adapter is None else load(model)
        example = adapter.example(network) if adapter else None
        if example is None:
            names, known = (adapter.input_names(network), adapter.input_sizes(network)) if adapter else ([], {})
            texts = [_text_of(known.get(name) or (1, 12)) for name in names[:3]] or ["1,3,224,224"]
            hint = f"--input-shape {texts[0]}, batch first"
            if names[1:]:
                hint = " ".join(f"--input-shape {name}={text}" for name, text in zip(names, texts))
            hint += "" if framework else "; of several inputs --input-shape ids=1,12 for each"
            got = f"a file that leaves sizes of {', '.join(names)} open" if names else None
            raise DataError("Input shape is required", where=model, got=got, hint=hint)
        return example
    pairs = [(name, _random(network, k, name, text)) for k, (name, _, text) in enumerate(map(_named, shapes))]
    if all(name for name, _ in pairs):
        return dict(pairs)
    return pairs[0][1] if len(pairs) == 1 else tuple(x for _, x in pairs)


def _text_of(sizes: Sequence[int | None]) -> str:
    """Return sizes as `--input-shape` reads them; open ones are 1 in front and 16 behind."""
    return ",".join(str(s or (16 if k else 1)) for k, s in enumerate(sizes))


def _named(text: str) -> tuple[str, str, str]:
    return text.partition("=") if "=" in text else ("", "", text)


def _random(network: Any, index: int, name: str, text: str) -> torch.Tensor:
    """Return random numbers for an input, of a shape as text."""
    sizes = [_count(p.strip()) for p in text.split(",")]
    if not all(sizes):
        allowed = "positive integers separated by commas, batch first: 1,3,224,224"
        raise DataError("Input shape is invalid", got=text, allowed=allowed)
    try:
        return torch.randn(sizes) if network is None else _input_of(network, index, name, sizes)
    except RuntimeError as e:
        raise DataError("Not enough memory for an input of this shape", got=text) from e


def _input_of(network: Any, index: int, name: str, sizes: list[int]) -> torch.Tensor:
    adapter = adapter_of(framework_of(network))
    names = adapter.input_names(network)
    if name and name not in names:
        raise DataError("Input shape names no input of the model", got=name, allowed=", ".join(names))
    return adapter.random_input(network, names.index(name) if name else index, sizes)


def _count(text: str) -> int:
    """Parse a positive integer that fits 64 bits; return 0 for other text."""
    return int(text) if text.isdecimal() and len(text) < 19 else 0


def parse_bits(items: list[str]) -> dict[str, dict[str, int]]:
    """Parse LAYER=BITS pairs to overrides.

    Raises:
        PlanError: a text has another form.
    """
    out = {}
    for item in items:
        layer, _, bits = item.rpartition("=")
        if not layer or not _count(bits):
            allowed = "for example features.0=4"
            raise PlanError("--bits must have the form LAYER=BITS", got=item, allowed=allowed)
        out[layer] = {"bits": _count(bits)}
    return out


def parse_limits(texts: list[str]) -> Limits:
    """Parse NAME=AMOUNT pairs to limits.

    Raises:
        UnknownNameError: there is no such limit.
        ConfigError: an amount is invalid.
    """
    pairs = [text.partition("=")[::2] for text in texts]
    names = [f.name for f in amounts()]
    if bad := [name for name, _ in pairs if name not in names]:
        raise UnknownNameError("limit", bad[0], names)
    return Limits(**dict[str, Any](pairs))
