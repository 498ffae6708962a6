"""Output of every command: text for people or, with --json, one JSON document."""

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

import chipfit
from chipfit.errors import ChipfitError
from chipfit.files import package_data

#: command -> examples that its help shows; the tests run them
EXAMPLES: dict[str, list[str]] = package_data("chipfit.cli", "examples.yaml")


@dataclass
class OutputOptions:
    """The choices of the options that every command has."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False


#: the choices of the command that runs
OUTPUT = OutputOptions()


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds a function as a command with the options --json, --quiet and --verbose.

    A parameter whose type is a dataclass stands for its fields: each is an option.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function, eval_str=True)
        groups: dict[str, Any] = {
            p.name: p.annotation for p in signature.parameters.values() if is_dataclass(p.annotation)
        }

        @functools.wraps(function)
        def run(**options: Any) -> Any:
            given = {k: v for k, v in options.items() if k not in _HELP}
            for name, group in groups.items():
                given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
            return function(**given)

        kind = inspect.Parameter.KEYWORD_ONLY
        own_parameters = [o for p in signature.parameters.values() for o in _options_of(p)]
        more = [inspect.Parameter(k, kind, default=False, annotation=_flag(k, doc)) for k, doc in _HELP.items()]
        vars(run)["__signature__"] = signature.replace(parameters=[*own_parameters, *more])
        run.__annotations__ = {p.name: p.annotation for p in (*own_parameters, *more)}
        group = f"{app.info.name} " if isinstance(app.info.name, str) else ""
        own = name or function.__name__.removeprefix(f"{app.info.name}_")
        app.command(name, epilog="\n\n".join(["Examples:", *EXAMPLES[group + own]]))(run)
        return function

    return add


def _options_of(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Return a parameter, or those that the fields of its dataclass stand for."""
    group = parameter.annotation
    if not is_dataclass(group):
        return [parameter]
    types = get_type_hints(group, include_extras=True)
    return [parameter.replace(name=f.name, default=f.default, annotation=types[f.name]) for f in fields(group)]


_HELP = {
    "json": "print one JSON document instead of text",
    "quiet": "print results and errors only, no progress",
    "verbose": "print more: all notes, and where an error arose",
}


def _flag(name: str, doc: str) -> Any:
    def choose(value: bool) -> bool:
        setattr(OUTPUT, name, value)
        return value

    # eager: an error in another option is printed as these demand
    return Annotated[bool, typer.Option(f"--{name}", help=doc, callback=choose, is_eager=True)]


def print_document(document: Mapping[str, Any]) -> None:
    """Print a document, with the version of chipfit, as JSON. Numbers that JSON lacks become null."""
    whole = {"chipfit": chipfit.__version__, **document}
    typer.echo(json.dumps(_finite(whole), indent=1, default=str))


def print_error(e: ChipfitError) -> None:
    """Print an error as a JSON document."""
    print_document({"error": error_facts(e)})


def error_facts(e: ChipfitError) -> dict[str, str]:
    """Return an error's type, its sentence, and its facts."""
    kind = next((k for k in type(e).__mro__ if k.__module__ == "chipfit.errors"), type(e))
    return {"type": kind.__name__, "what": e.what, **{k: str(v) for k, v in e.facts.items()}}


def _finite(thing: Any) -> Any:
    """Replace NaN and infinite numbers by None, and tuples and mappings by what JSON has."""
    if isinstance(thing, float):
        return thing if abs(thing) < float("inf") else None
    if isinstance(thing, Mapping):
        return {str(k): _finite(v) for k, v in thing.items()}
    return [_finite(v) for v in thing] if isinstance(thing, list | tuple) else thing
