"""Damage values, texts and bytes in small ways, drawn from a seed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from random import Random
from typing import Any

#: values of the wrong kind
STRANGE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    60,
    64,
    65,
    255,
    256,
    -128,
    0.5,
    -0.5,
    1e-320,
    1e308,
    -1e308,
    1e30,
    2**31,
    -(2**31),
    2**63,
    2**64,
    10**30,
    10**400,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x",
    "float",
    "same",
    "any",
    "int",
    "8",
    "nan",
    "-1",
    ".",
    "../x",
    "a\nb",
    "\x00",
    "é" * 10,
    "a" * 5000,
    "*",
    [],
    {},
    [None],
    [[]],
    {"": ""},
    {"a": 1},
    [1, 2],
    [2, 1],
    ["x", "y"],
    [1] * 100,
    {"$float": "nan"},
    {"$ref": 0},
    {"$tuple": [1]},
    {"$ref": -1},
    {"$float": "x"},
)


def strange(rng: Random) -> Any:
    """Draw one of `STRANGE`, or a deeply nested list."""
    if rng.random() < 0.03:
        deep: Any = rng.choice(([], {}))
        for _ in range(rng.choice((30, 60, 150))):
            deep = [deep] if isinstance(deep, list) else {"a": deep}
        return deep
    return copy.deepcopy(rng.choice(STRANGE))


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every path into nested dictionaries and lists except the empty one."""
    out: list[tuple[Any, ...]] = []
    todo = [(data, path)]
    while todo:
        here, at = todo.pop()
        items = here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ()
        for key, value in items:
            out.append((*at, key))
            todo.append((value, (*at, key)))
    return out


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def value(rng: Random, old: Any, whole: Any) -> Any:
    """Return another value in place of `old`."""
    how = rng.random()
    if how < 0.35:
        return strange(rng)
    if how < 0.55:  # a value from elsewhere in the document, which often has the right type
        known = places(whole)
        found = [at(whole, p) for p in rng.sample(known, min(40, len(known)))]
        alike = [v for v in found if type(v) is type(old) and v != old]
        return copy.deepcopy(rng.choice(alike or found or [None]))
    if isinstance(old, bool):
        return rng.choice((not old, int(old), str(old)))
    if isinstance(old, (int, float)):
        near = (old + 1, old - 1, -old, old * 2, str(old), float(old), [old], old * 1e30, old + 0.5, old * 10**9)
        return rng.choice(near)
    if isinstance(old, str):
        k = rng.randrange(len(old) + 1)
        return rng.choice(
            (old[:k], old + "x", old.upper(), old.swapcase(), old[:k] + "\ufffd" + old[k:], [old], {old: old})
        )
    if isinstance(old, list):
        mixed = rng.sample(old, len(old))
        return rng.choice(
            (mixed, old * 2, old[:-1], [old], dict.fromkeys(map(str, range(len(old))), 0), old + [strange(rng)])
        )
    if isinstance(old, dict):
        return rng.choice((list(old), list(old.values()), {**old, "unknown": 1}, dict.fromkeys(old), str(old)[:50]))
    return strange(rng)


