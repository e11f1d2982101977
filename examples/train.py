"""Trains a small Llama of transformers with its Trainer, first on torch's attention, then on ours: losses and speed.

The text is Python's own reference, which every Python carries (`pydoc_data`); a token is a byte, so that nothing is
downloaded. Both runs start from the same weights and see the same batches: their losses differ by rounding alone.

    pip install '.[train]'
    python examples/train.py
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Everything is on this disk.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

import kittens_torch

TORCHS, OURS = "sdpa", "kittens"


@dataclass(frozen=True)
class Sizes:
    """Of the model and of its training."""

    hidden: int
    layers: int
    heads: int
    heads_k: int
    length: int
    batch: int
    steps: int


# On a GPU long enough a text that attention matters to the time; on a CPU something that ends within minutes.
SIZES = {
    "cuda": Sizes(hidden=1024, layers=8, heads=8, heads_k=2, length=8192, batch=2, steps=60),
    "cpu": Sizes(hidden=128, layers=2, heads=4, heads_k=2, length=256, batch=8, steps=40),
}


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The language reference as pieces of `length` bytes; a piece is its own label, which the model shifts."""

    def __init__(self, length: int) -> None:
        topics = importlib.import_module("pydoc_data.topics").topics
        words = bytearray("\n".join(topics[name] for name in sorted(topics)).encode())
        count = len(words) // length
        self.pieces = torch.frombuffer(words, dtype=torch.uint8)[: count * length].view(count, length).long()

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[number], "labels": self.pieces[number]}


@dataclass
class Run:
    """The loss of every step, tokens per second after the first steps, and what the attention ran on."""

    losses: list[float]
    tokens_per_second: float
    report: kittens_torch.Report


def train(attention: str, sizes: Sizes, device: str, seed: int = 0) -> Run:
    """One training from fresh weights with an attention implementation of transformers; bfloat16 on a GPU."""
    transformers = importlib.import_module("transformers")
    transformers.set_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads_k,
        max_position_embeddings=sizes.length,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    model.set_attn_implementation(attention)
    warm_up, marks = min(5, sizes.steps - 1), dict[int, float]()
    losses: list[Tensor] = []

    class Recorder(transformers.Trainer):  # type: ignore[misc, name-defined]
        """Keeps the losses as they are; some versions log them rounded."""

        def compute_loss(self, *operands: Any, **more: Any) -> Any:
            result = super().compute_loss(*operands, **more)
            losses.append((result[0] if isinstance(result, tuple) else result).detach())
            return result

    class Clock(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, arguments: Any, state: Any, *rest: Any, **more: Any) -> None:
            if state.global_step in (warm_up, sizes.steps):
                if device == "cuda":
                    torch.cuda.synchronize()
                marks[state.global_step] = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=sizes.steps,
            per_device_train_batch_size=sizes.batch,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            seed=seed,
            bf16=device == "cuda",
            use_cpu=device == "cpu",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=device == "cuda",
        )
        trainer = Recorder(model, arguments, train_dataset=Text(sizes.length), callbacks=[Clock()])
        trainer.remove_callback(transformers.PrinterCallback)  # prints a summary in the place of a progress bar
        trainer.train()
    tokens = (sizes.steps - warm_up) * sizes.batch * sizes.length
    words = Text(sizes.length)[0]["input_ids"][None].to(device)
    with kittens_torch.report() as report, torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        model(words)
    return Run([loss.item() for loss in losses], tokens / (marks[sizes.steps] - marks[warm_up]), report)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, help="of training (default: 60 on a GPU, 40 on a CPU)")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 2:
        parser.error(f"--steps is {options.steps}; allowed: 2 or more")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = SIZES[device]
    if options.steps is not None:
        sizes = Sizes(**{**vars(sizes), "steps": options.steps})
    importlib.import_module("transformers").logging.set_verbosity_error()
    print(f"A Llama of {sizes.layers} layers on {device}, batches of {sizes.batch} x {sizes.length} bytes", flush=True)
    runs = {name: train(name, sizes, device) for name in (TORCHS, OURS)}
    print("  step   loss with torch   loss with us   difference")
    pairs = list(zip(runs[TORCHS].losses, runs[OURS].losses, strict=True))
    for step, (torchs, ours) in enumerate(pairs, 1):
        if step in (1, sizes.steps) or step % 10 == 0:
            print(f"  {step:>4}   {torchs:15.5f}   {ours:12.5f}   {ours - torchs:10.1e}")
    for name, run in runs.items():
        print(f'attn_implementation="{name}": {run.tokens_per_second:.0f} tokens/s')
    print("What the attention of one forward pass with us ran on:")
    print(runs[OURS].report)


if __name__ == "__main__":
    main(sys.argv[1:])
