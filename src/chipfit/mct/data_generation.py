"""Data generation under the names of MCT: configurations, and functions that make images from batch norms."""

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from chipfit.errors import ConfigError
from chipfit.frameworks import facts_of, framework_of
from chipfit.generation.generate import generated
from chipfit.generation.options import Bounds, Generation
from chipfit.mct.core.config import AtLeast0
from chipfit.validation import Positive, PositiveInt, record

__all__ = ["BNLayerWeightingType", "BatchNormAlignemntLossType", "DataGenerationConfig", "DataInitType"]
__all__ += ["ImageGranularity", "ImageNormalizationType", "ImagePipelineType", "OutputLossType", "SchedulerType"]
__all__ += ["get_keras_data_generation_config", "get_pytorch_data_generation_config"]
__all__ += ["keras_data_generation_experimental", "pytorch_data_generation_experimental"]


class ImageGranularity(Enum):
    """Images whose statistics are compared together."""

    ImageWise = 0
    BatchWise = 1
    AllImages = 2


class DataInitType(Enum):
    """Noise that images start from."""

    Gaussian = 0
    Diverse = 1


class ImagePipelineType(Enum):
    """Treatment of images before the network."""

    SMOOTHING_AND_AUGMENTATION = "smoothing_and_augmentation"
    IDENTITY = "identity"


class ImageNormalizationType(Enum):
    """Normalisation of pixels from 0 to 255 in training, to which images are clipped."""

    TORCHVISION = "torchvision"
    KERAS_APPLICATIONS = "keras_applications"
    NO_NORMALIZATION = "no_normalization"


class BNLayerWeightingType(Enum):
    """Weights of batch norms in the loss; GRAD is not supported, as in MCT."""

    AVERAGE = "average"
    FIRST_LAYER_MULTIPLIER = "first_layer_multiplier"
    GRAD = "grad"


class BatchNormAlignemntLossType(Enum):
    """Distances from the statistics of a batch norm; the name is spelt as in MCT."""

    L2_SQUARE = "l2_square"


class OutputLossType(Enum):
    """Terms of the loss that spread the scores of the network."""

    NONE = "none"
    NEGATIVE_MIN_MAX_DIFF = "negative_min_max_diff"
    INVERSE_MIN_MAX_DIFF = "inverse_min_max_diff"
    REGULARIZED_MIN_MAX_DIFF = "regularized_min_max_diff"


class SchedulerType(Enum):
    """Schedules of the learning rate."""

    REDUCE_ON_PLATEAU = "reduce_on_plateau"
    REDUCE_ON_PLATEAU_WITH_RESET = "reduce_on_plateau_with_reset"
    STEP = "step"


_GRANULARITY = dict(zip(ImageGranularity, ("image", "batch", "all"), strict=True))
_OUTPUT = dict(zip(OutputLossType, ("none", "spread", "inverse_spread", "regularized_spread"), strict=True))
_SCHEDULE: dict[SchedulerType | None, str] = {
    None: "cosine",
    **dict(zip(SchedulerType, ("plateau", "plateau_with_reset", "step"), strict=True)),
}
#: means and deviations of the pixels of each channel
_NORMALIZATION: dict[ImageNormalizationType | None, tuple[Sequence[float], Sequence[float]]] = {
    ImageNormalizationType.TORCHVISION: ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    ImageNormalizationType.KERAS_APPLICATIONS: ((127.5,) * 3, (127.5,) * 3),
    ImageNormalizationType.NO_NORMALIZATION: ((0.0,) * 3, (1.0,) * 3),
}
_FIRST = 10.0  #: weight of the first batch norm with FIRST_LAYER_MULTIPLIER


