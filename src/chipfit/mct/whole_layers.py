"""Layers of the user's own Keras classes that stay layers of the quantized model, in float."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from chipfit.frameworks import framework_of, part
from chipfit.mct.core.network_editor import EditRule, ReplaceLayer
from chipfit.platform.load import load_platform


@contextmanager
def whole_layers(model: Any, rules: Sequence[EditRule], platform: Any) -> Iterator[None]:
    """Let layers of a Keras model be read whole: each is one node, which calls it, and is a layer of the result.

    These are layers of classes of the user's own that rules of the network editor put into the model, and layers of
    such classes that a chip runs without quantization of their results.
    """
    if framework_of(model) != "keras":
        yield
        return
    chip = load_platform(platform)
    put_in = tuple(r.action.layer_type for r in rules if isinstance(r.action, ReplaceLayer))
    plain = [label.removeprefix("@") for rule in chip.ops if rule.exec == "float" for label in rule.match]
    listed = [m for label in plain for m in chip.sets.get(label, ()) if m.type and not m.op]

    def stays(layer: Any) -> bool:
        kind = type(layer).__name__
        return isinstance(layer, put_in) or (
            any(m.type == kind for m in listed) and any(m.match("", kind, layer.get_config()) for m in listed)
        )

    with part("keras", "translate").whole_layers(stays):
        yield
