"""Download files of packages and repositories into a folder that git ignores."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gallery.entries import SOURCES

FOLDER = Path(os.environ.get("GALLERY", "gallery"))
#: folder of git directories OWNER+NAME/repo, to read instead of cloning
REPOSITORIES = os.environ.get("GALLERY_REPOSITORIES", "")


class Missing(Exception):
    """A file that cannot be had here."""


def path_of(file: str) -> Path:
    """Return the local path of SOURCE:PATH, after download.

    Raises:
        Missing: The source cannot be reached, or has no such file.
    """
    source, _, path = file.partition(":")
    return paths_of(source, [path])[0]


def paths_of(source: str, paths: Iterable[str]) -> list[Path]:
    """Return the local paths of several files of a source.

    Raises:
        Missing: The source cannot be reached, or lacks one of the files.
    """
    folder, paths = FOLDER / source, list(paths)
    absent = [p for p in paths if not (folder / p).exists()]
    if absent and "pip" in SOURCES[source]:
        _unpack(SOURCES[source]["pip"], folder)
    elif absent:
        _blobs(_repository(SOURCES[source]["github"]), absent, folder)
    if absent := [p for p in paths if not (folder / p).exists()]:
        raise Missing(f"'{source}' has no file {absent[0]}")
    return [folder / p for p in paths]


def names_of(source: str, under: str, suffix: str) -> list[str]:
    """Return the paths of a repository's files below a folder, in order."""
    listed = ["ls-tree", "-r", "--name-only", "HEAD", under]
    names = _git(_repository(SOURCES[source]["github"]), *listed).decode().splitlines()
    return sorted(n for n in names if n.endswith(suffix))


def _unpack(requirement: str, folder: Path) -> None:
    wheels = FOLDER / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", wheels, requirement], capture_output=True, text=True, check=False)
    name = requirement.partition("==")[0].replace("-", "_").lower()
    found = [w for w in sorted(wheels.glob("*.whl")) if w.name.lower().startswith(f"{name}-")]
    if not found:
        raise Missing(f"pip download {requirement} failed: {done.stderr.strip().splitlines()[-1:]}")
    zipfile.ZipFile(found[-1]).extractall(folder)


def _repository(name: str) -> Path:
    given = Path(REPOSITORIES) / name.replace("/", "+") / "repo"
    if REPOSITORIES and given.exists():
        return given
    cloned = FOLDER / "repositories" / name.replace("/", "+")
    if not cloned.exists():
        command = ["git", "clone", "--quiet", "--bare", "--depth", "1", f"https://github.com/{name}", str(cloned)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            raise Missing(f"{' '.join(command)} failed")
    return cloned


def _git(folder: Path, *words: str, given: bytes = b"") -> bytes:
    done = subprocess.run(["git", "-C", str(folder), *words], input=given, capture_output=True, check=False)
    if done.returncode:
        raise Missing(f"git {' '.join(words[:2])} failed in {folder}")
    return done.stdout


def _blobs(repository: Path, paths: list[str], folder: Path) -> None:
    """Write files of a repository's newest commit; those that it lacks are left out."""
    out = _git(repository, "cat-file", "--batch", given="".join(f"HEAD:{p}\n" for p in paths).encode())
    start = 0
    for path in paths:
        end = out.index(b"\n", start)
        head = out[start:end].rsplit(b" ", 2)
        start = end + 1
        if head[-1] == b"missing":
            continue
        size = int(head[-1])
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(out[start : start + size])
        start += size + 1