@record(ConfigError)
class DataGenerationConfig:
    """Options of data generation.

    Raises:
        UnknownNameError: there is no such option.
        ConfigError: a value has the wrong type or is out of bounds.
    """

    n_iter: PositiveInt
    optimizer: Any  #: a class of `torch.optim`, or a Keras one of the same name
    data_gen_batch_size: PositiveInt
    initial_lr: Positive
    output_loss_multiplier: AtLeast0
    image_granularity: ImageGranularity = ImageGranularity.AllImages
    scheduler_type: SchedulerType | None = None
    bn_alignment_loss_type: BatchNormAlignemntLossType | None = None
    output_loss_type: OutputLossType | None = None
    data_init_type: DataInitType | None = None
    layer_weighting_type: BNLayerWeightingType | None = None
    image_pipeline_type: ImagePipelineType | None = None
    image_normalization_type: ImageNormalizationType | None = None
    extra_pixels: int | tuple[int] | tuple[int, int] = 0
    bn_layer_types: Sequence[Any] = ()  #: classes of batch norms whose statistics count; () for all
    last_layer_types: Sequence[Any] = ()  #: classes of layers whose last is that of REGULARIZED_MIN_MAX_DIFF
    image_clipping: bool = True

    def to_generation(self) -> Generation:
        """Return the options of `chipfit.generated`.

        Raises:
            ConfigError: an option is not supported.
        """
        if self.layer_weighting_type is BNLayerWeightingType.GRAD:
            raise ConfigError("Option 'layer_weighting_type' does not support GRAD", allowed="AVERAGE")
        treated = self.image_pipeline_type is not ImagePipelineType.IDENTITY
        first = self.layer_weighting_type is BNLayerWeightingType.FIRST_LAYER_MULTIPLIER
        multiplier = self.output_loss_multiplier
        output = _OUTPUT[self.output_loss_type or OutputLossType.NONE] if multiplier else "none"
        relative = self.bn_alignment_loss_type is not BatchNormAlignemntLossType.L2_SQUARE
        options: dict[str, Any] = {"steps": self.n_iter, "batch": self.data_gen_batch_size, "rate": self.initial_lr}
        options |= {"optimizer": _torch_optimizer(self.optimizer), "schedule": _SCHEDULE[self.scheduler_type]}
        options |= {"statistics": _GRANULARITY[self.image_granularity], "first_weight": _FIRST if first else 1.0}
        options |= {"distance": "relative" if relative else "absolute"}
        options |= {"norms": _names(self.bn_layer_types), "last": _names(self.last_layer_types)}
        options |= {"output": output, "output_weight": multiplier or 1.0, "bounds": self._bounds() if treated else None}
        options |= {"start": "diverse" if self.data_init_type is DataInitType.Diverse else "gaussian"}
        options |= {"smooth": treated, "flip": treated, "extra_pixels": _pair(self.extra_pixels if treated else 0)}
        return Generation(**options)

    def _bounds(self) -> Bounds | None:
        if not self.image_clipping or self.image_normalization_type is None:
            return None
        pixels = list(zip(*_NORMALIZATION[self.image_normalization_type], strict=True))
        return [(0 - mean) / deviation for mean, deviation in pixels], [(255 - m) / d for m, d in pixels]


def get_pytorch_data_generation_config(
    n_iter: int = 500,
    optimizer: Any = torch.optim.RAdam,
    data_gen_batch_size: int = 32,
    initial_lr: float = 16,
    output_loss_multiplier: float = 1e-5,
    scheduler_type: SchedulerType = SchedulerType.REDUCE_ON_PLATEAU_WITH_RESET,
    bn_alignment_loss_type: BatchNormAlignemntLossType = BatchNormAlignemntLossType.L2_SQUARE,
    output_loss_type: OutputLossType = OutputLossType.NEGATIVE_MIN_MAX_DIFF,
    data_init_type: DataInitType = DataInitType.Gaussian,
    layer_weighting_type: BNLayerWeightingType = BNLayerWeightingType.AVERAGE,
    image_granularity: ImageGranularity = ImageGranularity.AllImages,
    image_pipeline_type: ImagePipelineType = ImagePipelineType.SMOOTHING_AND_AUGMENTATION,
    image_normalization_type: ImageNormalizationType = ImageNormalizationType.TORCHVISION,
    extra_pixels: int | tuple[int] | tuple[int, int] = 32,
    bn_layer_types: Sequence[Any] = (),
    last_layer_types: Sequence[Any] = (),
    image_clipping: bool = True,
) -> DataGenerationConfig:
    """Return MCT's options for PyTorch; 500 iterations take minutes on a processor."""
    return DataGenerationConfig(**locals())


