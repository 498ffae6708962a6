"""A quantized network trained by the Trainer of Hugging Face's transformers.

pip install transformers accelerate
python examples/train_with_transformers.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import chipfit
from chipfit.training import Oscillations


def data() -> list[dict[str, torch.Tensor]]:
    """Images [3, 8, 8] whose brightest channel is their label."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for label in torch.randint(0, 3, (128,), generator=draw):
        image = torch.randn(3, 8, 8, generator=draw)
        image[label] += 0.5
        rows.append({"images": image, "labels": label})
    return rows


class Classifier(nn.Module):
    """What the Trainer wants: a module that returns its loss first."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.network(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Calm(TrainerCallback):
    """Freezes weights that oscillate, behind each step of the optimizer."""

    def __init__(self, network: nn.Module) -> None:
        self.oscillations = Oscillations(network, momentum=0.1, threshold=0.3)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.oscillations.step()


def main(folder: Path) -> dict[str, float | bool]:
    """The loss of the first and the last steps, and whether ONNX Runtime computed the simulated integers."""
    torch.manual_seed(0)
    rows = data()
    images = torch.stack([row["images"] for row in rows])
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)).eval()
    result = chipfit.quantize(model, images[:64], platform="ort_cpu", training="lsq", progress=False)

    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=4,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    callback = Calm(result.model)
    trainer = Trainer(Classifier(result.model), arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    result.model.eval()

    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    exact = result.trained().verify([images[:16]]).exact
    print(f"loss {losses[0]} -> {losses[-1]}; the device computes what was trained: {exact}")
    return {"first": float(losses[0]), "last": float(losses[-1]), "exact": exact}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
