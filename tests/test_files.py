"""Files and folders appear whole or not at all, and nobody else's is touched."""

import errno
import json
import os
import resource
import signal
import stat
import tempfile
from functools import partial
from pathlib import Path

import pytest
from torch import nn

import chipfit
from chipfit import files
from chipfit.cli.inputs import load_data
from chipfit.errors import ChipfitError, ConfigError, ExportError, ModelingError, PlanError, RuntimeUnavailable
from chipfit.files import MANIFEST, current_folder, read_text, replace_folder, write_atomically
from chipfit.platform.save import export_platform
from chipfit.target_platform import export_target_platform_capabilities
from tests.build import images, quantized, sequential
from tests.processes import python

KILLED = """
import os, sys
from pathlib import Path
from chipfit import files
def die(*_): os.kill(os.getpid(), 9)
files.{hook} = die
{act}
"""


def put(directory, text="new"):
    with replace_folder(directory, "a test") as new:
        (new / "a.txt").write_text(text)
        (new / MANIFEST).write_text(json.dumps({"chipfit": "1", "files": {"a.txt": {}}}))


def killed(act, hook="install_folder"):
    """Run a writer in a process of its own that dies where it calls `hook`."""
    assert python(KILLED.format(hook=hook, act=act)).returncode == -9


def here(folder):
    return sorted(p.name for p in folder.iterdir())


# ---------------------------------------------------------------- files


def test_a_file_gets_the_mode_of_the_umask_and_keeps_the_one_it_had(tmp_path):
    old = os.umask(0o027)
    try:
        write_atomically(tmp_path / "f", b"1")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640
    (tmp_path / "f").chmod(0o604)
    write_atomically(tmp_path / "f", b"2")
    assert ((tmp_path / "f").read_bytes(), stat.S_IMODE((tmp_path / "f").stat().st_mode)) == (b"2", 0o604)


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "f")  # which is not there yet
    write_atomically(tmp_path / "link", b"1")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "f").read_bytes() == b"1"
    assert here(tmp_path) == ["link", "real"]


def test_a_file_marked_read_only_and_a_folder_are_refused(tmp_path):
    (tmp_path / "f").write_bytes(b"1")
    (tmp_path / "f").chmod(0o444)
    (tmp_path / "d").mkdir()
    for name, why in (("f", "marked read-only"), ("d", "directory")):
        with pytest.raises(ExportError, match=why):
            write_atomically(tmp_path / name, b"2")
    assert here(tmp_path) == ["d", "f"] and (tmp_path / "f").read_bytes() == b"1"


def test_missing_folders_above_are_made(tmp_path):
    put(tmp_path / "a" / "b" / "out")
    assert (
        write_atomically(tmp_path / "c" / "d" / "f", b"1").exists()
        and (tmp_path / "a" / "b" / "out" / "a.txt").exists()
    )


def test_a_name_as_long_as_the_system_takes_is_written(tmp_path):
    assert write_atomically(tmp_path / ("n" * 255), b"1").read_bytes() == b"1"


def test_what_a_killed_writer_left_is_removed_and_what_looks_alike_is_not(tmp_path):
    killed(f"files.write_atomically(Path({str(tmp_path / 'f')!r}), b'1')", hook="os.replace")
    assert len(here(tmp_path)) == 1
    for name in (".chipfit-notes", ".chipfit-0123", "chipfit-0123456789abcdef"):
        (tmp_path / name).write_text("mine")
    write_atomically(tmp_path / "g", b"1")
    assert here(tmp_path) == [".chipfit-0123", ".chipfit-notes", "chipfit-0123456789abcdef", "g"]


def test_what_a_living_writer_has_begun_is_left_alone(tmp_path):
    with files.locked_temporary(tmp_path, folder=True) as work, files.locked_temporary(tmp_path, folder=False) as file:
        put(tmp_path / "out")
        assert here(tmp_path) == sorted([work.name, file.name, "out"])
    assert here(tmp_path) == ["out"]


# ---------------------------------------------------------------- folders


@pytest.fixture(params=["exchange", "two renames"])
def system(request, monkeypatch):
    """Systems that exchange two folders in one step, and those that cannot."""
    if request.param == "two renames":
        monkeypatch.setattr(files, "exchange_folders", lambda a, b: False)


def test_a_folder_replaces_an_empty_one_and_one_of_ours(tmp_path, system):
    (tmp_path / "out").mkdir(mode=0o700)
    put(tmp_path / "out", "1")
    put(tmp_path / "out", "2")
    assert (tmp_path / "out" / "a.txt").read_text() == "2"
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
    assert here(tmp_path) == ["out"]


def foreign_file(out):
    out.write_text("mine")


