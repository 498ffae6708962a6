"""Deployment of a model that was trained in a hardware setting: its learned scales on a platform."""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from chipfit import pipeline
from chipfit.calibration.data import first_batch, first_rows
from chipfit.decide.legality import project
from chipfit.engine.run import run
from chipfit.engine.trees import flatten_call
from chipfit.errors import PlanError, UnsupportedError
from chipfit.graph.ir import Graph
from chipfit.linting import lint
from chipfit.mqbench.folded_batch_norm import FoldedBatchNorm
from chipfit.mqbench.prepare import PreparedModule
from chipfit.mqbench.quantizers import AlgorithmQuantizer, QuantizeBase
from chipfit.mqbench.settings import grid_mismatch
from chipfit.plan.training import check_deployable, check_folds
from chipfit.platform.load import load
from chipfit.quantizers.grids import fake_quantize
from chipfit.result import Result
from chipfit.settings import Settings

__all__ = ["deploy"]

#: relative tolerance (of the greatest magnitude) at which two tensors count as equal
_TOLERANCE = 1e-5


def deploy(model: fx.GraphModule, data: Any, platform: Any) -> Result:
    """Return the result of a trained model on a platform, with the learned scales, for export and verification.

    Tensors that the platform quantizes and training did not are calibrated; `Result.plan.rewrites` lists them.

    Args:
        model: the trained model that `prepare_qat_fx` returned.
        data: calibration batches, see `chipfit.quantize`.
        platform: a name, file or Platform.

    Raises:
        PlanError: the model does not come from `prepare_qat_fx`.
        UnsupportedError: the platform cannot represent the trained quantizers; the message says why.
    """
    if not isinstance(model, PreparedModule):
        raise PlanError("Model must come from prepare_qat_fx", got=type(model).__name__)
    target, where = load(platform), next(model.parameters()).device
    plain, learned, of_weights = _remove_quantizers(model)
    call, data = first_batch(data, plain)
    args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.cpu, first_rows(call))
    graph = lint(plain, args, target).graph
    weights = {w: q for w, q in of_weights.items() if w in graph.weights}
    names = {**_match_tensors(plain, learned, graph, args, kwargs), **weights}
    overrides = _width_overrides(graph, names)
    decided = lint(plain, args, target, overrides).assignment
    rules: dict[str, Any] = {"rule": "no_clipping", "weight_rule": "no_clipping", "settings": Settings(repairs="off")}
    result = pipeline.quantize(plain, data, target, overrides=overrides, **rules, progress=False)
    _copy_learned_parameters(result, names)
    trained = result.trained()
    stored = {t.name: t.stored for t in trained.plan.tensors.values() if t.stored is not None and t.role != "bias"}
    legal = project(stored, decided.constraints)
    if moved := [name for name, s in stored.items() if not legal[name].same_numbers(s)]:
        raise UnsupportedError(f"The rules of '{target.name}' do not permit the learned scales", got=", ".join(moved))
    calibrated = [f"'{name}' was not quantized in training; it is calibrated" for name in stored if name not in names]
    floats = [f"'{name}' was quantized in training and stays in float" for name in names if name not in stored]
    notes = (*trained.plan.rewrites, *calibrated, *floats)
    trained.graph.device = where
    return replace(trained, plan=replace(trained.plan, rewrites=notes))


def _remove_quantizers(
    model: fx.GraphModule,
) -> tuple[fx.GraphModule, dict[str, QuantizeBase], dict[str, QuantizeBase]]:
    """Return the float network, the quantizers of results by node, and those of weights by name, on the CPU.

    Raises:
        UnsupportedError: a batch norm was not folded.
    """
    plain = copy.deepcopy(model).eval().cpu()
    modules = dict(plain.named_modules())
    learned: dict[str, QuantizeBase] = {}
    of_weights: dict[str, QuantizeBase] = {}
    for n in list(plain.graph.nodes):
        m: Any = modules[n.target] if n.op == "call_module" else None
        if isinstance(m, QuantizeBase):
            learned[n.args[0].name] = m
            n.replace_all_uses_with(n.args[0])
            plain.graph.erase_node(n)
        elif isinstance(m, FoldedBatchNorm) and f"{n.target}.weight" not in of_weights:
            if any(isinstance(modules.get(u.target), _BatchNorm) for u in n.users if u.op == "call_module"):
                check_folds(-1)
            layer: Any = m.fold()
            quantizer: Any = m.weight_quantizer
            with torch.no_grad():
                raw, layer.weight = layer.weight, nn.Parameter(quantizer.reals(layer.weight))
                _check_on_grid(f"{n.target}.weight", quantizer, layer.weight, quantizer(raw))
            plain.add_submodule(str(n.target), layer)
            of_weights[f"{n.target}.weight"] = quantizer
    plain.delete_all_unused_submodules()
    plain.recompile()
    return plain, learned, of_weights


