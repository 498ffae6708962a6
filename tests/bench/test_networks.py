"""Networks: published sizes, weights, and networks of libraries."""

import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from chipfit.bench.networks import model_entry
from chipfit.errors import ConfigError, UnknownNameError

#: published numbers of parameters, and of multiplications at a side length [pixels]
SIZES = [
    ("resnet18", 224, 11_689_512, 1.814e9),
    ("resnet50", 224, 25_557_032, 4.089e9),
    ("mobilenet_v2", 224, 3_504_872, 0.3008e9),
    ("efficientnetlite_b0", 224, 4_652_008, 0.3852e9),
    ("regnetx_600m", 224, 6_196_040, 0.6009e9),
    ("resnet20", 32, 272_474, 0.0408e9),
]


def multiplications(model: nn.Module, side: int) -> int:
    """Counted on shapes alone."""
    total = 0

    def count(m: nn.Module, _: object, out: torch.Tensor) -> None:
        nonlocal total
        total += out[0].numel() * m.weight[0].numel() if isinstance(m, nn.Conv2d) else m.weight.numel()

    for m in model.modules():
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            m.register_forward_hook(count)
    model(torch.zeros(1, 3, side, side, device="meta"))
    return total


@pytest.mark.parametrize("name, side, parameters, published", SIZES)
def test_a_network_has_its_published_size(name, side, parameters, published):
    with torch.device("meta"):
        model = model_entry({"type": name}).eval()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert multiplications(model, side) == pytest.approx(published, rel=5e-4)


def test_parameters_have_the_names_of_torchvision():
    names = dict(model_entry({"type": "resnet18", "kwargs": {"classes": 5}}).state_dict())
    assert {"conv1.weight", "layer1.0.bn2.running_var", "layer2.0.downsample.1.bias", "fc.weight"} <= names.keys()
    names = dict(model_entry({"type": "mobilenet_v2"}).state_dict())
    wanted = "features.0.0.weight features.1.conv.0.0.weight features.2.conv.3.bias classifier.1.weight"
    assert set(wanted.split()) <= set(names)


def test_weights_are_loaded_from_a_file_or_found_in_a_folder_by_the_name_of_the_network(tmp_path, monkeypatch):
    model = model_entry({"type": "resnet20"})
    save_file(model.state_dict(), tmp_path / "resnet20.safetensors")
    monkeypatch.setenv("CHIPFIT_WEIGHTS", str(tmp_path))
    assert torch.equal(model_entry({"type": "resnet20"}, pretrained=True).fc.weight, model.fc.weight)
    again = model_entry({"type": "resnet20"}, pretrained=True, path=tmp_path / "resnet20.safetensors").state_dict()
    assert all(torch.equal(w, again[n]) for n, w in model.state_dict().items())
    assert not torch.equal(model_entry({"type": "resnet20"}).fc.weight, model.fc.weight)
    with pytest.raises(ConfigError, match="no trained weights.*CHIPFIT_WEIGHTS"):
        model_entry({"type": "mobilenet_v2_small"}, pretrained=True)


@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
def test_a_missing_library_is_named_with_its_installation(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.models", None)
    with pytest.raises(ConfigError, match=f"This network needs {library}.*pip install {library}"):
        model_entry({"type": f"{library}:resnet18"})


@pytest.mark.parametrize(
    "entry, how, error, says",
    [
        ({"type": "resnet19"}, {}, UnknownNameError, "resnet18"),
        ({"type": "resnet20"}, {"pretrained": True}, ConfigError, "no trained weights"),
        ({"type": "resnet20", "kwargs": {"depth": 3}}, {}, ConfigError, "cannot be created"),
        ({"type": "nowhere:net"}, {}, ConfigError, "cannot be imported"),
        ({"type": "resnet20"}, {"path": __file__}, ConfigError, "weights cannot be read"),
    ],
)
def test_invalid_networks_and_weights_are_refused(entry, how, error, says):
    with pytest.raises(error, match=says):
        model_entry(entry, **how)


def test_a_network_of_transformers_is_created_by_its_model_type():
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    kwargs = {**small, "image_size": 16, "patch_size": 8, "num_labels": 4}
    model = model_entry({"type": "transformers:vit", "kwargs": kwargs})
    assert model.eval()(torch.zeros(2, 3, 16, 16)).shape == (2, 4)
