"""Which rank gets which prompts, and where a resumed run goes on."""

from __future__ import annotations

from itertools import chain

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoTokenizer

from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.sampler import PromptSampler
from lightning_rlhf.tiny import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:Be aware that when using:UserWarning"
    ),  # resumed without the callback that saved
]
ROWS = [{"prompt": f"prompt {i}"} for i in range(27)]


def pieces(ranks, size=27, batch_size=12, **kwargs):
    """Per rank, its list of batches."""
    return [list(PromptSampler(size, batch_size, num_replicas=ranks, rank=r, **kwargs)) for r in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_training_prompt_comes_at_most_once_and_the_batch_is_the_same_on_any_number_of_ranks(ranks):
    split = pieces(ranks, seed=1)
    assert {len(batch) for rank in split for batch in rank} == {12 // ranks}
    gathered = [list(chain(*batches)) for batches in zip(*split, strict=True)]
    assert gathered == pieces(1, seed=1)[0]
    seen = list(chain(*gathered))
    assert len(seen) == len(set(seen)) == 24


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 4, 11, 12, 13, 27])
def test_each_validation_prompt_comes_exactly_once_and_no_rank_skips_a_batch(ranks, size):
    split = pieces(ranks, size=size, drop_last=False, shuffle=False)
    assert {len(rank) for rank in split} == {-(-size // 12)}  # a rank's piece may be empty, its batch is still there
    shares = list(zip(*split, strict=True))
    assert list(chain(*chain(*shares))) == list(range(size))
    assert all(max(map(len, share)) - min(map(len, share)) <= 1 for share in shares)
    assert len(PromptSampler(size, 12, num_replicas=ranks, drop_last=False)) == -(-size // 12)


def test_the_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        return PromptSampler(27, 4, seed=seed).order(epoch).tolist()

    assert order(0, 1) == order(0, 1)
    assert sorted(order(3, 5)) == list(range(27))
    assert len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16
    assert PromptSampler(5, 2, shuffle=False).order(3).tolist() == [0, 1, 2, 3, 4]


def test_the_start_is_asked_for_when_the_first_batch_is_wanted():
    place = [(0, 0)]
    sampler = PromptSampler(27, 4, position=lambda: place[0])
    running = iter(sampler)
    place[0] = (2, 4)
    assert list(running) == list(PromptSampler(27, 4, position=lambda: (2, 0)))[4:]


# -- with a real trainer -----------------------------------------------------------------------------------------------
class Module(pl.LightningModule):
    """Records which prompts come when; optionally asks for what sets the data up before a checkpoint is read."""

    def __init__(self, ask_early=False):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.tokenizer = AutoTokenizer.from_pretrained(tiny_model())
        self.ask_early, self.seen, self.validated = ask_early, [], []

    def configure_optimizers(self):
        if self.ask_early:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        place = (self.trainer.current_epoch, batch_idx, self.trainer.global_step)
        self.seen.append((*place, batch["prompts"].index.tolist()))
        self.weight.grad = torch.ones(1)
        self.optimizers().step()

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch["prompts"].index.tolist())


class Data(PromptDataModule):
    train_rows = ROWS


def fit(ckpt_path=None, callbacks=(), val_size=0, ask_early=False, **trainer):
    module = Module(ask_early)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        callbacks=list(callbacks),
        **trainer,
    )
    trainer.fit(module, Data(path="unused", batch_size=4, val_size=val_size, seed=7), ckpt_path=ckpt_path)
    return module


@pytest.fixture(scope="module")
def whole():
    """The uninterrupted run: 4 epochs of 6 batches; validation prompts are the last 3 rows."""
    return {val_size: fit(max_epochs=4, val_size=val_size) for val_size in (0, 3)}


def test_epochs_have_different_orders_and_held_out_rows_are_never_trained_on(whole):
    orders = [[row for e, *_, rows in whole[3].seen if e == epoch for row in rows] for epoch in range(4)]
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert whole[3].validated == [[24, 25, 26]] * 4
    assert [step for *_, step, _ in whole[0].seen] == list(range(24))


SAVES = {
    "train batch end": {"every_n_train_steps": 1, "save_on_train_epoch_end": False},
    "train epoch end": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    "validation end": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
}


CASES = [
    (save, val)
    for save in SAVES
    for val in ({}, {"val_size": 3}, {"val_size": 3, "val_check_interval": 2})
    if val or save != "validation end"
]


@pytest.mark.parametrize("stop", [{"max_epochs": 2}, {"max_steps": 12}, {"max_steps": 9}], ids=str)
@pytest.mark.parametrize(("save", "val"), CASES, ids=str)
def test_a_resumed_run_takes_the_batches_that_the_uninterrupted_one_would_have_taken(tmp_path, whole, stop, save, val):
    keep = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, auto_insert_metric_name=False, **SAVES[save])
    fit(callbacks=[keep], **stop, **val)
    checkpoints = {int(path.stem.split("-")[0]): path for path in tmp_path.glob("*.ckpt")}
    expected = whole[val.get("val_size", 0)].seen
    interesting = [step for step in checkpoints if step in (2, 6, 8, 12)]  # within epochs and at their ends
    assert interesting
    for step in interesting:
        for ask_early, end in ((False, {"max_epochs": 4}), (True, {"max_steps": 24})):
            resumed = fit(checkpoints[step], ask_early=ask_early, **end, **val)
            assert [rows for *_, rows in resumed.seen] == [rows for *_, rows in expected[step:]], (step, end)
            if save != "train epoch end":  # from there Lightning counts epochs and batches otherwise
                assert resumed.seen == expected[step:], (step, end)


def test_a_limit_of_batches_takes_the_beginning_of_each_epoch(whole):
    limited = fit(max_epochs=3, limit_train_batches=2)
    assert limited.seen == [
        (epoch, batch, 2 * epoch + batch, whole[0].seen[6 * epoch + batch][-1])
        for epoch in range(3)
        for batch in range(2)
    ]


def test_a_batch_that_was_not_finished_is_taken_again(tmp_path, whole):
    class Crash(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 8:
                trainer.save_checkpoint(tmp_path / "crash.ckpt")
                raise KeyError("crash")

    with pytest.raises(KeyError):
        fit(callbacks=[Crash()], max_epochs=4)
    assert fit(tmp_path / "crash.ckpt", max_epochs=4).seen == whole[0].seen[8:]


def test_a_resume_with_other_data_is_told(tmp_path):
    fit(callbacks=[ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)], max_steps=2)
    (checkpoint,) = tmp_path.glob("*.ckpt")
    with pytest.warns(UserWarning, match=r"written with prompts 27 \(here 24\), fingerprint \w+ \(here \w+\): "):
        fit(checkpoint, max_steps=3, val_size=3)