def _check_on_grid(name: str, q: QuantizeBase, x: torch.Tensor, y: torch.Tensor) -> None:
    """Check that y is x, fake-quantized with the quantizer's scale and zero point.

    Raises:
        UnsupportedError: it is not; the message names the tensor.
    """
    scale, zero = q.numbers()
    off = (fake_quantize(x, scale, zero, q.grid, q.ch_axis if q.ch_axis >= 0 else None) - y).abs().max()
    if float(off) > _TOLERANCE * float(y.abs().max()):
        what = f"'{name}' was not rounded to equal steps of its scale, the only levels that formats have"
        raise UnsupportedError(what, got=type(getattr(q, "algorithm", q)).__name__, hint="train it with another method")


def _match_tensors(
    plain: fx.GraphModule, learned: Mapping[str, QuantizeBase], graph: Graph, args: Any, kwargs: Any
) -> dict[str, QuantizeBase]:
    """Return values of the graph -> quantizers, matched by equality of the trace's tensors for one batch."""
    inputs = flatten_call(json.loads(graph.in_spec), args, kwargs)
    with torch.no_grad():
        interpreter = fx.Interpreter(plain, garbage_collect_values=False)
        interpreter.run(*args, *kwargs.values())
        made = [o for n in graph.nodes for o in n.outputs]
        ours = {**dict(zip(graph.inputs, inputs)), **run(graph, inputs, keep=made)}
    results, out = {n.name: value for n, value in interpreter.env.items()}, {}
    for node, quantizer in learned.items():
        x = results[node]
        _check_on_grid(node, quantizer, x, quantizer(x).detach())
        for name, y in ours.items():
            alike = isinstance(y, torch.Tensor) and y.shape == x.shape and y.is_floating_point()
            if alike and float((x - y).abs().max()) <= _TOLERANCE * float(x.abs().max()):
                out[name] = quantizer
    return out


def _width_overrides(graph: Graph, names: Mapping[str, QuantizeBase]) -> dict[str, dict[str, int]]:
    """Return overrides for the bit widths of training that are not 8."""
    out: dict[str, dict[str, int]] = {}
    for n in graph.nodes:
        weights = [names[i].bitwidth for i in n.inputs if i in names and i in graph.weights]
        results = [names[o].bitwidth for o in n.outputs if o in names]
        widths = {k: bits[0] for k, bits in (("bits", weights), ("activation_bits", results)) if bits and bits[0] != 8}
        out |= {n.name: widths} if widths else {}
    return out


def _copy_learned_parameters(result: Result, names: Mapping[str, QuantizeBase]) -> None:
    """Copy learned scales and zero points to the quantizers of the result's model.

    Raises:
        UnsupportedError: a format cannot represent them, or tensors that share a scale learned different ones.
    """
    given: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
    for name, q in names.items():
        stored = result.plan.stored(name)
        if stored is None:
            continue
        if isinstance(q, AlgorithmQuantizer):
            check_deployable(q.rounds.algorithm, result.plan.tensors[name])
        if why := grid_mismatch(q.grid, stored.grid):
            hint = "`platforms_of(qconfig)` lists the platforms that fit a setting"
            raise UnsupportedError(
                f"'{result.platform.name}' cannot store '{name}' as it was trained: its format {stored.format} {why}",
                got=f"{q.bitwidth} bits, {q.qscheme}",
                hint=hint,
            )
        s, z = q.numbers()
        s, z = s.expand_as(stored.scale).float(), (z + (stored.grid.qmin - q.grid.qmin)).expand_as(stored.zero_point)
        quantizer = result.model.quantizer_of(name)
        other, s0, z0 = given.setdefault(id(quantizer), (name, s, z))
        if not (torch.equal(s, s0) and torch.equal(z, z0)):
            what = f"'{result.platform.name}' requires one scale for '{other}' and '{name}', and training learned two"
            raise UnsupportedError(what, got=f"{s0.reshape(-1)[:4].tolist()} and {s.reshape(-1)[:4].tolist()}")
        with torch.no_grad():
            quantizer.scale.copy_(s)
            quantizer.zero_point.copy_(z)
