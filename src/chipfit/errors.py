"""Typed errors: each says what is wrong, where, what was given, what is allowed and what to try."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_HOME = str(Path(__file__).parent) + os.sep


class ChipfitError(Exception):
    """Base of every error that chipfit raises on purpose.

    The message is one readable text: a plain sentence, then the facts that were given, then the next step.
    """

    def __init__(
        self, what: str, *, where: str = "", got: object = None, allowed: object = None, hint: str = ""
    ) -> None:
        self.what, self.where, self.got, self.allowed, self.hint = what, where, got, allowed, hint
        sentences = [what, *(f"{label.capitalize()}: {fact}" for label, fact in self.facts.items())]
        super().__init__(" ".join(f"{s.rstrip('.')}." for s in sentences))

    @property
    def facts(self) -> dict[str, object]:
        """What was given beside the sentence, by label."""
        facts = {"where": self.where or None, "got": self.got, "allowed": self.allowed, "try": self.hint or None}
        return {label: fact for label, fact in facts.items() if fact is not None}


def raised_outside_chipfit(e: BaseException) -> bool:
    """Whether an exception arose in somebody else's code, or in the very call of it that was being tried.

    A refusal may stand for what a user's model or another library raises. What arose in here is a bug, and passes.
    """
    at = e.__traceback__ and e.__traceback__.tb_next
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is None or not at.tb_frame.f_code.co_filename.startswith(_HOME)


def first_line(e: BaseException) -> str:
    """What somebody else's exception says first; its type where it says nothing."""
    return str(e).strip().partition("\n")[0][:300] or type(e).__name__


def short_message(e: BaseException) -> str:
    """Type and first line of somebody else's exception."""
    said, kind = first_line(e), type(e).__name__
    return said if said == kind else f"{kind}: {said}"


def import_optional(module: str, what: str, failure: type[ChipfitError], package: str = "") -> Any:
    """A module of a library that not every installation has; `what` needs it.

    Raises:
        failure: it cannot be imported; says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        library = module.partition(".")[0]
        raise failure(f"{what} needs {library}: {short_message(e)}", hint=f"pip install {package or library}") from e


class PlatformError(ChipfitError):
    """A platform description is malformed or contradicts itself."""

    all: Sequence[PlatformError] = ()  #: every problem of the same file, this one included


class ModelingError(PlatformError, AssertionError, ValueError):
    """A chip described in Python contradicts itself; also AssertionError and ValueError, as users of MCT expect."""


class CaptureError(ChipfitError):
    """A model cannot be read into a Graph."""


class GraphError(ChipfitError):
    """A graph breaks its own invariants, named with the pass that broke it."""


class DataError(ChipfitError):
    """Calibration or verification data cannot be used."""


class UnsupportedError(ChipfitError):
    """The platform or the file format cannot hold what was asked for."""


class PlanError(ChipfitError):
    """A plan, or a saved result, is malformed, truncated, tampered with, or does not fit the model."""


class TrainingError(PlanError):
    """Training has driven a number to zero, infinity or NaN, or scales to where a platform's rules cannot hold."""


class ConfigError(ChipfitError, ValueError):
    """An option of a configuration is of the wrong kind, out of bounds, or contradicts another."""


class NothingQuantizedError(ChipfitError):
    """The call would have returned a model without one quantized tensor."""


class ExportError(ChipfitError):
    """A file could not be written."""


class RuntimeUnavailable(ChipfitError):
    """A device runtime is not installed or refuses the file."""


class VerificationError(ChipfitError):
    """A device, or the file that it runs, is not what a plan says."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while a step was being done that others do not need; `result` is what had been decided until then."""

    NOTE = "warning: interrupted"  #: how the note begins that such a step leaves

    def __init__(self, what: str, result: Any) -> None:
        where = "`.result` of this exception, at a prompt `sys.last_value.result`, holds what was decided until then"
        super().__init__(f"{what}; {where}")
        self.result = result


def interruption_note(notes: Iterable[str]) -> str:
    """The note of a step that was not done to its end; "" where all were."""
    return next((n for n in notes if n.startswith(Interrupted.NOTE)), "")


class RegistrationError(ChipfitError):
    """An addition to the registry is incomplete, or its name is taken."""


class UnknownNameError(ChipfitError):
    """A name was not found; the message lists near ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
        name, known = str(name), sorted(map(str, known))  # what is asked for, and what files hold, is of any type
        near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
        shown = near or known[:12]
        more = "" if near or len(known) <= 12 else f" and {len(known) - 12} more"
        label = "did you mean" if near else "known"
        allowed = f"{label} {', '.join(map(repr, shown))}{more}" if shown else "none is defined"
        super().__init__(f"There is no {kind} named '{name}'", allowed=allowed, hint=hint)
        self.near = near