def foreign_folder(out):
    out.mkdir()
    (out / "thesis.txt").write_text("mine")


def foreign_manifest(out):
    out.mkdir()
    (out / MANIFEST).write_text('{"manifest_version": 3, "name": "a browser extension"}')


def foreign_guest(out):
    put(out)
    (out / "thesis.txt").write_text("mine")


def foreign_inside(out):
    put(out)
    (out / MANIFEST).write_text(json.dumps({"chipfit": "1", "files": {"a.txt": {}, "data": {}}}))
    (out / "data").mkdir()
    (out / "data" / "thesis.txt").write_text("mine")


def everything(folder):
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


FOREIGN = [foreign_file, foreign_folder, foreign_manifest, foreign_guest, foreign_inside]


@pytest.mark.parametrize("make", FOREIGN)
def test_nothing_that_is_not_ours_is_replaced(tmp_path, make):
    make(tmp_path / "out")
    before = everything(tmp_path)
    with pytest.raises(ExportError, match="exists and is not a test"):
        put(tmp_path / "out")
    assert everything(tmp_path) == before


def test_what_comes_while_we_write_is_not_replaced_either(tmp_path, system):
    def write():
        with replace_folder(tmp_path / "out", "a test") as new:
            (new / "a.txt").write_text("new")
            foreign_guest(tmp_path / "out")

    with pytest.raises(ExportError, match=r"also holds 'thesis\.txt'"):
        write()
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
    assert here(tmp_path) == ["out"]


def test_an_error_leaves_what_was_there_and_nothing_else(tmp_path, system):
    put(tmp_path / "out", "1")
    with pytest.raises(ZeroDivisionError), replace_folder(tmp_path / "out", "a test") as new:
        (new / "a.txt").write_text(str(1 / 0))
    with pytest.raises(ExportError, match="cannot be written"), replace_folder(tmp_path / "out", "a test") as new:
        (new / "missing" / "a.txt").write_text("x")
    assert here(tmp_path) == ["out"] and (tmp_path / "out" / "a.txt").read_text() == "1"


def test_a_link_to_a_folder_is_followed(tmp_path, system):
    put(tmp_path / "real", "1")
    (tmp_path / "link").symlink_to("real")
    put(tmp_path / "link", "2")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "a.txt").read_text() == "2"


PUT = """
with files.replace_folder(Path({out!r}), "a test") as new:
    (new / "a.txt").write_text("new")
    (new / "manifest.json").write_text('{{"chipfit": "1", "files": {{"a.txt": {{}}}}}}')
"""


def test_a_writer_killed_before_its_rename_changes_nothing(tmp_path):
    put(tmp_path / "out", "old")
    killed(PUT.format(out=str(tmp_path / "out")))
    assert (tmp_path / "out" / "a.txt").read_text() == "old" and len(here(tmp_path)) == 2
    put(tmp_path / "other")
    assert here(tmp_path) == ["other", "out"]


def test_a_writer_killed_between_two_renames_loses_nothing(tmp_path):
    put(tmp_path / "out", "old")
    # the first rename finds a folder, the second one moves it
    third = "exchange_folders = lambda a, b: False\nreal, calls = os.rename, []\n"
    third += "os.rename = lambda a, b: die() if calls.append(a) or len(calls) == 3 else real(a, b)\nfiles.unused"
    killed(PUT.format(out=str(tmp_path / "out")), hook=third)
    assert not (tmp_path / "out").exists()
    assert (current_folder(tmp_path / "out") / "a.txt").read_text() == "old"  # where `load` reads it
    write_atomically(tmp_path / "f", b"1")  # whoever writes next gives it its name back
    assert here(tmp_path) == ["f", "out"] and (tmp_path / "out" / "a.txt").read_text() == "old"


# ---------------------------------------------------------------- killed at any instant


def test_killed_writers_lose_nothing_and_readers_find_a_result_at_every_instant():
    """A small share of `make kills`; its exit code is 1 as well when writers that do lose something go unnoticed."""
    script = Path(__file__).parents[1] / "benchmarks/kills.py"
    run = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = python(run, "--kills", 4, "--loads", 6)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills: 0 wrong; 6 loads against two writers: 0 wrong" in done.stdout


# ---------------------------------------------------------------- the disk under results


X = [images(2)]


@pytest.fixture(scope="module")
def result():
    return quantized(sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), X)


def refusal(error, words, act, *arguments, **options):
    """The refusal of a call, of its type and with its words; it stands for nothing but what the disk says."""
    with pytest.raises(error, match=words) as e:
        act(*arguments, **options)
    assert isinstance(e.value.__cause__, (type(None), OSError, ValueError, RecursionError))
    return e.value


