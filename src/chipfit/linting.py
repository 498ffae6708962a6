"""The formats and kernels that a platform would give to a model, without any data."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chipfit import steps
from chipfit.calibration.data import as_call
from chipfit.decide.assignment import Assignment
from chipfit.decide.float_operators import refusals
from chipfit.decide.overrides import Overrides
from chipfit.decision import Decision, decide
from chipfit.engine.process import preserve_random_state
from chipfit.engine.torch_defaults import torch_defaults
from chipfit.frameworks import load_model
from chipfit.graph.ir import Graph
from chipfit.plan.record import NodePlan
from chipfit.platform.builtin import DEFAULT
from chipfit.platform.load import load_platform
from chipfit.platform.schema import Platform
from chipfit.reading import read_model
from chipfit.report.terminal import RUNS
from chipfit.screen import MOST_ROWS, Summary, SummaryRepr, join_rows


@dataclass(frozen=True, repr=False)
class Lint(SummaryRepr):
    """The formats and kernels that a platform would give to a model.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        >>> data = [torch.rand(8, 3, 16, 16) for _ in range(4)]
        >>> chipfit.lint(net, data[0], "tflite_int8").rows[0].op
        'Conv2D'
    """

    graph: Graph
    platform: Platform
    assignment: Assignment
    #: operators that `quantize` refuses, as they would compute in floats; rewrites made or refused, requantization
    #: inserted, overrides that a layer ignores
    notes: tuple[str, ...]

    def _summary(self) -> Summary:
        integers = sum(n.exec != "float" for n in self.rows)
        title = f"{integers} of {len(self.rows)} operators can run in integers on {self.platform.name}"
        floats_first = sorted(self.rows, key=lambda n: n.exec != "float") if len(self.rows) > MOST_ROWS else self.rows
        rows = join_rows([(n.display_name, n.op, RUNS[n.exec], n.why) for n in floats_first])
        header = ("layer", "operator", "runs", "why float")
        return Summary(title, {"notes": "; ".join(self.notes)}, header, rows, "lint.rows")

    @property
    def rows(self) -> list[NodePlan]:
        """One entry per operator, in execution order."""
        return list(self.assignment.nodes.values())


@preserve_random_state
@torch_defaults()
def lint(
    model: Any, example: Any, platform: str | Path | Platform = DEFAULT, overrides: Overrides | None = None
) -> Lint:
    """Find out, without data, which operators would run in integers, which ones fuse, and why others stay in float.

    Args:
        model: as for `quantize`.
        example: one batch of inputs; its values do not matter.
        platform: as for `quantize`.
        overrides: as for `quantize`.

    Raises:
        CaptureError, DataError, UnsupportedError, UnknownNameError: see `chipfit.errors`.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        >>> data = [torch.rand(8, 3, 16, 16) for _ in range(4)]
        >>> [(row.layer, row.exec) for row in chipfit.lint(net, data[0], "tflite_int8").rows]
        [('0', 'int'), ('1', 'int')]
    """
    d = Decision(platform=load_platform(platform), overrides=overrides)
    model = load_model(model)
    graph, rewrites = steps.rewrite(read_model(model, *as_call(example, model)), d.platform, d.settings)
    d = decide(replace(d, graph=graph))
    refused = refusals(d.graph, d.platform, d.assignment) if d.integers_only else []
    return Lint(d.graph, d.platform, d.assignment, (*refused, *rewrites, *d.notes))
