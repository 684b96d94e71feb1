"""Fit a tiny model with the Lightning Trainer, profiled: python lightning_fit.py profile.yaml."""

import sys

import lightning
import torch

from rankscope.integrations.lightning import RankscopeCallback


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch):
        return self.layer(batch).square().mean()

    def validation_step(self, batch):
        self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main(config, model=None, **arguments):
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
    settings = {"max_steps": 6, "accumulate_grad_batches": 2, "accelerator": "cpu", "devices": 1, **arguments}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(callbacks=[RankscopeCallback(config)], **quiet, **settings)
    trainer.fit(model or Line(), data, data)


if __name__ == "__main__":
    main(sys.argv[1])
