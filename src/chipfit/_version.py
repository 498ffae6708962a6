"""The version, in one place, and the oldest versions of what chipfit stands on."""

__version__ = "1.0.0"
#: oldest Python and torch that chipfit supports, as in `pyproject.toml`
PYTHON, TORCH = (3, 11), (2, 9)
