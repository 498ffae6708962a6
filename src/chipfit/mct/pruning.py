"""Structured pruning under the names of MCT: a limit on the memory of float weights, and masks of channels."""

import math
from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from typing import Annotated, Any

import numpy as np

from chipfit.calibration.progress import Progress
from chipfit.channel_pruning.budget import Budget, parameters
from chipfit.channel_pruning.channels import Channels
from chipfit.channel_pruning.prune import Options, prune_to
from chipfit.errors import ConfigError, UnsupportedError
from chipfit.graph.ir import Graph
from chipfit.graph.linear import is_linear
from chipfit.mct.core.config import ResourceUtilization
from chipfit.mct.ptq import DataGenerator, checked, first_batch_of, form_for_keras
from chipfit.mct.target_platform.capabilities import TargetPlatformCapabilities
from chipfit.mct.target_platform.model import TargetPlatformModel
from chipfit.mct.target_platform.targets import get_target_platform_capabilities
from chipfit.validation import PositiveInt, by_name, record

__all__ = ["ChannelsFilteringStrategy", "ImportanceMetric", "PruningConfig", "PruningInfo"]
__all__ += ["keras_pruning_experimental", "pytorch_pruning_experimental"]

#: bytes of a float parameter, in which MCT counts memory
_BYTES = 4


class ImportanceMetric(Enum):
    """Metrics of the importance of channels."""

    LFH = 0  #: label-free Hessian, see `chipfit.channel_pruning.importance`


class ChannelsFilteringStrategy(Enum):
    """Ways to choose channels."""

    GREEDY = 0  #: the groups that lose least for the memory that they save, one after another


@record(ConfigError)
class PruningConfig:
    """Options of pruning."""

    num_score_approximations: PositiveInt = 32  #: number of samples that measure importance
    importance_metric: Annotated[ImportanceMetric, by_name(ImportanceMetric)] = ImportanceMetric.LFH
    #: no effect: there is no other
    channels_filtering_strategy: Annotated[ChannelsFilteringStrategy, by_name(ChannelsFilteringStrategy)] = (
        ChannelsFilteringStrategy.GREEDY
    )


@record(ConfigError, frozen=True)
class PruningInfo:
    """The channels that were removed, and the importance of all."""

    pruning_masks: Mapping[Any, Any] = field(default_factory=dict)  #: layer -> 1 for each channel that stays, else 0
    importance_scores: Mapping[Any, Any] = field(default_factory=dict)  #: layer -> score of each channel


def pytorch_pruning_experimental(
    model: Any,
    target_resource_utilization: ResourceUtilization,
    representative_data_gen: DataGenerator,
    pruning_config: PruningConfig | None = None,
    target_platform_capabilities: Any = None,
) -> tuple[Any, PruningInfo]:
    """Remove output channels of a PyTorch module until its float parameters keep a limit on memory.

    Weights that stay keep their numbers, as in MCT: the smaller module needs training. `chipfit.prune` also fits them.

    Args:
        model: a module in any mode; it is copied, never changed.
        target_resource_utilization: `weights_memory` at 4 bytes for each parameter; other limits are not supported.
        representative_data_gen: function without arguments that yields lists of arrays or tensors, one for each input.
        pruning_config: `PruningConfig()` when omitted.
        target_platform_capabilities: as of `pytorch_post_training_quantization`; its `simd_size` is the number of
            channels that are removed at a time.

    Returns:
        The smaller module, which can be trained and quantized, and information about it.

    Raises:
        PruningError: the limit cannot be kept without removing whole layers.
        UnsupportedError: a limit other than `weights_memory`.
        ConfigError, DataError: an argument is invalid.
    """
    return _prune(
        "pruning_experimental",
        model,
        target_resource_utilization,
        representative_data_gen,
        pruning_config,
        target_platform_capabilities,
    )


keras_pruning_experimental = form_for_keras(
    pytorch_pruning_experimental, "Remove output channels of a Keras 3 model", "model"
)


def _prune(what: str, model: Any, limits: Any, generator: Any, config: Any, platform: Any) -> tuple[Any, PruningInfo]:
    config = checked(PruningConfig, config, "pruning_config", what, model) or PruningConfig()
    limits = checked(ResourceUtilization, limits, "target_resource_utilization", what, model) or ResourceUtilization()
    other = [name for name, v in vars(limits).items() if name != "weights_memory" and math.isfinite(v)]
    if other:
        hint = "limit weights_memory, or use chipfit.prune(model, data, platform, limits=chipfit.Limits(...))"
        raise UnsupportedError(f"MCT's pruning has no limit on {', '.join(other)}", hint=hint)
    platform = get_target_platform_capabilities("pytorch") if platform is None else platform
    if isinstance(platform, TargetPlatformModel):
        platform = TargetPlatformCapabilities(platform)
    modelled = platform if isinstance(platform, TargetPlatformCapabilities) else None

    def widths(graph: Graph) -> dict[str, int]:
        """Return the least `simd_size` of the candidates of each layer."""
        assert modelled is not None  # for mypy: it is called for modelled platforms only
        of_nodes = ((n.name, modelled.get_qco_by_node(n)) for n in graph.nodes if is_linear(graph, n))
        found = ((name, [c.simd_size or 1 for c in qco.quantization_config_list]) for name, qco in of_nodes)
        return {name: min(sizes) for name, sizes in found}

    def budgets(channels: Channels) -> list[Budget]:
        return [parameters(channels, limits.weights_memory / _BYTES)]

    options = Options(
        importance=config.importance_metric.name.lower(),
        simd=None if modelled is None else widths,
        repair=False,
        samples=config.num_score_approximations,
    )
    pruned = prune_to(model, generator, platform, budgets, options, first_batch_of(generator), Progress(False))
    masks = {name: mask.numpy().astype(np.int64) for name, mask in pruned.masks.items()}
    return pruned.model, PruningInfo(masks, {name: x.numpy() for name, x in pruned.importance.items()})
