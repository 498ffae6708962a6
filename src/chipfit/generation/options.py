"""The options of data generation."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from chipfit.errors import ConfigError
from chipfit.validation import Positive, PositiveInt, record

#: lowest and highest value of an input: a number each, or one number for each channel
Bounds = tuple[float | Sequence[float], float | Sequence[float]]


@record(ConfigError, frozen=True)
class Generation:
    """Options of `chipfit.generated`; the defaults suit images of any network with batch norms.

    Raises:
        ConfigError, UnknownNameError: an option has the wrong type, an unknown value or an unknown name.

    Examples:
        >>> from chipfit import Generation
        >>> Generation(steps=100, batch=16).steps
        100
    """

    steps: PositiveInt | None = None  #: of gradient descent for each batch; None: 20 to 60, fewer for more work
    batch: PositiveInt = 32  #: images that are optimised together
    rate: Positive = 0.1  #: learning rate, in standard deviations of the start images
    optimizer: Any = torch.optim.Adam  #: a class of `torch.optim`
    #: the rate over the steps: falls along a cosine, by half on a plateau, the same and restarts, to a tenth twice
    schedule: Literal["cosine", "plateau", "plateau_with_reset", "step"] = "cosine"
    #: values whose statistics are compared: those of a batch, of each image, or of all images
    statistics: Literal["batch", "image", "all"] = "batch"
    #: squared differences in units of the learned deviation of a channel, or in the units of the tensor
    distance: Literal["relative", "absolute"] = "relative"
    norms: tuple[str, ...] = ()  #: class names of batch norms whose statistics count; () for all
    first_weight: Positive = 1.0  #: weight of the first batch norm, relative to that of each other one
    #: term that makes the network certain of its output: none, or one of the spread of scores
    output: Literal["none", "spread", "inverse_spread", "regularized_spread"] = "none"
    output_weight: Positive = 1e-3
    last: tuple[str, ...] = ()  #: class names of layers of which "regularized_spread" takes the last; () for any
    start: Literal["gaussian", "diverse"] = "gaussian"  #: noise, or noise with a mean and deviation of each image
    smooth: bool = True  #: filter images by 3 x 3 pixels
    flip: bool = True  #: mirror images at random in each step
    extra_pixels: tuple[int, int] = (0, 0)  #: rows and columns more than an image has, of which each step takes a part
    bounds: Bounds | None = None  #: range that images keep; None: any
