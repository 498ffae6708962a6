"""Reports on a quantized model under the names of MCT's XQuant: similarity to the float model, and TensorBoard."""

import json
import math
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

import torch
from pydantic import InstanceOf

from chipfit.calibration.data import SizeMismatch, batches, call_without_label, empty_data_error
from chipfit.engine.run import first_deviation, run
from chipfit.engine.trees import call_with
from chipfit.errors import ChipfitError, ConfigError, ExportError, PlanError
from chipfit.files import path_of, write_atomically
from chipfit.frameworks import facts_of, framework_of
from chipfit.graph.ir import Graph
from chipfit.graph.placement import inputs_on, placed
from chipfit.mct.ptq import DataGenerator, first_batch_of, form_for_keras
from chipfit.mct.result_link import ResultLink
from chipfit.reading import read_model
from chipfit.report.similarity import Similarity, cosine, measure, mse
from chipfit.report.tensorboard import write_graph, write_histograms
from chipfit.result import Result, check_untrained
from chipfit.training.scalars import writer
from chipfit.validation import check_value, record

__all__ = ["XQuantConfig", "xquant_report_keras_experimental", "xquant_report_pytorch_experimental"]


def _sqnr(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the power of a value over that of the error, as a ratio; infinite without an error."""
    noise = mse(x, y)
    return float(x.double().square().mean()) / noise if noise else math.inf


_METRICS = {"mse": mse, "cs": cosine, "sqnr": _sqnr}
_FILE, _FOLDER = "quant_report.json", "xquant"  #: of a report's folder, as in MCT


@record(ConfigError)
class XQuantConfig:
    """Options of a report.

    Raises:
        UnknownNameError: there is no such option.
        ConfigError: a value has the wrong type.
    """

    report_dir: str  #: folder for `quant_report.json` and TensorBoard's events, in `xquant`
    #: name -> function of the float and the quantized value, tensors of PyTorch or arrays for Keras, to a number
    custom_similarity_metrics: InstanceOf[dict[str, Any]] | None = field(default=None)


def xquant_report_pytorch_experimental(
    float_model: Any,
    quantized_model: Any,
    repr_dataset: DataGenerator,
    validation_dataset: DataGenerator,
    xquant_config: XQuantConfig,
) -> dict[str, Any]:
    """Compare a quantized PyTorch module with the float one, layer by layer and at the outputs.

    Args:
        float_model: the module that was quantized.
        quantized_model: what a facade of chipfit returned, perhaps trained since.
        repr_dataset: function that yields lists of inputs, as for quantization.
        validation_dataset: function that yields lists of inputs, or pairs of one and labels.
        xquant_config: folder of the report, and more metrics.

    Returns:
        Mean "mse", "cs" (cosine), "sqnr" (as a ratio) and own metrics: `output_similarity_metrics_repr` and `..._val`
        by metric, `intermediate_similarity_metrics_repr` and `..._val` by layer and metric.

    Raises:
        ConfigError: `quantized_model` comes from no facade, or a metric fails.
        DataError: a function yields nothing, or sizes at which the quantized network is another than the float model.
        RuntimeUnavailable: TensorBoard is not installed.
    """
    config: XQuantConfig = check_value(XQuantConfig, xquant_config, ConfigError, "xquant_report", "xquant_config")
    result, folder = _result_of(quantized_model), path_of(config.report_dir, ExportError)
    to = writer(folder / _FOLDER)
    metrics = _METRICS | {k: _on_arrays(f, result.graph) for k, f in (config.custom_similarity_metrics or {}).items()}
    reference = _reference(float_model, result, repr_dataset)
    data = zip(_KINDS, (repr_dataset, validation_dataset), strict=True)
    found = {kind: _measured(float_model, reference, result, d, metrics) for kind, d in data}
    report: dict[str, Any] = {f"output_similarity_metrics_{k}": _of_outputs(s) for k, s in found.items()}
    report |= {f"intermediate_similarity_metrics_{k}": s.layers for k, s in found.items()}
    _show(to, result, found, report)
    write_atomically(folder / _FILE, json.dumps(report, indent=4).encode())
    return report


xquant_report_keras_experimental = form_for_keras(
    xquant_report_pytorch_experimental, "Compare a quantized Keras 3 model with the float one", "float_model"
)

_KINDS = "repr", "val"  #: ends of the keys of a report


def _result_of(model: Any) -> Result:
    """Return the result that a model comes from, with what training has changed.

    Raises:
        ConfigError: no facade returned the model.
    """
    link = getattr(model, "_chipfit", None)
    result = link.of(model) if isinstance(link, ResultLink) else None
    if result is None:
        hint = "pass what pytorch_post_training_quantization or another facade returned; else Result.similarity(data)"
        raise ConfigError("Argument 'quantized_model' has no quantization result", got=type(model).__name__, hint=hint)
    try:
        check_untrained(result, "the report")
        return result
    except PlanError:
        return result.trained()


def _reference(float_model: Any, result: Result, generator: Any) -> Graph:
    """Return the float network whose values are compared.

    This is the network after the rewrites of quantization if it computes what the float model does; else the float
    model as it was captured, which lacks the values that rewrites have made.
    """
    if framework_of(float_model) != result.graph.framework:
        got, allowed = (facts_of(f).title for f in (framework_of(float_model), result.graph.framework))
        raise ConfigError("Argument 'float_model' is of another framework", got=got, allowed=allowed)
    captured = read_model(float_model, *call_without_label(first_batch_of(generator), float_model), of_data=True)
    for batch in batches(generator, captured):
        inputs = inputs_on(captured.device, batch)
        with torch.inference_mode():
            values = run(placed(captured), inputs)
        rewritten = result.decision.graph
        captured.device = rewritten.device  # where both networks run
        agrees = first_deviation(rewritten, inputs, [values[o] for o in captured.outputs]) is None
        return rewritten if agrees else captured
    raise empty_data_error()


def _measured(
    float_model: Any, reference: Graph, result: Result, generator: Any, metrics: Mapping[str, Any]
) -> Similarity:
    """Compare the networks on data, perhaps of another size than those of calibration.

    Raises:
        SizeMismatch: the networks do not compute what the float model does for that size.
    """
    first_batch_of(generator)  # names what is not a generator
    try:
        return measure(reference, result.graph, result.plan, batches(generator, result.graph), metrics)
    except SizeMismatch as e:
        own, mine = _of_any_size(reference), _of_any_size(result.graph)
        inputs = next(iter(batches(generator, mine)))
        if not _agree(float_model, own, inputs):
            raise e from None
    return measure(own, mine, result.plan, batches(generator, mine), metrics)


def _agree(float_model: Any, graph: Graph, inputs: Any) -> bool:
    """Return whether a graph computes what the float model does for inputs of their size."""
    try:
        there = read_model(float_model, *call_with(graph, inputs))
        given = inputs_on(there.device, inputs)
        with torch.inference_mode():
            values = run(placed(there), given)
        return first_deviation(graph, given, [values[o] for o in there.outputs]) is None
    except (ChipfitError, RuntimeError):
        return False


def _of_any_size(graph: Graph) -> Graph:
    """Return a graph whose inputs may have any sizes."""
    given = {i: replace(graph.values[i], shape=(None,) * len(graph.shape(i))) for i in graph.inputs}
    return replace(graph, values={**graph.values, **given})


def _of_outputs(found: Similarity) -> dict[str, float]:
    """Return the mean of each metric over the outputs."""
    rows = found.outputs.values()
    return {m: sum(row[m] for row in rows) / len(rows) for m in found.metrics} if rows else {}


def _on_arrays(metric: Any, graph: Graph) -> Any:
    """Return a metric that gets arrays where the framework's are, as in MCT, and tensors for PyTorch."""
    if not facts_of(graph.framework).channels_last or not callable(metric):
        return metric
    return lambda x, y: metric(x.numpy(), y.numpy())


def _show(to: Any, result: Result, found: Mapping[str, Similarity], report: Mapping[str, Any]) -> None:
    """Write graph, scalars, histograms and texts to TensorBoard."""
    makers, plan = result.graph.producers(), result.plan
    facts: dict[str, dict[str, str]] = {
        n.name: {"runs": p.exec} for n in result.graph.nodes if (p := plan.nodes.get(n.name))
    }
    for name, t in plan.tensors.items():
        if name in makers:
            facts.setdefault(makers[name].name, {})["format"] = t.format
    for step, (kind, similarity) in enumerate(found.items()):
        similarity.write(to, step)
        for layer, row in similarity.layers.items():
            facts.setdefault(makers[similarity.values[layer]].name, {})[f"xquant_{kind}"] = str(row)
        name = f"output_similarity_metrics_{kind}"
        to.add_text(name, "  \n".join(f"{metric}: {value:.4f}" for metric, value in report[name].items()))
    write_graph(to, result.graph, facts)
    write_histograms(to, result.stats)
    to.close()
