"""The link from a model of the facades to its result."""

import base64
import io
import zipfile
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from chipfit.errors import PlanError, first_line
from chipfit.files import ARCHIVE_ERRORS, open_zip
from chipfit.frameworks import adapter_of
from chipfit.graph.ir import Graph
from chipfit.plan import saved
from chipfit.plan.record import Plan
from chipfit.platform.schema import Platform
from chipfit.result import Result, of_plan


class ResultLink:
    """A link from a model to its result, which copies of the model share.

    A pickled PyTorch model and the file of a Keras model hold plan and network without weights, which are those of the
    model.
    """

    def __init__(self, result: Result | None = None) -> None:
        self.result = result
        self._pickled: tuple[Graph, Plan, Platform, int] | None = None
        self._packed: dict[str, Any] | None = None

    def of(self, model: Any) -> Result | None:
        """Return the result of a model that has this link; None if a pickle did not hold it."""
        if self.result is None and self._pickled is not None:
            graph, plan, platform, made = self._pickled
            weights = {name: model.weight(name).detach() for name in graph.weights}
            found = of_plan(replace(graph, weights=weights), plan, platform)
            self.result = replace(found, _model=model, _made=made)
        return self.result

    def packed(self) -> dict[str, Any]:
        """Return plan and network, with zeros for weights in floats, as JSON data that `unpacked` reads."""
        if self._packed is None and self.result is not None:
            graph, plan, platform = self.result.graph, self.result.plan, self.result.platform
            empty = {name: torch.zeros_like(w) if w.is_floating_point() else w for name, w in graph.weights.items()}
            file = io.BytesIO()
            with TemporaryDirectory() as folder, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                saved.save(Path(folder) / "result", replace(graph, weights=empty), plan, platform)
                for path in sorted(Path(folder).rglob("*")):
                    archive.write(path, path.relative_to(folder))
            self._packed = {"made": self.result._made, "files": base64.b64encode(file.getvalue()).decode()}
        return self._packed or {}

    def __deepcopy__(self, memo: Any) -> "ResultLink":
        return self

    def __reduce__(self) -> Any:
        result = self.result
        if result is None or not hasattr(result.model, "weight"):  # which holds the weights by name
            return ResultLink, ()
        shapes = {name: torch.empty_like(w, device="meta") for name, w in result.graph.weights.items()}
        return _unpickled, (replace(result.graph, weights=shapes), result.plan, result.platform, result._made)


def _unpickled(*parts: Any) -> ResultLink:
    link = ResultLink()
    link._pickled = parts  # type: ignore[assignment]  # of `__reduce__`
    return link


def unpacked(data: Any, model: Any) -> Result | None:
    """Return the result of a Keras model that was loaded from a file; None if the model lacks some weight.

    Args:
        data: what `ResultLink.packed` returned.

    Raises:
        PlanError: the data are malformed.
    """
    with TemporaryDirectory() as folder:
        try:
            made, packed = int(data["made"]), Path(folder) / "result.zip"
            packed.write_bytes(base64.b64decode(data["files"], validate=True))
            with open_zip(packed) as archive:
                archive.extractall(folder)
        except (*ARCHIVE_ERRORS, LookupError, RuntimeError, TypeError, ValueError) as e:
            what = f"The model's own record of how it was quantized is damaged: {first_line(e)}"
            raise PlanError(what, hint="pass the information that the quantization returned") from e
        graph, plan, platform, *_ = saved.load(Path(folder) / "result")
    read = adapter_of(graph.framework).read_back(model, graph, plan)[0]
    needed = {i for n in read.nodes for i in n.inputs if i in read.weights}
    if any(read.weights[i] is graph.weights[i] and read.weights[i].is_floating_point() for i in needed):
        return None
    return replace(of_plan(read, plan, platform), _model=model, _made=made)
