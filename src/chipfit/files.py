"""Files and folders appear whole or not at all: at every instant a reader finds the old one or the new one.

A writer works beside its target under a name that nobody else uses, holds a lock on that as long as it lives, brings
everything to the disk, and renames once. What a killed writer has left is removed by the next one.
"""

import ctypes
import errno
import json
import os
import re
import secrets
import shutil
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from chipfit.errors import ChipfitError, ExportError

#: lists what a folder holds, and by that proves that chipfit wrote it
MANIFEST = "manifest.json"
_UNFINISHED = re.compile(r"\.chipfit-[0-9a-f]{16}")
_Kinds = tuple[type[OSError | ValueError], ...]
_ANY = OSError, ValueError
#: of renameat2(2)
_HERE, _EXCHANGE = -100, 2


#: what to try -> where the disk says one of these
_CURES = {
    "free disk space, or choose another disk": (errno.ENOSPC, errno.EDQUOT),
    "raise the limit on the size of files (ulimit -f), or choose another disk": (errno.EFBIG,),
    "change the permissions, or choose another folder": (errno.EACCES, errno.EPERM),
    "choose a folder that can be written": (errno.EROFS,),
    "choose a shorter name": (errno.ENAMETOOLONG,),
    "check the path": (errno.ENOENT,),
    "check the path: a file stands where it has a folder": (errno.ENOTDIR, errno.EEXIST),
    "name a file, not a folder": (errno.EISDIR,),
}


def describe_disk_error(e: OSError | ValueError) -> tuple[str, str]:
    """What the disk says in words, and what to try; a ValueError is of a path that no disk can have."""
    if isinstance(e, OSError):
        cure = next((cure for cure, codes in _CURES.items() if e.errno in codes), "choose another folder")
        return e.strerror or str(e), cure
    return str(e), "check the path"


