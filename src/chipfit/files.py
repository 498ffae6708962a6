"""Files appear whole or not at all, and what the disk refuses is said in one way."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from chipfit.errors import ChipfitError, ExportError

#: what the disk says -> what to try
_CURES = {
    errno.ENOSPC: "free disk space, or choose another disk",
    errno.EDQUOT: "free disk space, or choose another disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or choose another disk",
    errno.EACCES: "change the permissions, or choose another folder",
    errno.EPERM: "change the permissions, or choose another folder",
    errno.EROFS: "choose a folder that can be written",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path: a file stands where it has a folder",
    errno.EEXIST: "check the path: a file stands where it has a folder",
    errno.EISDIR: "name a file, not a folder",
}


def refused_by_disk(e: OSError | ValueError) -> tuple[str, str]:
    """What the disk says in words, and what to try; a ValueError is of a path that no disk can have."""
    if isinstance(e, OSError):
        return e.strerror or str(e), _CURES.get(e.errno or 0, "choose another folder")
    return str(e), "check the path"


def write_atomically(path: Path, content: bytes) -> Path:
    """Write to a temporary file in the same folder, then rename it over `path`.

    Raises:
        ExportError: the disk is full, the folder does not exist or may not be written; nothing is left behind.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except (OSError, ValueError) as e:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        why, cure = refused_by_disk(e)
        raise ExportError(
            f"The file cannot be written: {why}", where=str(path), got=f"{len(content)} bytes", hint=cure
        ) from e
    return path


#: an archive that says to hold more than this [bytes], and more than this many times its own size, is refused
_LARGE, _RATIO = 1 << 30, 200


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


def read_text(path: Any, failure: type[ChipfitError]) -> str:
    """The text of a file (a Path, or a resource of a package).

    Raises:
        failure: there is no such file, it may not be read, it is a folder, or it is not UTF-8.
    """
    try:
        return str(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as e:
        got = f"byte 0x{e.object[e.start]:02x} at position {e.start}"
        hint = "save it as UTF-8 text"
        raise failure("The file is not text in UTF-8", where=str(path), got=got, hint=hint) from e
    except (OSError, ValueError) as e:
        why, cure = refused_by_disk(e)
        raise failure(f"The file cannot be read: {why}", where=str(path), hint=cure) from e


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
        return json.loads(text, parse_constant=no_number)
    except json.JSONDecodeError as e:
        raise failure(f"This is not JSON: {e.msg}", where=f"{where}, line {e.lineno}, column {e.colno}") from e
    except ValueError as e:  # the constants above, or an integer of thousands of digits
        raise failure(f"A number is not understood: {e}", where=where) from e
    except RecursionError as e:
        raise failure("The data nest too deep to be read", where=where) from e
