"""The built-in platforms, one YAML file each."""

#: the platform that is meant where none is named
DEFAULT = "ort_cpu"
