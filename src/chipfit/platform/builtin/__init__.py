"""The built-in platforms, one YAML file each."""

from pathlib import Path

#: the platform that is meant where none is named
DEFAULT = "ort_cpu"


def built_in(beginning: str = "") -> list[str]:
    """Return the names of the built-in platforms that begin so, without reading them."""
    return sorted(f.stem for f in Path(__file__).parent.glob("*.yaml") if f.stem.startswith(beginning))
