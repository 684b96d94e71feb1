"""Fine-tune a tiny language model with the Hugging Face Trainer, profiled: python huggingface_sft.py profile.yaml."""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from rankscope.integrations.huggingface import RankscopeCallback


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        tokens = (torch.arange(16) + i) % 32
        return {"input_ids": tokens, "labels": tokens}


def main(config, output=Path("outputs/hf"), **arguments):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    settings = {"max_steps": 6, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **arguments}
    return Trainer(
        model,
        TrainingArguments(str(output), report_to=[], use_cpu=True, disable_tqdm=True, **settings),
        train_dataset=Numbers(),
        callbacks=[RankscopeCallback(config)],
    )


if __name__ == "__main__":
    main(sys.argv[1]).train()
