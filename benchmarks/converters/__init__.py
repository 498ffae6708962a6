"""Small networks of all kinds, and other tools' files of them; used by `benchmarks/beside_converters.py`."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any


def names() -> list[str]:
    """Return the names of all networks, "torch/NAME" and "keras/NAME", without importing a framework."""
    found = []
    for framework in ("torch", "keras"):
        body = ast.parse((Path(__file__).parent / f"{framework}_networks.py").read_text()).body
        defined = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        entered = [n.name for n in defined if any("network(" in ast.unparse(d) for d in n.decorator_list)]
        found += [f"{framework}/{name}" for name in entered]
    return found


def enters(networks: dict[str, Any]) -> Callable[[Any], Callable[[Any], Any]]:
    """Return a decorator that enters a network in a table, with its batches, under its name."""

    def network(batch: Any) -> Callable[[Any], Any]:
        def enter(make: Any) -> Any:
            networks[make.__name__] = (make, batch)
            return make

        return enter

    return network
