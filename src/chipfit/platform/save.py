"""Write platforms as files, whatever they were described with."""

from pathlib import Path
from typing import Any

import yaml

from chipfit.errors import ExportError, UnknownNameError
from chipfit.files import path_of, write_atomically
from chipfit.platform.load import Target, load
from chipfit.platform.schema import Platform
from chipfit.registry import lookup


class _Dumper(yaml.SafeDumper):
    """A YAML writer with short tables and lists on one line, as people write them, and without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        return super().represent_mapping(tag, mapping, flow_style=_is_short(mapping))

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=_is_short(sequence))


def _is_short(thing: Any) -> bool:
    return len(str(thing)) < 110


def to_yaml(platform: Platform) -> str:
    """Return the text of a platform file that loads into an equal Platform; `extends` is written out in full."""
    data = platform.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"extends"})
    data = {"schema": platform.schema_, **data}
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=140, allow_unicode=True)


def export_platform(what: Target, path: str | Path) -> Path:
    """Write a chip as a platform file (`.yaml`) or as modelled capabilities (`.json`).

    Raises:
        UnknownNameError: another suffix.
        ExportError: the file cannot be written; nothing is left behind.
    """
    path = path_of(path, ExportError)
    if path.suffix in (".yaml", ".yml"):
        return write_atomically(path, to_yaml(load(what)).encode())
    if path.suffix == ".json":
        return lookup("modelled", "files").write(what, path)
    raise UnknownNameError("file format", path.suffix, [".yaml", ".json"])