def write_atomically(path: Path, content: bytes) -> Path:
    """Replace a file. A link is followed; a file that was there keeps its mode, a new one gets that of the umask.

    Raises:
        ExportError: the disk is full, the file or its folder may not be written, or something else than a file stands
            there; nothing is left behind.
    """
    with _typed(path, ExportError, "The file cannot be written", f"{len(content)} bytes"):
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        mode = stat.S_IMODE(target.stat().st_mode) if target.is_file() else None
        if mode is not None and not mode & 0o222:
            raise PermissionError(errno.EACCES, "it is marked read-only")
        with _unfinished(target.parent, folder=False) as new:
            with new.open("wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
            if mode is not None:
                os.chmod(new, mode)
            os.replace(new, target)
            _sync(target.parent)
    return path


@contextmanager
def replace_folder(directory: Path, what: str, refusal: type[ChipfitError] = ExportError) -> Iterator[Path]:
    """A folder to fill, which takes the place of `directory` when the block ends; with an error, nothing changes.

    What stood there is removed if it is empty, or if its manifest lists all that it holds. Links are followed, and a
    folder keeps its mode.

    Args:
        what: what the folder holds, as messages call it.
        refusal: raised when something else stands there.

    Raises:
        ExportError: the disk refuses.
    """
    what_fails = "The folder cannot be written"
    with _typed(directory, ExportError, what_fails):
        target = Path(os.path.realpath(directory))
        check_replaceable(target, what, refusal)
    with _typed(directory, ExportError, what_fails, kinds=(OSError,)):
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with _unfinished(target.parent, folder=True) as work:
            new = work / "new"
            new.mkdir()
            yield new
            for folder, _, names in os.walk(new):
                for name in (*names, ""):
                    _sync(Path(folder, name))
            _put(new, target, work / "old", lambda found: check_replaceable(found, what, refusal, directory))
            _sync(target.parent)


@contextmanager
def lock_folder(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Holds a folder for this process while the block runs; False where another one does, and `wait` is not asked for.

    Raises:
        ExportError: the disk refuses.
    """
    with _typed(folder, ExportError, "The folder cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    with lock:
        yield _lock(lock.fileno(), wait=wait)


def check_replaceable(
    directory: Path, what: str, refusal: type[ChipfitError] = ExportError, name: Path | None = None
) -> None:
    """Raise `refusal` unless `replace_folder` may remove what stands there.

    Args:
        name: what messages call the directory.
    """
    reason = why_not_replaceable(directory)
    if reason:
        message = f"'{name or directory}' exists and is not {what}: {reason}"
        raise refusal(message, hint="choose a new directory, or remove it yourself")


def why_not_replaceable(folder: Path) -> str:
    """Why a folder is nothing that chipfit wrote; "" for one that it did, an empty one, or none."""
    if not os.path.lexists(folder):
        return ""
    if not folder.is_dir():
        return "it is a file"
    try:
        held = list(folder.iterdir())
    except PermissionError:
        return "it may not be read"
    if not held:
        return ""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict) or "chipfit" not in manifest:
        return f"it has no {MANIFEST} of chipfit"
    foreign = sorted(p.name for p in held if p.name not in {MANIFEST, *manifest["files"]})
    if foreign:
        return f"it also holds '{foreign[0]}'"
    inside = ((p.name, why_not_replaceable(p)) for p in held if p.is_dir())
    return next((f"'{name}' is not chipfit's, {why}" for name, why in inside if why), "")


def current_folder(directory: Path) -> Path:
    """`directory`, or where it is while a writer that cannot exchange folders replaces it, or has died doing so."""
    with suppress(OSError, ValueError):
        target = Path(os.path.realpath(directory))
        if not target.exists():
            for work in _unfinished_in(target.parent):
                if (work / "old" / target.name).is_dir():
                    return work / "old" / target.name
    return directory


# ----------------------------------------------------------------------------------------------- how it is done


def _put(new: Path, target: Path, old: Path, demand_ours: Callable[[Path], None]) -> None:
    """Give `new` the name `target`; what stood there is then at `new`, or below `old`."""
    while True:
        if target.is_dir():
            shutil.copymode(target, new)
        try:
            os.rename(new, target)  # where nothing stands, or an empty folder
            return
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with suppress(FileNotFoundError):  # another writer has just put it aside
            if _exchange(new, target):
                try:
                    demand_ours(new)  # it may have come while we wrote
                except ChipfitError:
                    _exchange(new, target)
                    raise
                return
            aside = old / target.name
            old.mkdir(exist_ok=True)
            os.rename(target, aside)
            try:
                demand_ours(aside)
            except ChipfitError:
                os.rename(aside, target)
                raise
            with suppress(OSError):  # another writer was faster: once more
                os.rename(new, target)
                return
            shutil.rmtree(aside)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot.

    Raises:
        OSError: it can, and refuses.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))


@contextmanager
def _unfinished(parent: Path, *, folder: bool) -> Iterator[Path]:
    """A new file or folder that is locked while the block runs; what is left of it is removed."""
    while True:
        path = parent / f".chipfit-{secrets.token_hex(8)}"
        if folder:
            path.mkdir()
        try:
            lock = os.open(path, os.O_RDONLY if folder else os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileNotFoundError:
            if folder:
                continue  # swept before it was locked
            raise
        _lock(lock, wait=True)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                break
        os.close(lock)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def _unfinished_in(folder: Path) -> list[Path]:
    return [Path(e) for e in os.scandir(folder) if _UNFINISHED.fullmatch(e.name)]


def _sweep(folder: Path) -> None:
    """Remove what killed writers have left; a folder that one had put aside gets its name back."""
    for path in _unfinished_in(folder):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # gone, or somebody else's
            continue
        try:
            if _lock(lock, wait=False):
                for aside in (path / "old").iterdir() if (path / "old").is_dir() else ():
                    if not os.path.lexists(folder / aside.name):
                        os.rename(aside, folder / aside.name)
                _remove(path)
        finally:
            os.close(lock)


def _lock(handle: int, *, wait: bool) -> bool:
    """Lock an open file or folder for this process; False when a living writer holds it."""
    try:
        import fcntl
    except ImportError:  # no such locks here: one's own is one's own, and nothing of others is touched
        return wait
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)  # does nothing to a file
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _typed(
    path: Any, failure: type[ChipfitError], what: str, got: str | None = None, kinds: _Kinds = _ANY
) -> Iterator[None]:
    """Say in one way what the disk refuses; a ValueError is of a path that no disk can have."""
    try:
        yield
    except kinds as e:
        why, cure = describe_disk_error(e)
        raise failure(f"{what}: {why}", where=str(path), got=got, hint=cure) from e


# ----------------------------------------------------------------------------------------------- archives

#: an archive that says to hold more than this [bytes], and more than this many times its own size, is refused
_LARGE, _RATIO = 1 << 30, 200
#: where JSON writes a character in two halves, or one of them alone
_HALVES = re.compile(r"\\u[dD][89a-fA-F]")
#: what reading an archive raises that is damaged, cut off, or packed in an unknown way
ARCHIVE_ERRORS = OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError


def open_zip(path: str | Path) -> zipfile.ZipFile:
    """A zip archive whose entries are plain files inside it, each once, and of a size that the archive can hold.

    Raises:
        ValueError: they are not.
        OSError, zipfile.BadZipFile: it cannot be read.
    """
    archive = zipfile.ZipFile(path)
    names = archive.namelist()
    links = [i.filename for i in archive.infolist() if stat.S_ISLNK(i.external_attr >> 16)]
    outside = [n for n in names if n.startswith(("/", "\\")) or ":" in n or ".." in n.replace("\\", "/").split("/")]
    size = sum(i.file_size for i in archive.infolist())
    try:
        if links or outside or len(set(names)) < len(names):
            raise ValueError(f"it holds links, paths outside or a name twice: {', '.join((links + outside)[:4])}")
        if size > max(_LARGE, _RATIO * Path(path).stat().st_size):
            raise ValueError(f"it says to hold {size} bytes")
    except (ValueError, OSError):
        archive.close()
        raise
    return archive


# ----------------------------------------------------------------------------------------------- reading


def path_of(given: Any, failure: type[ChipfitError]) -> Path:
    """What an argument names on the disk.

    Raises:
        failure: it is no text and no path.
    """
    try:
        return Path(given)
    except TypeError:
        raise failure("This is no path", got=type(given).__name__, allowed="text, or a pathlib.Path") from None


def existing_file(given: Any, failure: type[ChipfitError], what: str) -> Path:
    """The path of a file that is there.

    Raises:
        failure: it is not, or is something without an end, such as a pipe or /dev/zero.
    """
    path = path_of(given, failure)
    if not os.path.isfile(path):  # False also of a name that no disk can have
        why = "is a folder, a device or a pipe" if os.path.exists(path) else "does not exist"
        raise failure(f"{what} cannot be read: it {why}", where=str(path), hint="check the path")
    return path


def wrap_read_errors(path: Any, failure: type[ChipfitError], what: str = "The file") -> AbstractContextManager[None]:
    """Say in one way why the disk does not let `what` be read."""
    existing_file(path, failure, what)
    return _typed(path, failure, f"{what} cannot be read", kinds=(OSError,))


def list_folder(folder: Path, failure: type[ChipfitError], what: str) -> list[Path]:
    """What a folder holds, by name.

    Raises:
        failure: there is no such folder, or it may not be read.
    """
    with _typed(folder, failure, f"{what} cannot be read", kinds=(OSError,)):
        return sorted(folder.iterdir())


def read_text(path: Any, failure: type[ChipfitError]) -> str:
    """The text of a file (a Path, or a resource of a package).

    Raises:
        failure: there is no such file, it may not be read, it is a folder, or it is not UTF-8.
    """
    with wrap_read_errors(path, failure):
        raw: bytes = path.read_bytes()
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        got = f"byte 0x{e.object[e.start]:02x} at position {e.start}"
        hint = "save it as UTF-8 text"
        raise failure("The file is not text in UTF-8", where=str(path), got=got, hint=hint) from e


def package_data(package: str, name: str) -> Any:
    """The data of a YAML file that stands in a package of chipfit."""
    text = (resources.files(package) / name).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_json(path: Path, failure: type[ChipfitError]) -> Any:
    """The data of a JSON file.

    Raises:
        failure: as `read_text`; also text that is no JSON, names a number that JSON does not have (NaN, Infinity), or
            nests too deep.
    """
    return parse_json(read_text(path, failure), failure, where=str(path))


def parse_json(text: str, failure: type[ChipfitError], *, where: str) -> Any:
    """The data of a JSON text; raises as `read_json`."""

    def no_number(name: str) -> Any:
        raise ValueError(f"{name} is no number in JSON")

    try:
        if _HALVES.search(text):
            json.dumps(json.loads(text), ensure_ascii=False).encode()
        return json.loads(text, parse_constant=no_number)
    except json.JSONDecodeError as e:
        raise failure(f"This is not JSON: {e.msg}", where=f"{where}, line {e.lineno}, column {e.colno}") from e
    except ValueError as e:  # the constants above, an integer of thousands of digits, half a character
        raise failure(f"A number or a text is not understood: {e}", where=where) from e
    except RecursionError as e:
        raise failure("The data nest too deep to be read", where=where) from e
