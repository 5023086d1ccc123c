"""Where the time goes, tokens per second, and model FLOPs utilisation, once per iteration.

    timing_s/<phase>          seconds inside the spans that the module and the `RolloutCallback` open, 0 if skipped
    timing_s/step             wall time from the end of one iteration to the end of the next, without validation
    perf/throughput           prompt and response tokens of all ranks / (step seconds · GPUs)
    perf/mfu                  FLOPs of the update / (update seconds · GPUs · peak), matmul parameters only
    perf/mfu_conventional     the same with the embedding look-up counted (comparable with published figures)
    perf/padding_efficiency   share of the packed streams that is no padding

An observer: removing it changes no result. A checkpoint is written after an iteration's metrics are, so its seconds
are part of the following iteration.
"""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_rlhf.flops import peak_flops, update_flops


class Throughput(pl.Callback):
    """Logs times, token throughput and MFU after every iteration.

    Args:
        peak_tflops: dense bf16 peak of one device in TFLOP/s, for devices that the built-in table lacks; None looks the
            device up, and leaves MFU out if it is unknown.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None and peak_tflops <= 0:
            raise ValueError(f"peak_tflops must be positive, or null to look the device up, got {peak_tflops}")
        self.peak_tflops = peak_tflops
        self._since = 0.0
        self._paused_at = 0.0
        self._before_validation: dict[str, float] = {}
        self._seen: set[str] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.phases.take()
        self._since = time.perf_counter()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._before_validation = pl_module.phases.take()
        self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._since += time.perf_counter() - self._paused_at
        pl_module.phases.take()
        pl_module.phases.seconds.update(self._before_validation)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        step, self._since = now - self._since, now
        seconds = pl_module.phases.take()
        lengths, packing = pl_module.lengths, pl_module.packing
        self._seen |= seconds.keys()  # Lightning repeats the last value of a metric that is not logged again
        metrics = {f"timing_s/{name}": seconds.get(name, 0.0) for name in self._seen}
        metrics |= self._utilisation(trainer, pl_module, lengths, seconds.get("update", 0.0))
        if packing["padded_tokens"]:
            metrics["perf/padding_efficiency"] = packing["real_tokens"] / packing["padded_tokens"]
        shown = {"timing_s/step": step, "perf/throughput": sum(lengths) / (step * trainer.world_size)}
        pl_module.log_dict(metrics, sync_dist=False, batch_size=1)
        pl_module.log_dict(shown, prog_bar=True, sync_dist=False, batch_size=1)

    def _utilisation(
        self, trainer: pl.Trainer, pl_module: Any, lengths: list[int], update_seconds: float
    ) -> dict[str, float]:
        peak = self.peak_tflops * 1e12 if self.peak_tflops else _device_peak(pl_module.device)
        if peak is None or update_seconds <= 0:
            return {}
        capacity = update_seconds * trainer.world_size * peak
        bases = {"perf/mfu": False, "perf/mfu_conventional": True}
        worth = {name: update_flops(pl_module.flops, lengths, lookup=lookup) for name, lookup in bases.items()}
        return {name: flops / capacity for name, flops in worth.items() if flops}


def _device_peak(device: torch.device) -> float | None:
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
