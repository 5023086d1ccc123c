"""Time, memory and error of the log-prob head, forward and backward, in bfloat16.

python benchmarks/head.py                                    # the three shapes of docs/benchmarks.md, on CUDA
python benchmarks/head.py --rows 8192 --hidden 3584 --vocab 152064
python benchmarks/head.py --device cpu --small               # does it run

naive      full logits, log_softmax, entropy, by autograd
chunked    `LogProbHead` with its passes in plain torch
fused      `LogProbHead` as it runs on CUDA

Errors are against float64: of log-probs and entropies the largest difference over all rows; of the gradients of the first hidden
states and of the first rows of the weight the largest difference over the largest value.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_rlhf.modules import head as head_module
from lightning_rlhf.modules.head import LogProbHead

SHAPES = [(16384, 4096, 151936), (16384, 1536, 151936), (8192, 576, 49152)]
SMALL = [(200, 64, 1000)]
CHECKED = 64
"""Hidden states and rows of the weight whose gradients are compared."""

LogProbs = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_p = F.linear(hidden, weight).float().log_softmax(-1)
    return log_p.gather(-1, labels[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def fused(hidden: Tensor, weight: Tensor, labels: Tensor, passes: ModuleType | None = None) -> tuple[Tensor, Tensor]:
    head = LogProbHead(1, 1, bias=False, device="meta")
    head.weight, head.passes = weight, passes
    return head(hidden, labels)


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return fused(hidden, weight, labels, head_module)


def exact(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor) -> list[Tensor]:
    """Log-probs, entropies, and the gradients of the first hidden states and of the first rows of the weight, in float64."""
    w, found = weight.double(), []
    d_weight = torch.zeros(CHECKED, hidden.shape[1], dtype=torch.float64, device=hidden.device)
    d_hidden = None
    for h, y, up in zip(*(t.split(512) for t in (hidden.double(), labels, upstream.t().double())), strict=True):
        log_p = (h @ w.t()).log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1)
        found.append((log_p.gather(-1, y[:, None]).squeeze(-1), entropy))
        dz = -up[:, :1] * p - up[:, 1:] * p * (log_p + entropy[:, None])
        dz.scatter_add_(-1, y[:, None], up[:, :1])
        d_weight += dz[:, :CHECKED].t() @ h
        d_hidden = dz[:CHECKED] @ w if d_hidden is None else d_hidden
    return [*(torch.cat(t) for t in zip(*found, strict=True)), d_hidden, d_weight]


def measure(
    run: LogProbs, inputs: tuple[Tensor, Tensor, Tensor], upstream: Tensor, repeats: int
) -> tuple[list[float], list[Tensor]]:
    """([ms forward, ms backward, peak GiB], outputs and gradients); medians, the first two runs do not count."""
    cuda = upstream.is_cuda

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return 1e3 * time.perf_counter()

    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats + 2):
        out = grads = None
        start = now()
        out = run(*inputs)
        middle = now()
        grads = torch.autograd.grad(out, inputs[:2], list(upstream))
        times.append((middle - start, now() - middle))
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
    results = [out[0].detach(), out[1].detach(), *(g[:CHECKED].clone() for g in grads)]  # a view would keep all of it
    return [*(statistics.median(t) for t in zip(*times[2:], strict=True)), peak], results


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("rows", "hidden", "vocab"):
        parser.add_argument(f"--{name}", type=int, help="one shape of your own; all three are needed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="one tiny shape")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    own = (args.rows, args.hidden, args.vocab)
    if any(own) and not all(own):
        parser.error("--rows, --hidden and --vocab go together")
    runs = [naive, chunked, fused] if args.device.startswith("cuda") else [naive, chunked]
    print(
        "| rows x hidden x vocabulary | head | forward ms | backward ms | sum ms | / naive | peak GiB | TFLOP/s | errors |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for rows, hidden, vocab in [own] if all(own) else SMALL if args.small else SHAPES:
        torch.manual_seed(0)
        h = torch.randn(rows, hidden, device=args.device, dtype=torch.bfloat16).requires_grad_()
        w = torch.randn(vocab, hidden, device=args.device, dtype=torch.bfloat16)
        w = nn.Parameter(w.mul_(3 / hidden**0.5))  # logits of standard deviation 3
        y = torch.randint(vocab, (rows,), device=args.device)
        upstream = torch.randn(2, rows, device=args.device)
        want = exact(h.detach(), w.detach(), y, upstream)
        base = float("nan")
        for run in runs:
            start = f"| {rows} x {hidden} x {vocab} | {run.__name__} |"
            try:
                (forward, backward, peak), got = measure(run, (h, w, y), upstream, args.repeats)
            except torch.OutOfMemoryError:
                print(start, "out of memory | | | | | | |")
                continue
            total = forward + backward
            base = total if run is naive else base
            errors = [(a - b).abs().max().item() for a, b in zip(got[:2], want[:2], strict=True)]
            errors += [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got[2:], want[2:], strict=True)]
            speed = 6e-9 * rows * hidden * vocab / total  # of the three products that are needed, not of the fourth
            print(
                f"{start} {forward:.1f} | {backward:.1f} | {total:.1f} | {total / base:.2f} | {peak:.1f} | {speed:.0f} |"
                f" {' '.join(f'{e:.0e}' for e in errors)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
