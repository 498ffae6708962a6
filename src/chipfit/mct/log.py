"""A folder for logs: what was decided as text, and numbers of every layer for TensorBoard."""

import logging
from datetime import datetime
from pathlib import Path

from chipfit.errors import ConfigError
from chipfit.files import path_of
from chipfit.result import Result
from chipfit.training.scalars import write_scales, writer

__all__ = ["set_log_folder"]

LOGGER = logging.getLogger("chipfit")

_folder: Path | None = None  #: of the open log
_handler: logging.Handler | None = None


def set_log_folder(folder: str | Path | None, level: int = logging.INFO) -> Path | None:
    """Log what the facades of MCT's names do from now on: text in chipfit.log, numbers in tensorboard_logs.

    Args:
        folder: gets a new folder `logs_<time>` for this log; None ends the log.
        level: of the messages of the logger "chipfit" that are written.

    Returns:
        The new folder.

    Raises:
        ConfigError: `folder` is neither text nor a path.
        OSError: the folder cannot be made.
    """
    global _folder, _handler
    if _handler is not None:
        LOGGER.removeHandler(_handler)
        _handler.close()
        _folder = _handler = None
    if folder is None:
        return None
    made = path_of(folder, ConfigError) / f"logs_{datetime.now():%d%m%Y_%H%M%S}"
    made.mkdir(parents=True, exist_ok=True)
    _folder, _handler = made, logging.FileHandler(made / "chipfit.log", encoding="utf-8")
    _handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOGGER.addHandler(_handler)
    LOGGER.setLevel(level)
    return made


def log_result(what: str, result: Result) -> None:
    """Log a result, if a folder is set: the notes of its plan, and the numbers of its layers.

    Args:
        what: name of the facade.

    Raises:
        RuntimeUnavailable: tensorboard is not installed.
    """
    if _folder is None:
        return
    report = result.report
    LOGGER.info("%s for %s: %s tensors quantized", what, report.platform, report.quantized_tensors)
    for note in report.notes:
        LOGGER.info("%s", note)
    with writer(_folder / "tensorboard_logs") as to:
        to.add_text(f"{what}/plan", "\n\n".join(report.notes) or "no rewrite")
        for row in (*report.inputs, *report.layers):
            for name in ("clipped", "weight_sqnr_db"):
                if getattr(row, name) is not None:
                    to.add_scalar(f"{name}/{row.name}", getattr(row, name), 0)
        write_scales(to, result.model, 0)
