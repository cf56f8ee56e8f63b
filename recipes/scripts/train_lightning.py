"""A plain Lightning script: a small classifier on random data. Knows nothing of the launcher."""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        if self.global_step % 10 == 0 and self.trainer.is_global_zero:
            print(f"step {self.global_step} loss {loss.item():.4f}", flush=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        accuracy = (self.net(x).argmax(dim=1) == y).float().mean()
        self.log("val/accuracy", accuracy, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max_epochs", type=int, default=3)
    parser.add_argument("--num_nodes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()

    L.seed_everything(0)
    x = torch.randn(4096, 32)
    data = TensorDataset(x, (x @ torch.randn(32, 4)).argmax(dim=1))
    trainer = L.Trainer(
        max_epochs=args.max_epochs,
        num_nodes=args.num_nodes,
        devices=args.devices,
        callbacks=[ModelCheckpoint(every_n_train_steps=20, save_top_k=1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(args.lr), DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=256))


if __name__ == "__main__":
    main()
