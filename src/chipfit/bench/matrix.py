"""Many experiments from one file: axes of choices, and studies that combine them.

    axes:
      algorithm: {lsq: {qparams: {w_method: lsq, a_method: lsq}}}
      backend: {snpe: {backend: snpe}, tvm: {backend: tvm}}
    studies:
      algorithms: {of: [algorithm, backend], folder: "{algorithm}_experiments/{backend}", config: {extends: base.yaml}}

Each choice is a part of a configuration. An experiment is `config` merged with one choice of each axis.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import yaml

from chipfit.bench.config import Config, Record, load, validated
from chipfit.errors import ConfigError, UnknownNameError, check_known
from chipfit.files import write_atomically
from chipfit.platform.yaml_file import YamlFile, merged

#: first line of every generated file
MADE = "# Made from {matrix} by `chipfit bench generate`: change that."
RUN = """#!/bin/sh
# The same as `chipfit bench run config.yaml`.
python -u -m chipfit.bench.solver.cls_quant_solver --config config.yaml "$@"
"""


class Study(Record):
    """A study: axes whose combinations are its experiments."""

    title: str = ""
    of: tuple[str, ...]  #: axes
    folder: str  #: folder of each experiment, below the matrix; {axis} stands for the choice
    config: dict[str, Any] = {}
    only: dict[str, tuple[str, ...]] = {}  #: axis -> permitted choices; all when omitted
    without: tuple[dict[str, str], ...] = ()  #: combinations to omit


class Matrix(Record):
    """A file of axes and studies."""

    axes: dict[str, dict[str, dict[str, Any]]]
    studies: dict[str, Study]


def read(path: str | Path) -> Matrix:
    """Read a matrix file.

    Raises:
        ConfigError, UnknownNameError: the file is malformed, or has no such axis or choice.
    """
    source = YamlFile(Path(path), str(path), ConfigError)
    matrix = validated(Matrix, source.data, source)
    for name, study in matrix.studies.items():
        used: list[tuple[str, str | None]] = [(axis, None) for axis in (*study.of, *study.only)]
        used += [(axis, choice) for axis, choices in study.only.items() for choice in choices]
        for axis, choice in (*used, *(x for w in study.without for x in w.items())):
            check_known(f"axis of study '{name}'", axis, matrix.axes)
            if choice is not None and choice not in matrix.axes[axis]:
                raise UnknownNameError(f"choice of axis '{axis}' in study '{name}'", choice, matrix.axes[axis])
    return matrix


def experiments(matrix: Matrix, study: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the configurations of a study, or of all, by folder; `extends` is relative to the matrix.

    Raises:
        UnknownNameError: there is no such study.
        ConfigError: two experiments have the same folder.
    """
    if study is not None and study not in matrix.studies:
        raise UnknownNameError("study", study, matrix.studies)
    found: dict[str, dict[str, Any]] = {}
    for name in matrix.studies if study is None else [study]:
        current = matrix.studies[name]
        for choices in itertools.product(*(current.only.get(a, tuple(matrix.axes[a])) for a in current.of)):
            chosen = dict(zip(current.of, choices, strict=True))
            if any(w.items() <= chosen.items() for w in current.without):
                continue
            data, folder = current.config, current.folder
            for axis, choice in chosen.items():
                data = merged(data, matrix.axes[axis][choice])
                folder = folder.replace(f"{{{axis}}}", choice)
            if folder in found:
                got = f"studies {found[folder]['study']}, {name}"
                raise ConfigError(f"Two experiments have the folder '{folder}'", got=got)
            found[folder] = {**data, "study": name}
    return found


def files(path: Path, study: str | None = None) -> dict[Path, str]:
    """Return path -> text of all files generated from a matrix, relative to its folder."""
    out = {}
    for folder, data in experiments(read(path), study).items():
        if "extends" in data:
            data["extends"] = os.path.relpath(path.parent / data["extends"], path.parent / folder)
        head = MADE.format(matrix=os.path.relpath(path, path.parent / folder))
        out[Path(folder, "config.yaml")] = f"{head}\n{yaml.safe_dump(data, sort_keys=False)}"
        out[Path(folder, "run.sh")] = RUN
    return out


def generate(path: Path, study: str | None = None) -> list[Path]:
    """Write the files of a matrix; remove obsolete generated files.

    Raises:
        ConfigError, UnknownNameError, ExportError: the matrix is malformed, or a file cannot be written.
    """
    wanted = files(path, study)
    for name, text in wanted.items():
        write_atomically(path.parent / name, text.encode())
        if name.suffix == ".sh":
            (path.parent / name).chmod(0o755)
    if study is None:
        mark = MADE.partition("{")[0]
        for old in path.parent.glob("*/*/config.yaml"):
            if old.relative_to(path.parent) not in wanted and old.read_text(encoding="utf-8").startswith(mark):
                old.unlink()
                old.with_name("run.sh").unlink(missing_ok=True)
    return sorted(wanted)


def configs(path: Path, study: str | None = None) -> dict[str, Config]:
    """Return folder -> configuration of every experiment, from the generated files.

    Raises:
        ConfigError: a generated file is missing or outdated.
    """
    wanted = files(path, study)
    for name, text in wanted.items():
        there = path.parent / name
        if not there.is_file() or there.read_text(encoding="utf-8") != text:
            hint = f"chipfit bench generate {path}"
            raise ConfigError("Generated file is missing or outdated", where=str(there), hint=hint)
    return {str(n.parent): load(path.parent / n) for n in wanted if n.name == "config.yaml"}
