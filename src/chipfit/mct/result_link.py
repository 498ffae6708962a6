"""The link from a model of the facades to its result."""

from dataclasses import replace
from typing import Any

import torch

from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.platform.schema import Platform
from chipfit.result import Result, of_plan


class ResultLink:
    """A link from a model to its result, which copies of the model share.

    A pickled PyTorch model holds plan and network without weights, which are those of the model.
    """

    def __init__(self, result: Result | None = None) -> None:
        self.result = result
        self._pickled: tuple[Graph, Plan, Platform, int] | None = None

    def of(self, model: Any) -> Result | None:
        """Return the result of a model that has this link; None if a pickle did not hold it."""
        if self.result is None and self._pickled is not None:
            graph, plan, platform, made = self._pickled
            weights = {name: model.weight(name).detach() for name in graph.weights}
            found = of_plan(replace(graph, weights=weights), plan, platform)
            self.result = replace(found, _model=model, _made=made)
        return self.result

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
