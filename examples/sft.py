"""Supervised fine-tuning as a plain LightningModule: what `FSDPUlyssesStrategy` gives to a module of your own.

python examples/sft.py                                              one process
python examples/sft.py --devices 2 --sequence_parallel_size 2       two that share each sequence
torchrun --nproc_per_node 8 examples/sft.py --devices 8             eight with different ones
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from lightning_rlhf import FSDPUlyssesStrategy, ModelSettings, Policy, build_policy, pack

Example = tuple[list[int], int]
"""Token ids of prompt and response, and where the response begins."""


class SFT(pl.LightningModule):
    """Likelihood of responses, packed without padding; any transformers decoder."""

    def __init__(self, model: str, lr: float = 1e-5) -> None:
        super().__init__()
        self.settings, self.lr = ModelSettings(model), lr
        self.policy: Policy | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Built on the meta device, sharded, then every rank reads its own part of the weights."""
        if self.policy is None:
            self.policy = build_policy(self.settings, self.trainer.strategy)

    def training_step(self, batch: list[Example], batch_idx: int) -> torch.Tensor:
        strategy = self.trainer.strategy
        sequences, prompt_lengths = [torch.tensor(ids) for ids, _ in batch], [start for _, start in batch]
        packed = pack(sequences, prompt_lengths, strategy.sequence_parallel_size, strategy.sp_rank).to(self.device)
        log_probs, _ = self.policy(packed, temperature=1.0)  # of the response tokens, equal on ranks that share them
        tokens = strategy.all_reduce_dp(packed.response_mask.sum())
        loss = -log_probs.sum() / tokens  # the mean over the tokens of ALL ranks: theirs differ in number
        self.losses.append(float(strategy.all_reduce_dp(loss.detach().clone())))
        self.log("loss", self.losses[-1], prog_bar=True, batch_size=len(batch))
        return loss * self.trainer.world_size  # FSDP averages gradients over ranks, the loss is a sum over them

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def sums(tokenizer: object) -> list[Example]:
    """Additions of two digits, for the model that comes with the package."""
    questions = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]
    encoded = [(tokenizer.encode(q), tokenizer.encode(answer)) for q, answer in questions]  # type: ignore[attr-defined]
    return [(q + answer + [tokenizer.eos_token_id], len(q)) for q, answer in encoded]  # type: ignore[attr-defined]


def train(model: str, lr: float, devices: int, batch_size: int = 20, epochs: int = 2, **sizes: int) -> list[float]:
    """Losses of the steps; ``batch_size`` counts examples over all data ranks."""
    from transformers import AutoTokenizer

    module = SFT(model, lr)
    strategy = FSDPUlyssesStrategy(**sizes)
    data = sums(AutoTokenizer.from_pretrained(module.settings.path))
    data_ranks = devices // strategy.sequence_parallel_size
    loader = DataLoader(data, batch_size // data_ranks, collate_fn=list)  # Lightning gives each data rank its own part
    trainer = pl.Trainer(
        devices=devices, strategy=strategy, max_epochs=epochs, logger=False, enable_checkpointing=False
    )
    trainer.fit(module, loader)
    return module.losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="random:tiny")
    parser.add_argument("--lr", type=float, default=1e-2)
    for option in ("devices", "sequence_parallel_size", "data_parallel_replicate"):
        parser.add_argument(f"--{option}", type=int, default=1)
    losses = train(**vars(parser.parse_args()))
    rank_zero_info(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
