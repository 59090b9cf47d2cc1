"""An ordinary LightningModule, trained and shaped by its Trainer: `pip install "espalier[lightning]"`. CPU, seconds."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import espalier
from espalier.integrations.lightning import Shaping


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("test_error", (self(batch[0]).argmax(1) != batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-3)


def main() -> None:
    pl.seed_everything(0, verbose=False)
    data = espalier.data.load("digits").flatten().as_floats()
    shaping, module = Shaping(target=0.3), Digits()
    trainer = pl.Trainer(
        max_epochs=15, accelerator="cpu", callbacks=[shaping], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(*data.train), 64, shuffle=True))
    print(shaping.result)
    print(module.net)  # the small network: module is what ships, and so is shaping.result.model
    (score,) = trainer.test(module, DataLoader(TensorDataset(*data.test), 512), verbose=False)
    print(f"test error {score['test_error']:.2%}")


if __name__ == "__main__":
    main()
