"""PyTorch models by their names in other libraries: `timm:NAME`, and folders that transformers saved."""

import os
from typing import Any

from torch import nn

from chipfit.errors import CaptureError, first_line, import_optional, raise_bug

_TIMM = "timm:"
#: tasks of architectures, by which classes of transformers load them
_TASKS = "SequenceClassification TokenClassification QuestionAnswering MaskedLM CausalLM ImageClassification "
_TASKS += "SemanticSegmentation ObjectDetection AudioClassification CTC"


def is_named(text: str) -> bool:
    """Return whether a text names a model of timm, or a folder with a model of transformers."""
    return text.startswith(_TIMM) or os.path.isfile(os.path.join(text, "config.json"))


def load_named(text: str) -> nn.Module:
    """Load a model by `timm:NAME`, with its trained weights, or from a folder that `save_pretrained` wrote.

    Nothing in the folder is executed: weights are read from safetensors, and code of the model's own is refused.

    Raises:
        CaptureError: The library is not installed, or does not know the model, or its weights are not here.
    """
    try:
        model = _of_timm(text.removeprefix(_TIMM)) if text.startswith(_TIMM) else _of_transformers(text)
    except Exception as e:  # these libraries raise what they like
        raise_bug(e)
        raise CaptureError(f"'{text}' cannot be loaded", got=first_line(e)) from e
    return model.eval()


def _of_timm(name: str) -> Any:
    timm = import_optional("timm", "A model of timm", CaptureError, "timm")
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:5]
        raise CaptureError("timm has no such model", got=name, allowed=", ".join(near), hint="timm.list_models()")
    return timm.create_model(name, pretrained=True)


def _of_transformers(folder: str) -> Any:
    transformers = import_optional("transformers", "A folder of transformers", CaptureError, "transformers")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    named = (config.architectures or [""])[0]
    task = next((f"For{task}" for task in _TASKS.split() if named.endswith(f"For{task}")), "")
    head = "AutoModel" + ("ForCausalLM" if named.endswith("LMHeadModel") else task)
    options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    model = getattr(transformers, head).from_pretrained(folder, config=config, **options)
    model.config.return_dict = False  # tuples, as captured programs have them
    return model
