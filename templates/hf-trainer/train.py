"""Training of a causal language model on the lines of a text with the Trainer of transformers."""

import os
from dataclasses import dataclass, field

from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class Arguments:
    model_name_or_path: str = field(metadata={"help": "directory of the model and its tokenizer"})
    train_file: str = field(metadata={"help": "text with one example a line"})
    max_length: int = field(default=512, metadata={"help": "tokens of an example; the rest is cut off"})


class Lines(Dataset):
    def __init__(self, path, tokenizer, max_length):
        with open(path, encoding="utf-8") as file:
            self.lines = [line.strip() for line in file if line.strip()]
        self.tokenizer, self.max_length = tokenizer, max_length

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return self.tokenizer(self.lines[index], truncation=True, max_length=self.max_length)


def main():
    own, training = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(own.model_name_or_path),
        args=training,
        train_dataset=Lines(own.train_file, tokenizer, own.max_length),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    # ascendrun names the newest checkpoint that is complete on every node; without it, the newest of the directory.
    newest = get_last_checkpoint(training.output_dir) if os.path.isdir(training.output_dir) else None
    trainer.train(resume_from_checkpoint=os.environ.get("ASCENDRUN_RESUME_PATH") or newest)
    trainer.save_model(os.path.join(training.output_dir, "final"))


if __name__ == "__main__":
    main()
