"""4-bit weights trained by Lightning, with distillation from the float network and an average of what trains.

pip install lightning
python examples/train_with_lightning.py
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chipfit
from chipfit.training import EMA, Distillation


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, 3, 8, 8] whose brightest channel is their label [N]."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (256,), generator=draw)
    images = torch.randn(256, 3, 8, 8, generator=draw)
    images[torch.arange(256), labels] += 0.5
    return images, labels


class Student(lightning.LightningModule):
    """What Lightning trains: the quantized network beside the float one."""

    def __init__(self, result: chipfit.Result) -> None:
        super().__init__()
        self.distill, self.ema, self.losses = Distillation(result, temperature=2.0), EMA(result.model, 0.8), []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        outputs, loss = self.distill(batch[0])
        loss = loss + nn.functional.cross_entropy(outputs, batch[1])
        self.losses.append(float(loss))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.ema.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.distill.parameters() if p.requires_grad], 0.01, momentum=0.9)


def main() -> dict[str, float | bool]:
    """The loss of the first and the last epoch, and whether the runtime computed the simulated integers."""
    torch.manual_seed(0)
    images, labels = data()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)).eval()
    chosen: dict[str, Any] = {"platform": "tflite_int8", "overrides": {"*": {"bits": 4}}, "training": "lsq"}
    result = chipfit.quantize(model, images[:64], **chosen, progress=False)

    student = Student(result)
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(images, labels), batch_size=32)
    trainer.fit(student, loader)
    result.model.eval()
    with student.ema.swapped():
        trained = result.trained()

    steps = len(loader)
    first, last = (sum(part) / steps for part in (student.losses[:steps], student.losses[-steps:]))
    exact = trained.verify([images[:16]]).exact
    print(f"loss {first:.3f} -> {last:.3f}; the device computes what was trained: {exact}")
    return {"first": first, "last": last, "exact": exact}


if __name__ == "__main__":
    main()
