"""The names that a file gives to what a model returns."""

import ast
import json

from chipfit.graph.ir import Graph


def output_names(graph: Graph) -> list[str]:
    """Names of the outputs: keys of a returned dict, else "output" with a number when there are several."""
    count = len(graph.outputs)
    try:
        plain = json.loads(json.loads(graph.out_spec)["plain"])[1]
        keys = plain["context"] if plain["type"] == "builtins.dict" else None
        keys = json.loads(keys) if isinstance(keys, str) else keys
        keys = ast.literal_eval(keys) if isinstance(keys, str) else keys
        if isinstance(keys, list) and len(keys) == count and all(isinstance(k, str) for k in keys):
            return [k if k not in graph.inputs else f"{k}_out" for k in keys]
    except (KeyError, ValueError, SyntaxError, TypeError, IndexError):
        pass
    return ["output"] if count == 1 else [f"output_{i}" for i in range(count)]
