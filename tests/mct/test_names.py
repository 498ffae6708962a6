"""Names of MCT that are called otherwise here."""

import importlib
import re

import pytest

import chipfit
from chipfit.mct.names import EQUIVALENTS

DOORS = "core core.network_editor gptq ptq qat target_platform trainable_infrastructure hardware_representation".split()


@pytest.mark.parametrize("door", DOORS)
def test_a_name_of_mct_is_refused_with_its_equivalent(door):
    module = importlib.import_module(f"chipfit.{door}")
    with pytest.raises(ImportError, match=r"chipfit\.ptq\.keras_post_training_quantization"):
        module.keras_post_training_quantization_experimental
    with pytest.raises(ImportError, match=rf"Where: chipfit\.{re.escape(door)}.*chipfit\.gptq\.GradientPTQConfig"):
        exec(f"from chipfit.{door} import GradientPTQConfigV2", {})
    assert not hasattr(module, "no_name_of_mct")


def test_at_the_top_as_well():
    with pytest.raises(ImportError, match="ThresholdSelectionMethod.*QuantizationErrorMethod"):
        chipfit.ThresholdSelectionMethod
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        chipfit.nothing


@pytest.mark.parametrize("name", sorted(EQUIVALENTS))
def test_every_equivalent_exists(name):
    path = EQUIVALENTS[name]
    if not path.startswith("none: "):
        for other in re.findall(r"[\w.]+", re.sub(r"\(.*", "", path).replace(" with ", " ")):
            found = chipfit
            for part in other.split("."):
                found = getattr(found, part)


def test_names_that_mct_has_at_the_top():
    assert chipfit.DefaultDict is chipfit.target_platform.DefaultDict
    assert chipfit.get_target_platform_capabilities("pytorch").name
    assert (
        chipfit.target_platform.FrameworkQuantizationCapabilities is chipfit.target_platform.TargetPlatformCapabilities
    )
