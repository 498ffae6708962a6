"""Defaults of what users call by name equal their record: public functions, methods of results, registered settings."""

import inspect
from pathlib import Path
from typing import Any

import yaml

import chipfit
from chipfit import training
from chipfit.registry import entries

RECORD = Path(__file__).parent / "defaults.yaml"
KINDS = "range rounding training correction".split()


def defaults_of(thing: Any) -> dict[str, str]:
    """Return the default of each parameter, as text, where it is a switch, a number or a word."""
    known = {p.name: p.default for p in inspect.signature(thing).parameters.values()}
    return {k: str(v) for k, v in known.items() if isinstance(v, bool | int | float | str) and k[0] != "_" and v != ""}


def found() -> dict[str, dict[str, str]]:
    public = {f"{m.__name__}.{n}": getattr(m, n) for m in (chipfit, training) for n in m.__all__}
    public |= {f"Result.{n}": f for n, f in vars(chipfit.Result).items() if inspect.isfunction(f) and n[0] != "_"}
    own = {f"{kind} {name}": e.thing for kind in KINDS for name, e in entries(kind).items()}
    own = {name: thing for name, thing in own.items() if thing.__module__.startswith("chipfit.")}
    return {name: d for name, thing in {**public, **own}.items() if callable(thing) and (d := defaults_of(thing))}


def test_defaults_are_what_they_were():
    assert found() == yaml.safe_load(RECORD.read_text())


if __name__ == "__main__":
    RECORD.write_text(yaml.safe_dump(found()))