@pytest.mark.parametrize(
    "code, cure", [(errno.ENOSPC, "free disk"), (errno.EACCES, "permissions"), (errno.EROFS, "can be written")]
)
def test_a_folder_that_takes_no_file_is_named_with_the_cure(result, tmp_path, monkeypatch, code, cure):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    e = refusal(ExportError, os.strerror(code), result.export, tmp_path / "m.onnx")
    assert cure in e.hint and str(tmp_path) in e.where and list(tmp_path.iterdir()) == []


def test_a_limit_on_the_size_of_files_is_met_while_writing(result, tmp_path):
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
def test_a_path_that_no_disk_takes_is_refused(result, tmp_path, name, words):
    (tmp_path / "file").write_text("")
    refusal(ExportError, words, result.export, tmp_path / name)


@pytest.mark.parametrize("name", ["9" * 300, "9" * 5000, "a\0b"], ids=["too long", "far too long", "with a null"])
def test_a_path_that_cannot_exist_is_refused_where_it_is_read(name):
    data = images(1)
    for read in (
        chipfit.load,
        load_data,
        lambda path: chipfit.compare(path, path),
        lambda path: chipfit.verify_file(f"{path}.onnx", data),
        lambda path: chipfit.quantize(f"{path}.onnx", data, progress=False),
    ):
        with pytest.raises(ChipfitError):
            read(name)


def test_a_folder_in_the_place_of_a_file_is_refused(result, tmp_path):
    (tmp_path / "m.json").mkdir()
    refusal(ExportError, "directory", result.export, tmp_path / "m.json")


def test_a_full_disk_of_temporary_files_does_not_matter_to_a_file_elsewhere(result, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    assert result.export(tmp_path / "new" / "m.onnx").is_file()
    assert [p.name for p in tmp_path.rglob("*")] == ["new", "m.onnx"]


@pytest.mark.parametrize("write", ["save", "export"])
def test_a_folder_in_which_nothing_can_be_made_is_tried_once(result, monkeypatch, write):
    tries = iter(["0" * 16])
    monkeypatch.setattr("chipfit.files.secrets.token_hex", lambda _: next(tries))
    refusal(ExportError, "No such file", getattr(result, write), "/proc/m.onnx")


def test_a_folder_that_may_not_be_read_is_not_replaced(result, tmp_path, monkeypatch):
    def refuse(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.setattr("chipfit.files.Path.iterdir", refuse)
    refusal(PlanError, "it may not be read", result.save, folder)


@pytest.mark.parametrize("runtime", ["onnxruntime", "litert"])
@pytest.mark.parametrize("endless", ["/dev/zero", "pipe"])
def test_what_has_no_end_is_not_read(result, tmp_path, runtime, endless):
    os.mkfifo(tmp_path / "pipe")
    refusal(
        RuntimeUnavailable,
        "is a folder, a device or a pipe",
        result.verify,
        X,
        runtime=runtime,
        path=tmp_path / endless,  # the absolute one as it is
    )


@pytest.mark.parametrize("path", [None, 5, b"x.json", ["x.json"]], ids=repr)
def test_what_is_no_path_is_refused(result, tmp_path, path):
    chip = chipfit.get_target_platform_capabilities("pytorch")
    for write in (result.export, result.save, result.report.save, partial(export_platform, "ort_cpu")):
        refusal(ExportError, "A path must be text", write, path)
    refusal(PlanError, "A path must be text", chipfit.load, path)
    refusal(ModelingError, "A path must be text", export_target_platform_capabilities, chip, path)
    if path is not None:
        refusal(RuntimeUnavailable, "A path must be text", result.verify, X, path=path)


@pytest.mark.parametrize("call", ["rmdir", "unlink"])
def test_a_save_that_is_interrupted_while_it_removes_its_folder_leaves_nothing(tmp_path, monkeypatch, call):
    """The second save exchanges its folder with the first one, which it then removes."""

    def save():
        with replace_folder(tmp_path / "s", "a saved result") as new:
            (new / "part").write_bytes(b"x")
            (new / MANIFEST).write_text(json.dumps({"chipfit": "1", "files": {"part": {}}}))

    save()
    real, calls = getattr(os, call), []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) in (1, 2):
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        save()
    assert len(calls) > 2 and here(tmp_path) == ["s"] and here(tmp_path / "s") == [MANIFEST, "part"]


def test_a_sparse_file_is_refused_by_its_size(tmp_path):
    with (tmp_path / "big.yaml").open("wb") as f:
        f.truncate(20 << 30)
    with pytest.raises(ConfigError, match=r"The file is sparse.*Got: 21474836480 bytes, of which the disk holds 0"):
        read_text(tmp_path / "big.yaml", ConfigError)
