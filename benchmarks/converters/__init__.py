"""Small networks of all kinds, and other tools' files of them; used by `benchmarks/beside_converters.py`."""

import ast
from pathlib import Path


def names() -> list[str]:
    """Return the names of all networks, "torch/NAME" and "keras/NAME", without importing a framework."""
    found = []
    for framework in ("torch", "keras"):
        body = ast.parse((Path(__file__).parent / f"{framework}_networks.py").read_text()).body
        defined = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        entered = [n.name for n in defined if any("network(" in ast.unparse(d) for d in n.decorator_list)]
        found += [f"{framework}/{name}" for name in entered]
    return found
