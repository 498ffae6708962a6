"""What `import chipfit` offers; type checkers read this, and `__init__.py` finds each name by it."""

from typing import Any

from chipfit import errors as errors
from chipfit._version import __version__ as __version__
from chipfit.channel_pruning.prune import Pruned as Pruned
from chipfit.channel_pruning.prune import prune as prune
from chipfit.comparison import compare as compare
from chipfit.errors import ChipfitError as ChipfitError
from chipfit.frameworks import capture as capture
from chipfit.frameworks import load_model as load_model
from chipfit.generation.generate import generated as generated
from chipfit.generation.options import Generation as Generation
from chipfit.linting import Lint as Lint
from chipfit.linting import lint as lint
from chipfit.mct.framework_info import FrameworkInfo as FrameworkInfo
from chipfit.mct.gptq import (
    keras_gradient_post_training_quantization as keras_gradient_post_training_quantization,
)
from chipfit.mct.gptq import (
    pytorch_gradient_post_training_quantization as pytorch_gradient_post_training_quantization,
)
from chipfit.mct.hardware_representation import get_model as get_model
from chipfit.mct.ptq import keras_post_training_quantization as keras_post_training_quantization
from chipfit.mct.ptq import pytorch_post_training_quantization as pytorch_post_training_quantization
from chipfit.mct.qat import (
    keras_quantization_aware_training_finalize as keras_quantization_aware_training_finalize,
)
from chipfit.mct.qat import (
    keras_quantization_aware_training_finalize_experimental as keras_quantization_aware_training_finalize_experimental,
)
from chipfit.mct.qat import (
    keras_quantization_aware_training_init as keras_quantization_aware_training_init,
)
from chipfit.mct.qat import (
    keras_quantization_aware_training_init_experimental as keras_quantization_aware_training_init_experimental,
)
from chipfit.mct.qat import (
    pytorch_quantization_aware_training_finalize as pytorch_quantization_aware_training_finalize,
)
from chipfit.mct.qat import (
    pytorch_quantization_aware_training_finalize_experimental as pytorch_quantization_aware_training_finalize_experimental,  # noqa: E501
)
from chipfit.mct.qat import (
    pytorch_quantization_aware_training_init as pytorch_quantization_aware_training_init,
)
from chipfit.mct.qat import (
    pytorch_quantization_aware_training_init_experimental as pytorch_quantization_aware_training_init_experimental,
)
from chipfit.mct.target_platform.capabilities import DefaultDict as DefaultDict
from chipfit.mct.target_platform.targets import get_target_platform_capabilities as get_target_platform_capabilities
from chipfit.pipeline import quantize as quantize
from chipfit.plan.record import Plan as Plan
from chipfit.platform.load import load_platform as load_platform
from chipfit.platform.schema import Platform as Platform
from chipfit.report.comparison import Comparison as Comparison
from chipfit.report.report import Report as Report
from chipfit.result import Result as Result
from chipfit.result import load as load
from chipfit.search.limits import Limits as Limits
from chipfit.settings import BEST as BEST
from chipfit.settings import Settings as Settings
from chipfit.streams import Drift as Drift
from chipfit.streams import Streaming as Streaming
from chipfit.streams import drift as drift
from chipfit.streams import streaming as streaming
from chipfit.verify import Verification as Verification
from chipfit.verify.file import verify_file as verify_file

def __getattr__(name: str) -> Any: ...
