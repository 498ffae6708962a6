"""Files appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
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
