"""Rules of Windows that Linux can enforce: no modules of POSIX, and files in use are neither moved nor removed."""

import ctypes
import errno
import mmap
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

from chipfit import files
from chipfit.calibration import source

#: modules that Python lacks on Windows
POSIX_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "syslog")
#: names that the standard modules lack on Windows
POSIX_NAMES = {
    os: ("O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "fork", "getuid", "geteuid", "getpgid", "killpg", "setsid", "uname"),
    signal: ("SIGKILL", "SIGALRM", "SIGHUP", "SIGUSR1", "alarm", "setitimer"),
    mmap: ("MADV_DONTNEED", "MADV_WILLNEED"),
}


def in_use(path: str | Path) -> list[str]:
    """Return the files at or below a path that this process has open or mapped."""
    target = os.path.realpath(path)
    held = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    for number in os.listdir("/proc/self/fd"):
        if os.path.exists(link := f"/proc/self/fd/{number}"):
            held.append(os.readlink(link))
    return [p for p in held if p == target or p.startswith(target + "/")]


def refuse_if_in_use(*paths: str | Path) -> None:
    for path in paths:
        if os.path.exists(path) and (held := in_use(path)):
            raise PermissionError(errno.EACCES, "The process cannot access the file, which is in use", held[0])


class Locks:
    """Locks of bytes, as in msvcrt: one for each open file, whose end releases it."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}

    def locking(self, handle: int, how: int, size: int) -> None:
        place = os.readlink(f"/proc/self/fd/{handle}")
        self.held = {k: p for k, p in self.held.items() if os.path.exists(f"/proc/self/fd/{k}")}
        if any(p == place and k != handle for k, p in self.held.items()):
            raise PermissionError(errno.EACCES, "Permission denied")
        self.held[handle] = place


@pytest.fixture
def windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files, locks and signals behave as on Windows, once pytest has made its folder."""
    msvcrt = ModuleType("msvcrt")
    vars(msvcrt).update(LK_LOCK=1, LK_NBLCK=2, locking=Locks().locking)
    monkeypatch.setitem(sys.modules, "msvcrt", msvcrt)
    for name in POSIX_MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    for module, names in POSIX_NAMES.items():
        for name in names:
            monkeypatch.delattr(module, name, raising=False)
    for module in (files, source):
        monkeypatch.setattr(module, "WINDOWS", True)
    for name, rule in {
        "open": _open,
        "fsync": _fsync,
        "rename": _rename,
        "replace": _replace,
        "unlink": _unlink,
    }.items():
        monkeypatch.setattr(os, name, rule(getattr(os, name)))
    monkeypatch.setattr(ctypes, "CDLL", _library(ctypes.CDLL))


def _open(real):
    def opened(path, flags, mode=0o777, *, dir_fd=None):
        removing = sys._getframe(1).f_code.co_filename.endswith("shutil.py")  # as rmtree does here, and not on Windows
        if os.path.isdir(path) and not removing:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, mode, dir_fd=dir_fd)

    return opened


def _fsync(real):
    def fsync(handle):
        facts = dict(line.split(maxsplit=1) for line in Path(f"/proc/self/fdinfo/{handle}").read_text().splitlines())
        if int(facts["flags:"], 8) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(handle)

    return fsync


def _rename(real):
    def rename(old, new):
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", str(new))
        refuse_if_in_use(old)
        real(old, new)

    return rename


def _replace(real):
    def replace(old, new):
        refuse_if_in_use(old, new)
        real(old, new)

    return replace


def _unlink(real):
    def unlink(path, *, dir_fd=None):
        refuse_if_in_use(path if dir_fd is None else Path(os.readlink(f"/proc/self/fd/{dir_fd}"), path))
        real(path, dir_fd=dir_fd)

    return unlink


def _library(real):
    def load(name, *args, **kwargs):
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        return real(name, *args, **kwargs)

    return load


RULES = {"open": _open, "fsync": _fsync, "rename": _rename, "replace": _replace, "unlink": _unlink}
