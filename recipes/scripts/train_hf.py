"""A plain HF Trainer script: a tiny BERT learns to find a token. Knows nothing of the launcher."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
from transformers.utils import logging


class FindTheToken(Dataset):
    """Random sentences of 16 tokens; the label says whether token 7 is among them."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 24, (size, 16), generator=generator)
        self.labels = (self.ids == 7).any(dim=1).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--save_steps", type=int, default=20)
    args = parser.parse_args()

    logging.disable_progress_bar()
    set_seed(0)
    config = BertConfig(
        vocab_size=24, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(
            **vars(args),
            per_device_train_batch_size=16,
            warmup_steps=10,
            logging_steps=10,
            save_total_limit=2,
            report_to="none",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=FindTheToken(1024, seed=1),
        eval_dataset=FindTheToken(256, seed=2),
    )
    trainer.train()
    trainer.evaluate()


if __name__ == "__main__":
    main()
