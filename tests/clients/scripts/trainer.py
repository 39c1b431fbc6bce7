"""A small language model, initialised at random, with a subclass of Hugging Face's Trainer.

The subclass has a loss of its own; the trainer logs, evaluates and saves by steps, accumulates, clips and schedules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from quorate.data_parallel.integrations.transformers import Trainer as QuorateTrainer
from tests.clients.harness import Case, run, same_everywhere, values

EPOCHS, BATCH, SAMPLES, TESTED, LENGTH, LETTERS = 2, 2, 72, 18, 8, 13


class Texts(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, seed: int, case: Case | None = None) -> None:
        starts = torch.randint(LETTERS, (count, 1), generator=torch.Generator().manual_seed(seed))
        self._rows, self._case = (starts + 3 * torch.arange(LENGTH)) % LETTERS, case

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self._case is not None:
            self._case.dawdle()
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class Loss:
    """Mixed into both trainers: what people override most."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"])
        loss = cross_entropy(outputs.logits[:, :-1].reshape(-1, LETTERS), labels[:, 1:].reshape(-1))
        return (loss, outputs) if return_outputs else loss

    loss_is_scaled_for_ga = False


class PlainTrainer(Loss, transformers.Trainer):
    pass


class Trainer(Loss, QuorateTrainer):
    pass


def accuracy(prediction: Any) -> dict[str, float]:
    guesses, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    assert len(labels) == TESTED
    return {"accuracy": float((guesses == labels).mean())}


def script(case: Case, folder: Path) -> dict[str, Any]:
    sizes = {"vocab_size": LETTERS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)
    net = GPT2LMHeadModel(config)
    out = folder / case.name
    arguments = TrainingArguments(
        output_dir=str(out),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        optim="adamw_torch",
        adam_epsilon=1e-4,
        warmup_steps=2,
        lr_scheduler_type="linear",
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        dataloader_num_workers=1 if case.samples else 0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    kind: Any = PlainTrainer if case.policy is None else Trainer
    options: Any = {} if case.policy is None else {"policy": case.policy()}
    data = {"train_dataset": Texts(SAMPLES, 1, case), "eval_dataset": Texts(TESTED, 2)}
    trainer = kind(model=net, args=arguments, compute_metrics=accuracy, **data, **options)
    result = trainer.train()
    evaluated = trainer.evaluate()
    trainer.save_model(str(out / "last"))
    torch.distributed.barrier()
    again = GPT2LMHeadModel.from_pretrained(out / "last")
    history = trainer.state.log_history
    return {
        "values": values(net),
        "same": same_everywhere(net),
        "saved": values(again) == values(net),
        "steps": result.global_step,
        "losses": [one["loss"] for one in history if "loss" in one],
        "scores": [one["eval_accuracy"] for one in history if "eval_accuracy" in one] + [evaluated["eval_accuracy"]],
        "checkpoints": sorted(one.name for one in out.glob("checkpoint-*")),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    run(script)
    torch.distributed.destroy_process_group()
