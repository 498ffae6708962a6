"""Objects that users name as "module:name". Loads no framework by itself."""

import difflib
import importlib
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chipfit.errors import ChipfitError, PlatformError, raise_bug, short_message
from chipfit.files import names_object
from chipfit.platform.schema import Platform


def import_by_name(text: str, what: str, failure: type[ChipfitError]) -> Any:
    """Import the object "module:name"; the current folder is on the module path.

    Args:
        what: kind of the object, for messages.
    """
    module, _, name = text.rpartition(":") if names_object(text) else (text, "", "")
    if not (module and name) or module.startswith(".") or module.endswith(".py") or re.search(r"[\\/]", module):
        path = module.replace("\\", "/").removesuffix(".py").removeprefix("./")
        path = (path.rpartition("/")[2] if ":" in path else path).replace("/", ".")
        hint = f"{path}:{name or 'build'}, as in `import {path}`" if path.strip(".") else ""
        raise failure(f"The {what} must have the form module:name", got=text, hint=hint)
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as e:  # importing runs the user's code, which may raise anything
        raise_bug(e)
        what = f"The {what} '{text}' cannot be imported: {short_message(e)}"
        raise failure(what, where=_line(e), allowed="module:name", hint=_near(module, name, here)) from e
    finally:
        sys.path.remove(here)


def _near(module: str, name: str, folder: str) -> str:
    """Return what to try: a name like this one in the module, a module like this one in the folder, or the folder."""
    if module in sys.modules:
        own = [n for n in vars(sys.modules[module]) if not n.startswith("_")]
        near = difflib.get_close_matches(name, own, n=1)
        if near:
            return f"{module}:{near[0]}"
    else:
        near = difflib.get_close_matches(module, [p.stem for p in Path(folder).glob("*.py")], n=1)
        if near and near[0] != module:
            return f"{near[0]}:{name}"
    return "run from the folder that holds the module"


def import_or_call(text: str, what: str, failure: type[ChipfitError], is_one: Callable[[Any], bool]) -> Any:
    """Import "module:name"; return the object if `is_one` accepts it, else the result of calling it."""
    thing = import_by_name(text, what, failure)
    if not callable(thing) and not is_one(thing):
        allowed = f"a {what}, or a function without arguments that returns one"
        raise failure(f"'{text}' is not a {what}", got=type(thing).__name__, allowed=allowed)
    return thing if is_one(thing) else call_factory(thing, text, what, failure)


def call_factory(thing: Any, text: str, what: str, failure: type[ChipfitError]) -> Any:
    """Return the result of a factory of the user."""
    try:
        return thing()
    except Exception as e:  # the user's code
        raise_bug(e)
        raise failure(f"The {what} '{text}' fails: {short_message(e)}", where=_line(e)) from e


def _line(e: Exception) -> str:
    """Return file, line and function where the user's code failed; "" if it was not reached."""
    frames = [f for f in traceback.extract_tb(e.__traceback__)[1:] if "importlib" not in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def load_target(text: str) -> Platform:
    """Return a platform by name, from a YAML or JSON file, or from `module:name` or `module:factory` in Python.

    Raises:
        UnknownNameError, PlatformError: see `chipfit.load_platform`, or the module provides no platform.
    """
    from chipfit.platform.load import load_platform

    if not re.fullmatch(r"[A-Za-z_][\w.]*:\w+", text):
        return load_platform(text)
    is_chip = lambda thing: hasattr(thing, "to_platform") and not isinstance(thing, type)  # noqa: E731 -- one line
    return load_platform(import_or_call(text, "platform", PlatformError, is_chip))
