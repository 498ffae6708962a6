"""Typed errors, whose messages state what is wrong, where, what was given, what is allowed and what to try."""

from __future__ import annotations

import difflib
import importlib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

_HOME = str(Path(__file__).parent) + os.sep
#: longest word and longest part of a message; a file may hold names of any length
_WORD, _PART = 200, 4000
_LONG_WORD = re.compile(rf"\S{{{_WORD + 1},}}")


class ChipfitError(Exception):
    """The base of every error that chipfit raises on purpose.

    The message is a sentence that states what is wrong, then the facts, then what to try.
    """

    def __init__(
        self, what: str, *, where: str = "", got: object = None, allowed: object = None, hint: str = ""
    ) -> None:
        self.what, self.where, self.hint = shortened(what), shortened(where), shortened(hint)
        self.got, self.allowed = (shortened(x) if isinstance(x, str) else x for x in (got, allowed))
        sentences = [what, *(f"{label.capitalize()}: {fact}" for label, fact in self.facts.items())]
        super().__init__(" ".join(f"{s.rstrip('.')}." for s in sentences))

    @property
    def facts(self) -> dict[str, object]:
        """The facts of the message by label, without the sentence."""
        facts = {"where": self.where or None, "got": self.got, "allowed": self.allowed, "try": self.hint or None}
        return {label: fact for label, fact in facts.items() if fact is not None}


def shortened(text: str) -> str:
    """Return a text without the middle of words, and of the whole, that are too long to be read."""
    return _cut(_LONG_WORD.sub(lambda m: _cut(m[0], _WORD), str(text)), _PART)


def _cut(text: str, most: int) -> str:
    half = most // 2 - 8
    return text if len(text) <= most else f"{text[:half]} ... [{len(text):,} characters] ... {text[-half:]}"


def raised_outside_chipfit(e: BaseException) -> bool:
    """Return whether an exception was raised in the user's code or a library, or by the call to it.

    Only such an exception may be turned into an error message; one that was raised inside chipfit is a bug, except an
    OutOfBoundsError, which stands for what the library does not check.
    """
    if isinstance(e, OutOfBoundsError):
        return True
    at = e.__traceback__ and e.__traceback__.tb_next
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is None or not at.tb_frame.f_code.co_filename.startswith(_HOME)


def raise_bug(e: Exception) -> None:
    """Raise an exception again if it was raised inside chipfit: then it is a bug, which no message may hide."""
    if not raised_outside_chipfit(e):
        raise e


def first_line(e: BaseException) -> str:
    """Return the first line of an exception's message; its type if the message is empty."""
    return str(e).strip().partition("\n")[0][:300] or type(e).__name__


def short_message(e: BaseException) -> str:
    """Return the type and the first line of an exception."""
    line, kind = first_line(e), type(e).__name__
    return line if line == kind else f"{kind}: {line}"


def import_optional(module: str, what: str, failure: type[ChipfitError], package: str = "", *, extra: str = "") -> Any:
    """Import a module of an optional library.

    Args:
        what: what needs it, as the subject of the message.
        package: the package that has it, if its name differs from the library's.
        extra: the extra of chipfit that installs it.

    Raises:
        failure: the import fails; the hint names the package to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        library = module.partition(".")[0]
        needed = f"'chipfit[{extra}]'" if extra else package or library
        raise failure(f"{what} needs {library}: {short_message(e)}", hint=f"pip install {needed}") from e


class PlatformError(ChipfitError):
    """A platform description is malformed or contradicts itself."""

    all: Sequence[PlatformError] = ()  #: all problems of the file, including this one


class ModelingError(PlatformError, AssertionError, ValueError):
    """A chip described in Python contradicts itself; an AssertionError and ValueError too, as users of MCT expect."""


class CaptureError(ChipfitError):
    """A model cannot be read into a Graph."""


class RefusedCall(CaptureError):
    """A model fails on the example input, when it is called as the user calls it."""


class GraphError(ChipfitError):
    """A graph violates an invariant; the message names the pass that broke it."""


class OutOfBoundsError(GraphError):
    """A call that a file describes would leave its own tensors, or computes sizes beyond all bounds."""


class DataError(ChipfitError):
    """Calibration or verification data cannot be used."""


class MemoryExceeded(ChipfitError):
    """A device ran out of memory; model and data are as they were, and a smaller batch may fit."""


class UnsupportedError(ChipfitError):
    """The platform or the file format does not support the request."""


class PlanError(ChipfitError):
    """A plan, or a saved result, is malformed, truncated, tampered with, or does not fit the model."""


class PruningError(PlanError):
    """Channels cannot be removed as requested: a limit would take whole layers, or no group of channels can shrink."""


class TrainingError(PlanError):
    """Training drove a number to zero, infinity or NaN, or scales out of the platform's rules."""


class ConfigError(ChipfitError, ValueError):
    """An option has the wrong type, is out of bounds, or contradicts another option."""


class NothingQuantizedError(ChipfitError):
    """Not a single tensor of the model would be quantized."""


class ExportError(ChipfitError):
    """A file could not be written."""


class RuntimeUnavailable(ChipfitError):
    """A device runtime is not installed or refuses the file."""


class VerificationError(ChipfitError):
    """A device, or the file that it runs, deviates from the plan."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during an optional step; `result` is the usable result without that step."""

    NOTE = "warning: interrupted"  #: beginning of the note that the step leaves

    def __init__(self, what: str, result: Any) -> None:
        where = "`.result` of this exception, at a prompt `sys.last_value.result`, holds what was decided until then"
        super().__init__(f"{what}; {where}")
        self.result = result


def interruption_note(notes: Iterable[str]) -> str:
    """Return the note of an interrupted step; "" if none was interrupted."""
    return next((n for n in notes if n.startswith(Interrupted.NOTE)), "")


class RegistrationError(ChipfitError):
    """An addition to the registry is incomplete, or its name is taken."""


class UnknownNameError(ChipfitError):
    """A name does not exist; the message lists similar names to try, or else the names that exist.

    Args:
        near: names to try before those that are spelled alike.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], *, near: Iterable[str] = (), hint: str = "") -> None:
        name, known = shortened(str(name)), sorted(map(str, known))  # users and files give any type
        self.near = list(dict.fromkeys([*near, *difflib.get_close_matches(name, known, n=5, cutoff=0.5)]))[:5]
        more = "" if len(known) <= 12 else f" and {len(known) - 12} more"
        allowed = None if self.near else ", ".join(map(repr, known[:12])) + more or "none is defined"
        hint = "; ".join(filter(None, [" or ".join(map(repr, self.near)), hint]))
        super().__init__(f"There is no {kind} named '{name}'", allowed=allowed, hint=hint)

    @property
    def choices(self) -> dict[str, Any]:
        """The names in the message, as arguments of another error."""
        return {"allowed": self.allowed, "hint": self.hint}


def check_known(kind: str, name: Any, known: Collection[str]) -> None:
    """Raise an UnknownNameError if a name does not exist."""
    if name not in known:
        raise UnknownNameError(kind, name, known)
