"""What the command line names in Python, as module:name; loads no framework by itself."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chipfit.errors import ChipfitError, PlatformError

if TYPE_CHECKING:
    from chipfit.platform.schema import Platform


def named(text: str, what: str, failure: type[ChipfitError]) -> Any:
    """The object that "module:name" names; modules of the current folder are found."""
    module, _, name = text.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as e:  # importing runs the user's code, which raises what it likes
        raise failure(
            f"The {what} '{text}' cannot be imported: {reason(e)}",
            allowed="module:name",
            hint="run from the folder that holds the module",
        ) from e
    finally:
        sys.path.pop(0)


def named_or_made(text: str, what: str, failure: type[ChipfitError], is_one: Callable[[Any], bool]) -> Any:
    """The object that "module:name" names if it is one, else what it returns when called."""
    thing = named(text, what, failure)
    return thing if is_one(thing) else made(thing, text, what, failure)


def made(thing: Any, text: str, what: str, failure: type[ChipfitError]) -> Any:
    """What the user's factory returns."""
    try:
        return thing()
    except Exception as e:  # the user's code again
        at = traceback.extract_tb(e.__traceback__)[-1]
        raise failure(
            f"The {what} '{text}' fails: {reason(e)}", where=f"{at.filename}:{at.lineno}, in {at.name}"
        ) from e


def reason(e: Exception) -> str:
    """Type and first line of somebody else's exception."""
    first = str(e).strip().splitlines()[0][:300] if str(e).strip() else ""
    return f"{type(e).__name__}: {first}" if first else type(e).__name__


def load_target(text: str) -> Platform:
    """A platform by name, from a YAML or JSON file, or a chip described in Python as `module:name` or `module:factory`.

    Raises:
        UnknownNameError, PlatformError: see `chipfit.load_platform`; PlatformError also when the module gives no chip.
    """
    from chipfit.platform.load import load as load_platform

    if not re.fullmatch(r"[A-Za-z_][\w.]*:\w+", text):
        return load_platform(text)
    is_chip = lambda thing: hasattr(thing, "to_platform") and not isinstance(thing, type)  # noqa: E731 -- one line
    return load_platform(named_or_made(text, "platform", PlatformError, is_chip))