def document(rng: Random, data: Any, note: Callable[[str], None]) -> Any:
    """Return a copy of nested data with one to three places changed, renamed, removed, added or exchanged."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        known = places(data)
        if not known or rng.random() < 0.01:
            return strange(rng)
        path = rng.choice(known)
        parent, key = at(data, path[:-1]), path[-1]
        how = rng.random()
        name = ".".join(map(str, path))
        if how < 0.6:
            parent[key] = value(rng, parent[key], data)
            note(f"{name} = {short(parent[key])}")
        elif how < 0.75:
            del parent[key]
            note(f"{name} removed")
        elif how < 0.85 and isinstance(parent, dict):
            new = rng.choice(
                (f"{key}x", str(key)[:-1], "", rng.choice(list(parent)), "name", "$tuple", str(key).upper())
            )
            parent[new] = parent.pop(key)
            note(f"{name} renamed {new!r}")
        elif how < 0.93:
            if isinstance(parent, dict):
                parent[rng.choice(("unknown", "bits", "name", "zero", "scale", "$float"))] = strange(rng)
            else:
                parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(rng.choice((parent[key], strange(rng)))))
            note(f"beside {name} something added")
        else:
            other = rng.choice(known)
            try:
                theirs = at(data, other)
                at(data, other[:-1])[other[-1]] = copy.deepcopy(parent[key])
                parent[key] = copy.deepcopy(theirs)
            except (KeyError, IndexError, TypeError):  # one was inside the other
                continue
            note(f"{name} and {'.'.join(map(str, other))} exchanged")
    return data


def text(rng: Random, old: str, note: Callable[[str], None]) -> str:
    """Return a text with characters, lines or indentation changed."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        lines = old.split("\n")
        k, how = rng.randrange(len(lines)), rng.randrange(9)
        if how == 0:
            del lines[k]
        elif how == 1:
            lines.insert(k, lines[rng.randrange(len(lines))])
        elif how == 2:
            j = rng.randrange(len(lines))
            lines[k], lines[j] = lines[j], lines[k]
        elif how == 3:
            lines[k] = rng.choice((" ", "  ", "\t", "- ")) + lines[k]
        elif how == 4:
            lines[k] = lines[k].lstrip()
        elif how == 5:
            c = rng.randrange(len(lines[k]) + 1)
            extra = rng.choice(
                list("{}[]:,#&*!|>'\"%@`\\\t\0\x85\u2028-?~0")
                + ["&a *a", "!!python/name:os.system ", "<<: ", ".nan", ".inf", "1e400", "0x", "---\n", "2001-01-01"]
            )
            lines[k] = lines[k][:c] + extra + lines[k][c:]
        elif how == 6:
            c = rng.randrange(len(lines[k]) + 1)
            lines[k] = lines[k][:c] + lines[k][c + 1 :]
        elif how == 7:
            old_digits = [c for c, x in enumerate(lines[k]) if x.isdigit()]
            if old_digits:
                c = rng.choice(old_digits)
                new = rng.choice(
                    ("0", "9", "-1", "60", "1e9", ".nan", ".inf", "99999999999999999999", "null", "true", "x")
                )
                lines[k] = lines[k][:c] + new + lines[k][c + 1 :]
        else:
            lines = lines[:k]
        note(f"line {k + 1}, change {how}")
        old = "\n".join(lines) or "\n"
    return old


def octets(rng: Random, old: bytes, note: Callable[[str], None]) -> bytes:
    """Return bytes with some of them flipped, set, cut out, repeated or cut off."""
    data = bytearray(old)
    how = rng.randrange(7)
    if how == 0 and data:
        del data[rng.randrange(len(data)) :]
    elif how == 1:
        data = bytearray(rng.randbytes(rng.choice((0, 1, 100, len(old)))))
    elif how == 2 and data:
        k = rng.randrange(len(data))
        del data[k : k + rng.choice((1, 4, 16))]
    elif how == 3:
        k = rng.randrange(len(data) + 1)
        data[k:k] = rng.randbytes(rng.choice((1, 4, 16)))
    elif data:
        for _ in range(rng.choice((1, 1, 2, 8, 64))):
            k = rng.randrange(min(len(data), rng.choice((64, 512, len(data)))))
            data[k] = rng.choice((0, 255, data[k] ^ (1 << rng.randrange(8)), rng.randrange(256)))
    note(f"bytes, change {how}")
    return bytes(data)


def short(x: Any, limit: int = 60) -> str:
    """Return a value as notes show it."""
    if isinstance(x, int) and not isinstance(x, bool) and abs(x) > 10**40:
        return "a huge integer"
    try:
        words = repr(x)
    except RecursionError:
        return "a deep nest"
    return words if len(words) <= limit else f"{words[:limit]}..."
