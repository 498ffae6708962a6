"""Files appear whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
import zipfile
from pathlib import Path

from chipfit.errors import ExportError


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
    except OSError as e:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise ExportError(
            f"The file cannot be written: {e.strerror or e}",
            where=str(path),
            got=f"{len(content)} bytes",
            hint="free disk space or choose another folder",
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
