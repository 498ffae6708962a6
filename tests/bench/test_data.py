"""Data sets: pixel values, reproducible random transforms, and unreadable images."""

import numpy as np
import pytest
import torch
from PIL import Image

from chipfit.bench.config import Data
from chipfit.bench.data import Reader, load
from chipfit.errors import DataError, UnknownNameError

PLAIN = {"transforms": {"type": "PLAIN"}}
STANDARD = {"transforms": {"type": "STANDARD"}}
ONECROP = {"transforms": {"type": "ONECROP"}}


def folder(tmp_path, per_class=4, side=(12, 8)):
    """Two classes, of red and of blue images; the k-th of each is k brighter."""
    for half in ("train", "val"):
        for name, colour in (("a", (200, 0, 0)), ("b", (0, 0, 200))):
            (tmp_path / half / name).mkdir(parents=True)
            for k in range(per_class):
                Image.new("RGB", side, tuple(c + k for c in colour)).save(tmp_path / half / name / f"{k}.png")
    return str(tmp_path)


def data(root, **over):
    small = {"batch_size": 2, "input_size": 6, "test_resize": 8, "train": PLAIN, "test": ONECROP}
    return Data(**{"type": "imagenet", "root": root, **small, **over})


def test_a_folder_of_classes_is_normalized_with_imagenets_mean_and_deviation(tmp_path):
    sets = load(data(folder(tmp_path)))
    x, y = sets.train.read(5, torch.Generator())  # the second of class b: (1, 1, 201)
    want = [(v / 255 - m) / s for v, m, s in zip((1, 1, 201), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    assert (y, sets.classes, len(sets.train), x.shape) == (1, 2, 8, (3, 6, 6))
    assert x[:, 3, 3].tolist() == pytest.approx(want, abs=1e-6)


def test_a_center_crop_follows_resizing_of_the_short_side(tmp_path):
    root = folder(tmp_path, 1)
    wide = np.zeros((8, 16, 3), np.uint8)
    wide[:, :4] = 255  # left of the middle
    Image.fromarray(wide).save(tmp_path / "val/a/0.png")
    x, _ = load(data(root)).test.read(0, torch.Generator())  # 8 pixels high as it is; columns 5 to 10 remain
    assert x.shape == (3, 6, 6) and float(x[0].max()) == float(x[0].min())
    wide[:, :6] = 255
    Image.fromarray(wide).save(tmp_path / "val/a/0.png")
    x, _ = load(data(root)).test.read(0, torch.Generator())
    assert (x[0, 0] > 0).tolist() == [True, False, False, False, False, False]


def test_random_transforms_depend_on_seed_epoch_and_index_only(tmp_path):
    sets = load(data(folder(tmp_path), train=STANDARD))
    for k, p in enumerate(sorted((tmp_path / "train").glob("*/*.png"))):
        Image.fromarray(np.random.default_rng(k).integers(0, 255, (12, 16, 3), np.uint8)).save(p)

    def batches(seed, epoch, workers=0, first=0):
        config = data(str(tmp_path), train=STANDARD, num_workers=workers)
        reader = Reader(load(config).train, config, seed)
        return [x for x, _ in reader.batches(epoch, shuffled=True, first=first)]

    one = batches(3, 0)
    assert len(one) == 4 and not torch.equal(one[0], one[1])
    assert all(torch.equal(a, b) for a, b in zip(one, batches(3, 0, workers=2), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one[2:], batches(3, 0, first=2), strict=True))
    assert not torch.equal(one[0], batches(3, 1)[0]) and not torch.equal(one[0], batches(4, 0)[0])
    assert sets.classes == 2


def test_two_processes_share_every_batch(tmp_path):
    config = data(folder(tmp_path))
    images = load(config).train
    whole = Reader(images, config.model_copy(update={"batch_size": 4}), 0)
    readers = whole, Reader(images, config, 0, 0, 2), Reader(images, config, 0, 1, 2)
    batches = [torch.cat([x for x, _ in reader.batches(0, shuffled=True)]) for reader in readers]
    every, one, other = ({tuple(x.flatten().tolist()) for x in batch} for batch in batches)
    assert one | other == every and len(every) == 8 and not one & other


def test_unreadable_images_are_skipped_and_counted_up_to_a_limit(tmp_path):
    root = folder(tmp_path)
    (tmp_path / "train/a/0.png").write_bytes(b"no image")
    config = data(root, corrupted=0.2)
    reader = Reader(load(config).train, config, 0)
    for epoch in range(3):  # an image is counted once, however often it is asked for
        assert sum(len(x) for x, _ in reader.batches(epoch, shuffled=False)) == 7 and reader.unreadable == {0}
    strict = Reader(load(config).train, data(root, corrupted=0.1), 0)
    with pytest.raises(DataError, match="Too many images cannot be read.*10.0% of 8"):
        list(strict.batches(0, shuffled=False))


def test_a_batch_without_readable_images_stops_training_and_is_skipped_in_tests(tmp_path):
    root = folder(tmp_path)
    (tmp_path / "train/b/3.png").write_bytes(b"no image")
    config = data(root, corrupted=0.5, batch_size=1)
    reader = Reader(load(config).train, config, 0)
    assert sum(len(x) for x, _ in reader.batches(0, shuffled=False)) == 7
    with pytest.raises(DataError, match=r"No image of a batch can be read.*images \[7\].*larger data.batch_size"):
        list(reader.batches(0, shuffled=True))


def test_a_custom_data_set_is_a_function_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "pictures.py").write_text("from chipfit.bench.data import digits as mine\ndef bad(config): 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert len(load(Data(type="pictures:mine", train={"images": 30})).train) == 30
    with pytest.raises(DataError, match="'pictures:bad' fails: ZeroDivisionError"):
        load(Data(type="pictures:bad"))
    with pytest.raises(DataError, match="cannot be imported"):
        load(Data(type="pictures:yours"))


def test_cifars_binary_rows_are_labels_and_colours(tmp_path):
    rows = np.zeros((3, 3073), np.uint8)
    rows[:, 0], rows[1, 1:1025] = (7, 8, 9), 255  # the second image is red
    for name in [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]:
        (tmp_path / f"{name}.bin").write_bytes(rows.tobytes())
    sets = load(data(str(tmp_path), type="cifar10"))
    x, y = sets.train.read(1, torch.Generator())
    assert (len(sets.train), len(sets.test), y, sets.classes) == (15, 3, 8, 10)
    assert x[:, 0, 0].tolist() == pytest.approx([(1 - 0.491) / 0.247, -0.482 / 0.243, -0.447 / 0.262], abs=1e-4)
    shifted = load(data(str(tmp_path), type="cifar10", train=STANDARD)).train
    seen = [shifted.read(1, torch.Generator().manual_seed(k))[0] for k in range(3)]
    assert all(s.shape == (3, 32, 32) and set(s.unique().tolist()) <= {0.0, *x.unique().tolist()} for s in seen)
    assert not torch.equal(seen[0], seen[1]) and torch.equal(seen[0][:, 16, 16], x[:, 16, 16])
    wide = np.zeros((2, 3074), np.uint8)
    wide[:, 1] = 99  # coarse label first, then the fine one
    for name in ("train", "test"):
        (tmp_path / f"{name}.bin").write_bytes(wide.tobytes())
    assert load(data(str(tmp_path), type="cifar100")).train.read(0, torch.Generator())[1] == 99
    (tmp_path / "train.bin").write_bytes(b"short")
    with pytest.raises(DataError, match="not in CIFAR's binary format.*rows of 3074 bytes"):
        load(data(str(tmp_path), type="cifar100"))


def test_digits_and_procedural_images_need_no_files():
    digits = load(Data(type="digits"))
    assert (len(digits.train), len(digits.test), digits.classes) == (1348, 449, 10)
    drawn = load(Data(type="procedural", train={"images": 30}, test={"images": 20}))
    assert (len(drawn.train), len(drawn.test), drawn.classes) == (30, 20, 20)
    assert drawn.train.digest() == load(Data(type="procedural", train={"images": 30})).train.digest()
    assert drawn.train.digest() != drawn.test.digest()


def test_missing_and_wrong_folders_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("CHIPFIT_DATA", raising=False)
    with pytest.raises(DataError, match="CHIPFIT_DATA"):
        load(Data())
    with pytest.raises(DataError, match="cannot be read"):
        load(data(str(tmp_path / "missing")))
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="no classes of images"):
        load(data(str(tmp_path)))
    root = folder(tmp_path / "other")
    (tmp_path / "other/val/b").rename(tmp_path / "other/val/c")
    with pytest.raises(DataError, match="different classes.*b, c"):
        load(data(root))
    with pytest.raises(UnknownNameError, match="imagenet"):
        load(data(root, type="imagenets"))
