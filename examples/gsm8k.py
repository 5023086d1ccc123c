"""Make prompts.jsonl from the grade-school maths problems of openai/gsm8k (or rows of the same form).

    python examples/gsm8k.py prompts.jsonl                           the training split, from the hub
    python examples/gsm8k.py heldout.jsonl --split test
    python examples/gsm8k.py prompts.jsonl --source my_rows.jsonl    a local file with the columns question and answer

Each line has ``prompt``, a conversation that asks for the answer in \\boxed{}, and ``answer``, the number after ####
of the reference solution. Train on it with ``data.path: prompts.jsonl`` and the reward
``lightning_rlhf.rewards.exact_answer`` (or ``numeric_answer``, which also takes 18.0 and 36/2 for 18).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INSTRUCTION = "Think step by step, then give the final number in \\boxed{}."


def convert(row: dict[str, Any]) -> dict[str, Any]:
    """One problem as a prompt and its answer.

    Raises:
        ValueError: the solution does not end in #### and a number.
    """
    _solution, mark, answer = row["answer"].rpartition("####")
    if not mark or not answer.strip():
        raise ValueError(f"the answer must end in '#### number', got {row['answer'][-40:]!r}")
    prompt = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": row["question"].strip()}]
    return {"prompt": prompt, "answer": answer.strip().replace(",", "")}


def read(source: str, split: str) -> Iterable[dict[str, Any]]:
    """Rows of a local JSON Lines file, or of a hub data set."""
    if Path(source).is_file():
        return [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines() if line.strip()]
    from datasets import load_dataset

    return load_dataset(source, "main", split=split)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--source", default="openai/gsm8k")
    parser.add_argument("--split", default="train")
    arguments = parser.parse_args()
    lines = [json.dumps(convert(row), ensure_ascii=False) for row in read(arguments.source, arguments.split)]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{arguments.output}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
