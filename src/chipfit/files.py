"""Atomic writing of files and folders, and reading with typed errors.

A reader finds the old content or the new one at every instant. A writer works beside its target under a unique
temporary name that it keeps locked, syncs everything to the disk, and renames once. The next writer removes what a
killed one left behind.
"""

import ctypes
import errno
import importlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from chipfit.errors import ChipfitError, ExportError

#: Windows opens no folders, renames no open file, and has locks of bytes in the place of flock(2)
WINDOWS = sys.platform == "win32"
#: file that lists the content of a folder, which proves that chipfit wrote it
MANIFEST = "manifest.json"
_UNFINISHED = re.compile(r"\.chipfit-[0-9a-f]{16}")
_Kinds = tuple[type[OSError | ValueError], ...]
_ANY = OSError, ValueError
#: AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
_HERE, _EXCHANGE = -100, 2


#: hint -> error numbers that it helps against
_HINTS = {
    "free disk space, or choose another disk": (errno.ENOSPC, errno.EDQUOT),
    "raise the limit on the size of files (ulimit -f), or choose another disk": (errno.EFBIG,),
    "change the permissions, or choose another folder": (errno.EACCES, errno.EPERM),
    "choose a folder that can be written": (errno.EROFS,),
    "choose a shorter name": (errno.ENAMETOOLONG,),
    "check the path": (errno.ENOENT,),
    "check the path: a file stands where it has a folder": (errno.ENOTDIR, errno.EEXIST),
    "name a file, not a folder": (errno.EISDIR,),
}


def write_atomically(path: Path, content: bytes) -> Path:
    """Replace a file. Links are followed; an existing file keeps its mode, a new one gets that of the umask.

    Raises:
        ExportError: the disk is full, the file or its folder is not writable, or the path is not a file; nothing is
            left behind.
    """
    with _typed(path, ExportError, "The file cannot be written", f"{len(content)} bytes"):
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        mode = stat.S_IMODE(target.stat().st_mode) if target.is_file() else None
        if mode is not None and not mode & 0o222:
            raise PermissionError(errno.EACCES, "it is marked read-only")
        with locked_temporary(target.parent, folder=False) as new:
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
def folder_beside(path: Path) -> Iterator[Path]:
    """Yield a temporary folder on the disk of a file to be written: in its folder, or in the nearest one that exists.

    Raises:
        ExportError: nothing can be made there.
    """
    with _typed(path, ExportError, "The file cannot be written", kinds=(OSError,)):
        with _typed(path, ExportError, "The file cannot be written"):
            parents = Path(os.path.realpath(path)).parents
            parent = next(p for p in parents if p.exists())
            if parent.is_dir():
                _sweep(parent)
        with locked_temporary(parent, folder=True) as folder:
            yield folder


@contextmanager
def replace_folder(directory: Path, what: str, refusal: type[ChipfitError] = ExportError) -> Iterator[Path]:
    """Yield a folder to fill, which replaces `directory` when the block ends; after an error nothing changes.

    An existing folder is replaced if it is empty, or if its manifest lists everything in it. Links are followed, and
    a folder keeps its mode.

    Args:
        what: name of the content in messages.
        refusal: error type if something else exists at that path.

    Raises:
        ExportError: the disk reports an error.
    """
    what_fails = "The folder cannot be written"
    with _typed(directory, ExportError, what_fails):
        target = Path(os.path.realpath(directory))
        check_replaceable(target, what, refusal)
    with _typed(directory, ExportError, what_fails, kinds=(OSError,)):
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with locked_temporary(target.parent, folder=True) as work:
            new = work / "new"
            new.mkdir()
            yield new
            for folder, _, names in os.walk(new):
                for name in (*names, ""):
                    _sync(Path(folder, name))
            install_folder(new, target, work / "old", lambda found: check_replaceable(found, what, refusal, directory))
            _sync(target.parent)


