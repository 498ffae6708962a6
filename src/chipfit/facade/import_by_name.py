"""What users name in Python, as module:name; loads no framework by itself."""

import importlib
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chipfit.errors import ChipfitError, PlatformError, raised_outside_chipfit, short_message
from chipfit.platform.schema import Platform


def import_by_name(text: str, what: str, failure: type[ChipfitError]) -> Any:
    """The object that "module:name" names; modules of the current folder are found."""
    module, _, name = text.partition(":")
    if not (module and name) or module.startswith("."):
        raise failure(f"The {what} is not understood", got=text, allowed="module:name")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as e:  # importing runs the user's code, which raises what it likes
        if not raised_outside_chipfit(e):
            raise
        hint = "run from the folder that holds the module"
        raise failure(
            f"The {what} '{text}' cannot be imported: {short_message(e)}",
            where=_line(e),
            allowed="module:name",
            hint=hint,
        ) from e
    finally:
        sys.path.remove(here)


def import_or_call(text: str, what: str, failure: type[ChipfitError], is_one: Callable[[Any], bool]) -> Any:
    """The object that "module:name" names if it is one, else what it returns when called."""
    thing = import_by_name(text, what, failure)
    return thing if is_one(thing) else call_factory(thing, text, what, failure)


def call_factory(thing: Any, text: str, what: str, failure: type[ChipfitError]) -> Any:
    """What the user's factory returns."""
    try:
        return thing()
    except Exception as e:  # the user's code again
        if not raised_outside_chipfit(e):
            raise
        raise failure(f"The {what} '{text}' fails: {short_message(e)}", where=_line(e)) from e


def _line(e: Exception) -> str:
    """Where the user's code fails; "" where it was not reached."""
    frames = [f for f in traceback.extract_tb(e.__traceback__)[1:] if "importlib" not in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def load_target(text: str) -> Platform:
    """A platform by name, from a YAML or JSON file, or a chip described in Python as `module:name` or `module:factory`.

    Raises:
        UnknownNameError, PlatformError: see `chipfit.load_platform`; PlatformError also when the module gives no chip.
    """
    from chipfit.platform.load import load_platform

    if not re.fullmatch(r"[A-Za-z_][\w.]*:\w+", text):
        return load_platform(text)
    is_chip = lambda thing: hasattr(thing, "to_platform") and not isinstance(thing, type)  # noqa: E731 -- one line
    return load_platform(import_or_call(text, "platform", PlatformError, is_chip))