def get_keras_data_generation_config(
    n_iter: int = 500,
    optimizer: Any = torch.optim.Adam,
    data_gen_batch_size: int = 32,
    initial_lr: float = 1,
    output_loss_multiplier: float = 1e-3,
    scheduler_type: SchedulerType = SchedulerType.REDUCE_ON_PLATEAU,
    bn_alignment_loss_type: BatchNormAlignemntLossType = BatchNormAlignemntLossType.L2_SQUARE,
    output_loss_type: OutputLossType = OutputLossType.REGULARIZED_MIN_MAX_DIFF,
    data_init_type: DataInitType = DataInitType.Gaussian,
    layer_weighting_type: BNLayerWeightingType = BNLayerWeightingType.AVERAGE,
    image_granularity: ImageGranularity = ImageGranularity.BatchWise,
    image_pipeline_type: ImagePipelineType = ImagePipelineType.SMOOTHING_AND_AUGMENTATION,
    image_normalization_type: ImageNormalizationType = ImageNormalizationType.KERAS_APPLICATIONS,
    extra_pixels: int | tuple[int] | tuple[int, int] = 32,
    bn_layer_types: Sequence[Any] = (),
    image_clipping: bool = False,
) -> DataGenerationConfig:
    """Return MCT's options for Keras; 500 iterations take minutes on a processor."""
    return DataGenerationConfig(**locals())


def pytorch_data_generation_experimental(
    model: Any,
    n_images: int,
    output_image_size: int | tuple[int] | tuple[int, int],
    data_generation_config: DataGenerationConfig,
) -> list[Any]:
    """Make images of three channels from the batch norms of a PyTorch module; `torch.manual_seed` repeats them.

    Args:
        output_image_size: height and width, or both at once.

    Returns:
        One tensor [1, 3, H, W] for each image.

    Raises:
        ConfigError, DataError, CaptureError: see `chipfit.generated`.
    """
    size = _pair(output_image_size)
    return _generated(model, n_images, torch.zeros(2, 3, *size), data_generation_config)


def keras_data_generation_experimental(
    model: Any,
    n_images: int,
    output_image_size: int | tuple[int] | tuple[int, int],
    data_generation_config: DataGenerationConfig,
) -> list[Any]:
    """Make images from the batch norms of a Keras model; `torch.manual_seed` repeats them.

    Images have the channels of the model's input, or three if the model does not declare it.

    Returns:
        One array [1, H, W, C] for each image; the rest is as in `pytorch_data_generation_experimental`.

    Raises:
        ConfigError: the model takes something else than one image.
    """
    shape = getattr(model, "input_shape", (None, None, None, 3))
    if not isinstance(shape, tuple) or len(shape) != 4:
        what, allowed = "Images cannot be generated for the input of this model", "one image (None, height, width, C)"
        raise ConfigError(what, got=repr(shape), allowed=allowed, hint="chipfit.generated(model, count, example=...)")
    example = torch.zeros(2, *_pair(output_image_size), shape[-1] or 3)
    return [x.numpy() for x in _generated(model, n_images, example, data_generation_config)]


def _generated(model: Any, count: int, example: torch.Tensor, config: Any) -> list[torch.Tensor]:
    if not isinstance(config, DataGenerationConfig):
        prefix = facts_of(framework_of(model)).title.lower()
        hint, got = f"get_{prefix}_data_generation_config()", type(config).__name__
        raise ConfigError("Argument 'data_generation_config' must be a DataGenerationConfig", got=got, hint=hint)
    seed = int(torch.randint(1 << 62, ()))
    batches = generated(model, count, example=example, options=config.to_generation(), seed=seed)
    for note in batches.notes:  # which the images lose with their list
        logging.getLogger("chipfit").warning(note)
    return [image for batch in batches for image in batch.split(1)]


def _names(types: Sequence[Any]) -> tuple[str, ...]:
    """Return the names of classes of layers.

    Raises:
        ConfigError: one is not a class.
    """
    wrong = [t for t in types if not isinstance(t, type)]
    if wrong:
        raise ConfigError("Types of layers must be classes", got=repr(wrong[0]))
    return tuple(t.__name__ for t in types)


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Return height and width, from one number for both or from two.

    Raises:
        ConfigError: there are more than two numbers, or none.
    """
    both = (size, size) if isinstance(size, int) else tuple(size) * (3 - len(size))
    if len(both) != 2:
        raise ConfigError("A size must be a number, or a height and a width", got=repr(size))
    return both[0], both[1]


def _torch_optimizer(optimizer: Callable[..., Any]) -> Any:
    """Return the optimizer of torch with the name of a Keras one; other optimizers unchanged.

    Raises:
        ConfigError: the optimizer is unknown to torch.
    """
    if not isinstance(optimizer, type) or optimizer.__module__.partition(".")[0] not in ("keras", "tensorflow"):
        return optimizer
    known = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    found = known.get(optimizer.__name__.lower())
    if found is None:
        raise ConfigError("Optimizer is unknown to PyTorch", got=optimizer.__name__, allowed=", ".join(sorted(known)))
    return found