@contextmanager
def lock_folder(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a folder for this process while the block runs; yield False if another process holds it and not `wait`.

    Raises:
        ExportError: the disk reports an error.
    """
    with _typed(folder, ExportError, "The folder cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("ab")
    with lock:
        yield _lock(lock.fileno(), wait=wait)


def check_replaceable(
    directory: Path, what: str, refusal: type[ChipfitError] = ExportError, name: Path | None = None
) -> None:
    """Raise `refusal` unless `replace_folder` may remove the directory.

    Args:
        name: path of the directory in messages.
    """
    reason = why_not_replaceable(directory)
    if reason:
        message = f"'{name or directory}' exists and is not {what}: {reason}"
        raise refusal(message, hint="choose a new directory, or remove it yourself")


def check_writable(directory: Path) -> None:
    """Check that a folder can be made at a path, before long work is done for its content.

    Raises:
        ExportError: the disk refuses it.
    """
    target = Path(os.path.realpath(directory))
    there = next(p for p in target.parents if os.path.lexists(p))
    with (
        _typed(directory, ExportError, "The folder cannot be written", kinds=(OSError,)),
        locked_temporary(there, folder=True),
    ):
        pass


def why_not_replaceable(folder: Path) -> str:
    """Return why a path may not be replaced; "" if it is free, an empty folder, or a folder that chipfit wrote."""
    if not os.path.lexists(folder):
        return ""
    if not folder.is_dir():
        return "it is a file"
    try:
        content = list(folder.iterdir())
    except PermissionError:
        return "it may not be read"
    if not content:
        return ""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict) or "chipfit" not in manifest:
        return f"it has no {MANIFEST} of chipfit"
    foreign = sorted(p.name for p in content if p.name not in {MANIFEST, *manifest["files"]})
    if foreign:
        return f"it also holds '{foreign[0]}'"
    inside = ((p.name, why_not_replaceable(p)) for p in content if p.is_dir())
    return next((f"'{name}' is not chipfit's, {why}" for name, why in inside if why), "")


def current_folder(directory: Path) -> Path:
    """Return `directory`, or where its content is while (or after) a writer without folder exchange replaced it."""
    with suppress(OSError, ValueError):
        target = Path(os.path.realpath(directory))
        if not target.exists():
            for work in temporaries_in(target.parent):
                if (work / "old" / target.name).is_dir():
                    return work / "old" / target.name
    return directory


# ----------------------------------------------------------------------------------------------- implementation


def install_folder(new: Path, target: Path, old: Path, check_ours: Callable[[Path], None]) -> None:
    """Rename `new` to `target`; an existing folder is afterwards at `new`, or below `old`."""
    while True:
        if target.is_dir():
            shutil.copymode(target, new)
        try:
            os.rename(new, target)  # succeeds if the target is free or an empty folder
            return
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with suppress(FileNotFoundError):  # another writer has just moved it
            if exchange_folders(new, target):
                try:
                    check_ours(new)  # it may have appeared meanwhile
                except ChipfitError:
                    exchange_folders(new, target)
                    raise
                return
            aside = old / target.name
            old.mkdir(exist_ok=True)
            os.rename(target, aside)
            try:
                check_ours(aside)
            except ChipfitError:
                os.rename(aside, target)
                raise
            with suppress(OSError):  # another writer was faster: try again
                os.rename(new, target)
                return
            shutil.rmtree(aside)


def exchange_folders(a: Path, b: Path) -> bool:
    """Exchange two folders atomically; return False if the system does not support it.

    Raises:
        OSError: the system call fails.
    """
    if WINDOWS:
        return False
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
def locked_temporary(parent: Path, *, folder: bool) -> Iterator[Path]:
    """Yield a new temporary file or folder, locked while the block runs and removed afterwards if it is still there."""
    handles: list[int] = []
    while True:
        path = parent / f".chipfit-{secrets.token_hex(8)}"
        try:
            if _create_locked(path, handles, folder=folder):
                yield path
                return
        finally:
            _remove(path)
            while handles:
                os.close(handles.pop())


def _create_locked(path: Path, handles: list[int], *, folder: bool) -> bool:
    """Create and lock a file or folder; return False if another writer removed it in between.

    On Windows it stays unlocked, and writers leave the temporary files of others alone.
    """
    if folder:
        path.mkdir()
    if WINDOWS:
        if not folder:
            path.touch(exist_ok=False)
        return True
    try:
        handles.append(os.open(path, os.O_RDONLY if folder else os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except FileNotFoundError:
        if folder:
            return False
        raise
    _lock(handles[-1], wait=True)
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handles[-1]), path.stat())
    return False


def temporaries_in(folder: Path) -> list[Path]:
    return [Path(e) for e in os.scandir(folder) if _UNFINISHED.fullmatch(e.name)]


def _sweep(folder: Path) -> None:
    """Remove temporary files of killed writers; a folder that one had moved gets its name back."""
    for path in [] if WINDOWS else temporaries_in(folder):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # gone, or owned by another user
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
    """Lock an open file or folder for this process; return False if a living writer holds it."""
    if WINDOWS:
        return _lock_byte(handle, wait=wait)
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _lock_byte(handle: int, *, wait: bool) -> bool:
    """Lock the first byte of an open file on Windows; return False if another process holds it."""
    msvcrt = importlib.import_module("msvcrt")
    while True:
        try:
            msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
            return True
        except OSError:  # LK_LOCK gives up after ten seconds
            if not wait:
                return False


def _remove(path: Path) -> None:
    """Remove a file or folder if the system allows it, to the end even if the user interrupts that."""
    interrupted: KeyboardInterrupt | None = None
    while True:
        try:
            shutil.rmtree(path, ignore_errors=True)  # does nothing to a file
            with suppress(OSError):
                path.unlink(missing_ok=True)
            break
        except KeyboardInterrupt as e:
            interrupted = e
    if interrupted is not None:
        raise interrupted


def _sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to the disk."""
    if WINDOWS and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _typed(
    path: Any, failure: type[ChipfitError], what: str, got: str | None = None, kinds: _Kinds = _ANY
) -> Iterator[None]:
    """Turn disk errors inside the block into `failure`."""
    try:
        yield
    except kinds as e:
        why, hint = str(e), "check the path"  # a ValueError comes from a path that cannot exist
        if isinstance(e, OSError):
            why = e.strerror or why
            hint = next((hint for hint, numbers in _HINTS.items() if e.errno in numbers), "choose another folder")
        raise failure(f"{what}: {why}", where=str(path), got=got, hint=hint) from e


# ----------------------------------------------------------------------------------------------- archives

#: an archive is refused if its content is larger than this [bytes] and than this multiple of the file's size
LARGE, _RATIO = 1 << 30, 200
#: JSON escapes of surrogates: halves of a character, which may lack the other half
_SURROGATES = re.compile(r"\\u[dD][89a-fA-F]")
#: errors from reading an archive that is damaged, truncated, or compressed in an unknown way
ARCHIVE_ERRORS = OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError


def open_zip(path: str | Path) -> zipfile.ZipFile:
    """Open a zip archive and check that its entries are plain files inside it, unique, and of plausible size.

    Raises:
        ValueError: an entry is not.
        OSError, zipfile.BadZipFile: the archive cannot be read.
    """
    archive = zipfile.ZipFile(path)
    names = archive.namelist()
    links = [i.filename for i in archive.infolist() if stat.S_ISLNK(i.external_attr >> 16)]
    outside = [n for n in names if n.startswith(("/", "\\")) or ":" in n or ".." in n.replace("\\", "/").split("/")]
    size = sum(i.file_size for i in archive.infolist())
    try:
        if links or outside or len(set(names)) < len(names):
            raise ValueError(f"it holds links, paths outside or a name twice: {', '.join((links + outside)[:4])}")
        if size > max(LARGE, _RATIO * Path(path).stat().st_size):
            raise ValueError(f"its content would take {size} bytes")
    except (ValueError, OSError):
        archive.close()
        raise
    return archive


# ----------------------------------------------------------------------------------------------- reading


def names_object(text: str) -> bool:
    r"""Return whether a text has the form module:name; the colon after a drive of Windows does not count.

    >>> names_object("nets:build"), names_object(r"C:\\nets\\net.onnx")
    (True, False)
    """
    return ":" in re.sub(r"^[A-Za-z]:(?=[\\/])", "", text)


def path_of(given: Any, failure: type[ChipfitError]) -> Path:
    """Return a user's argument as a path.

    Raises:
        failure: it is neither text nor a path.
    """
    try:
        return Path(given)
    except TypeError:
        raise failure(
            "A path must be text or a pathlib.Path", got=type(given).__name__, allowed="text, or a pathlib.Path"
        ) from None


def near_path(path: Path) -> str:
    """Return the path beside this one whose name resembles it most; "" if there is none."""
    with suppress(OSError, ValueError):
        if near := get_close_matches(path.name, os.listdir(path.parent), n=1):
            return str(path.parent / near[0])
    return ""


def existing_file(given: Any, failure: type[ChipfitError], what: str) -> Path:
    """Return the path of an existing file.

    Raises:
        failure: it does not exist, or is a folder, a device or a pipe.
    """
    path = path_of(given, failure)
    if not os.path.isfile(path):  # also False for a path that cannot exist
        there = os.path.exists(path)
        why = "is a folder, a device or a pipe" if there else "does not exist"
        hint = ("" if there else near_path(path)) or "check the path"
        raise failure(f"{what} cannot be read: it {why}", where=str(path), hint=hint)
    check_not_sparse(path, os.stat(path), failure)
    return path


def check_not_sparse(path: Path, found: os.stat_result, failure: type[ChipfitError]) -> None:
    """Refuse a large file that takes little room on the disk, which would fill the memory with zeros."""
    held = 512 * getattr(found, "st_blocks", found.st_size)  # Windows has no count of blocks
    if found.st_size > max(LARGE, _RATIO * held):
        got, allowed = f"{found.st_size} bytes, of which the disk holds {held}", f"{LARGE} bytes of zeros"
        raise failure("The file is sparse: it has almost no content", where=str(path), got=got, allowed=allowed)


def wrap_read_errors(path: Any, failure: type[ChipfitError], what: str = "The file") -> AbstractContextManager[None]:
    """Check that a file exists, and turn disk errors inside the block into `failure`."""
    existing_file(path, failure, what)
    return _typed(path, failure, f"{what} cannot be read", kinds=(OSError,))


def list_folder(folder: Path, failure: type[ChipfitError], what: str) -> list[Path]:
    """Return the entries of a folder, sorted by name.

    Raises:
        failure: the folder does not exist or is not readable.
    """
    with _typed(folder, failure, f"{what} cannot be read", kinds=(OSError,)):
        return sorted(folder.iterdir())


def read_text(path: Any, failure: type[ChipfitError]) -> str:
    """Return the text of a file (a Path, or a resource of a package).

    Raises:
        failure: the file does not exist, is not readable, is a folder, or is not UTF-8.
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
    """Return the data of a YAML file inside a package of chipfit."""
    text = (resources.files(package) / name).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_json(path: Path, failure: type[ChipfitError]) -> Any:
    """Return the data of a JSON file.

    Raises:
        failure: as `read_text`; also if the text is not JSON, contains NaN or Infinity, or nests too deep.
    """
    return parse_json(read_text(path, failure), failure, where=str(path))


def parse_json(text: str, failure: type[ChipfitError], *, where: str) -> Any:
    """Return the data of a JSON text; raises as `read_json`."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not a number in JSON")

    try:
        if _SURROGATES.search(text):
            json.dumps(json.loads(text), ensure_ascii=False).encode()
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as e:
        raise failure(f"The text is not JSON: {e.msg}", where=f"{where}, line {e.lineno}, column {e.colno}") from e
    except ValueError as e:  # NaN, an integer of thousands of digits, half a character
        raise failure(f"The JSON has an invalid number or text: {e}", where=where) from e
    except RecursionError as e:
        raise failure("The data nest too deep to be read", where=where) from e
