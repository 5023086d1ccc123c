"""Checkpoints on stores that are flaky, slow, full, closed or malicious, and of processes that die while they write."""

from __future__ import annotations

import errno
import faulthandler
import os
import pickle
import re
import resource
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from jsonargparse.typing import PositiveFloat
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from toys import spawn

from lightning_rlhf import FSDPUlyssesStrategy, IterationCheckpoint, checkpointing, restricted, storage
from lightning_rlhf.background import Background
from lightning_rlhf.callbacks.checkpoint import latest_complete
from lightning_rlhf.phases import Phases

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint"),
]


# -- a store that fails as told ----------------------------------------------------------------------------------------


class Faulty:
    """Asks ``fault(number of the operation, its name, path)`` first, which raises or not."""

    fault: Callable[[int, str, str], None] = staticmethod(lambda number, name, path: None)
    count = 0

    @classmethod
    def reach(cls, name: str, path: Any) -> None:
        Faulty.count += 1
        Faulty.fault(Faulty.count, name, str(path))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        self.reach("open", path)
        file = super()._open(path, mode, **kwargs)  # type: ignore[misc]
        if mode == "wb":
            write = file.write

            def reaching(data: Any) -> int:
                self.reach("write", path)
                return write(data)

            file.write = reaching
        return file


def _reaching(name: str) -> Callable[..., Any]:
    def method(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        self.reach(name, path)
        return getattr(super(Faulty, self), name)(path, *args, **kwargs)

    return method


for _name in ("info", "ls", "makedirs", "cp_file", "cat_file", "modified", "rm_file", "rm", "mv"):
    setattr(Faulty, _name, _reaching(_name))


class Store(Faulty, MemoryFileSystem):
    protocol = "teststore"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("teststore://"))


class Disk(Faulty, LocalFileSystem):
    protocol = "testdisk"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("testdisk://"))


fsspec.register_implementation("teststore", Store, clobber=True)
fsspec.register_implementation("testdisk", Disk, clobber=True)


@pytest.fixture(autouse=True)
def fresh_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 1e-4)
    Store.store.clear()
    Store.pseudo_dirs[:] = [""]
    yield
    Faulty.fault, Faulty.count = staticmethod(lambda number, name, path: None), 0


def faults(fault: Callable[[int, str, str], None]) -> None:
    Faulty.fault, Faulty.count = staticmethod(fault), 0


# -- a small run -------------------------------------------------------------------------------------------------------


class Toy(pl.LightningModule):
    """A sharded layer that learns; ``option`` is one of its optimizer that is no tensor."""

    def __init__(self, option: Any = 0.5) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net: nn.Module | None = None
        self.phases, self.option = Phases(), option

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(1)
            self.net = nn.Linear(64, 64)
            self.trainer.strategy.shard(self.net, [])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": list(self.parameters()), "option": self.option}], lr=0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        batch = torch.randn(1, 64, generator=torch.Generator().manual_seed(self.trainer.global_step))
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((self.net(batch) - batch).square().mean())
        optimizer.step()


class Resumable(torch.utils.data.DataLoader):
    """Says that it can resume, so that Lightning does not warn."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class Watch(pl.Callback):
    """``before(iteration)`` each one; notes the complete checkpoints that are there then."""

    def __init__(self, folder: str, before: Callable[[int], None] = lambda iteration: None) -> None:
        self.folder, self.before = folder, before
        self.seen: dict[int, list[str]] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen[trainer.global_step + 1] = complete(self.folder)
        self.before(trainer.global_step + 1)


def complete(folder: str) -> list[str]:
    return sorted(name.rpartition("/")[2].removesuffix(".ckpt") for name, _ in storage.complete_in(folder))


def fit(
    iterations: int, *callbacks: pl.Callback, module: Toy | None = None, devices: int = 1, **options: Any
) -> Tensor:
    """The weights after so many iterations."""
    torch.set_num_threads(1)
    module = module or Toy()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=FSDPUlyssesStrategy(),
        max_steps=iterations,
        max_epochs=1,
        logger=False,
        enable_checkpointing=any(isinstance(c, IterationCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, Resumable(range(16)), **options)
    return module.net.weight.full_tensor().detach().clone()


def each(folder: Any, **options: Any) -> IterationCheckpoint:
    return IterationCheckpoint(folder, filename="{step}", every_n_train_steps=1, **options)


# -- nothing in a checkpoint is run ------------------------------------------------------------------------------------


class Evil:
    """Leaves a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.proof}",)


def in_index(checkpoint: Path, evil: Evil, monkeypatch: Any) -> None:
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    index.planner_data["extra"] = evil
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))


def in_marker(checkpoint: Path, evil: Evil, monkeypatch: Any) -> None:
    content = torch.load(checkpoint / storage.MARKER, weights_only=True)
    torch.save(content | {"extra": evil}, checkpoint / storage.MARKER)


def in_shards(checkpoint: Path, evil: Evil, monkeypatch: Any) -> None:
    monkeypatch.setattr(checkpointing, "_plain", lambda value: value)
    shutil.rmtree(checkpoint)
    fit(2, each(checkpoint.parent), module=Toy(option=evil))


@pytest.mark.parametrize(
    ("place", "said"), [(in_index, r"\.metadata"), (in_marker, r"meta\.pt"), (in_shards, "shards")]
)
def test_what_others_put_into_a_checkpoint_is_refused_unless_they_are_trusted(place, said, tmp_path, monkeypatch):
    proof = tmp_path / "proof"
    fit(2, each(tmp_path / "ck"))
    place(tmp_path / "ck/2.ckpt", Evil(proof), monkeypatch)
    message = (
        rf"^'.*2\.ckpt' was not loaded, its {said} would run posix\.system, .* set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 "
    )
    with pytest.raises(restricted.UntrustedCheckpoint, match=message):
        fit(3, ckpt_path=str(tmp_path / "ck/2.ckpt"))
    assert not proof.exists()
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    fit(3, ckpt_path=str(tmp_path / "ck/2.ckpt"))
    assert proof.exists()
    proof.unlink()
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    load = FSDPUlyssesStrategy.load_checkpoint
    monkeypatch.setattr(
        FSDPUlyssesStrategy, "load_checkpoint", lambda self, path, weights_only: load(self, path, False)
    )
    fit(3, ckpt_path=str(tmp_path / "ck/2.ckpt"))
    assert proof.exists()


@pytest.mark.parametrize("left", [0, 0.5, 0.99, 0.999999], ids=["empty", "half", "most", "all but a byte"])
@pytest.mark.parametrize(
    ("name", "said"), [(".metadata", r"\.metadata"), ("meta.pt", r"meta\.pt"), ("*.distcp", "shards")]
)
def test_what_was_cut_off_is_named_in_one_line(name, said, left, tmp_path):
    fit(2, each(tmp_path / "ck"))
    (file,) = (tmp_path / "ck/2.ckpt").glob(name)
    os.truncate(file, int(left * file.stat().st_size))
    message = rf"^'.*/ck/2\.ckpt' is damaged, its {said} cannot be read \(.+\): take another checkpoint, or restore its files$"
    with pytest.raises(restricted.DamagedCheckpoint, match=message):
        fit(3, ckpt_path=str(tmp_path / "ck/2.ckpt"))


def test_a_damaged_shard_is_no_reason_to_load_it_unsafely(tmp_path):
    fit(2, each(tmp_path / "ck"))
    (file,) = (tmp_path / "ck/2.ckpt").glob("*.distcp")
    file.write_bytes(bytes(reversed(file.read_bytes())))
    with pytest.raises(restricted.DamagedCheckpoint, match="its shards cannot be read") as refused:
        fit(3, ckpt_path=str(tmp_path / "ck/2.ckpt"))
    assert "weights_only" not in str(refused.value)


@pytest.mark.parametrize("within", ["checkpoints", "checkpoints/", ""])
def test_a_folder_of_checkpoints_names_the_newest_one_to_take(within, tmp_path):
    saver = IterationCheckpoint(tmp_path / "checkpoints", "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(3, saver)
    (tmp_path / "checkpoints/3.ckpt/meta.pt").unlink()
    given = f"{tmp_path}/{within}"
    message = f"{given!r} is a folder of checkpoints: give one of them, the latest is {tmp_path}/checkpoints/2.ckpt"
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(message)}$"):
        fit(4, ckpt_path=given)
    with pytest.raises(FileNotFoundError, match=r"3.ckpt' is not a complete checkpoint: it has no meta.pt$"):
        fit(4, ckpt_path=f"{tmp_path}/checkpoints/3.ckpt")


def test_numbers_of_the_command_line_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing, "_plain", lambda value: value)  # as it was
    fit(2, each(tmp_path / "ck"), module=Toy(option=PositiveFloat(0.5)))
    assert b"PositiveFloat" in next((tmp_path / "ck/2.ckpt").glob("*.distcp")).read_bytes()
    assert torch.equal(fit(3, ckpt_path=str(tmp_path / "ck/2.ckpt")), fit(3))


def test_the_index_of_every_kind_of_tensor_is_known(tmp_path):
    state: dict[str, Any] = {"number": 1.0, "nested": {"list": [torch.ones(2), (1, "a")]}}
    for bits in (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool):
        state[str(bits)] = torch.zeros(3, 2).to(bits)
    for bits in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.uint16):
        state[str(bits)] = torch.zeros(3, 2, dtype=bits)
    dcp.save(state, checkpoint_id=tmp_path / "ck")  # torch's own writer: it notes a Path
    torch.save({}, tmp_path / "ck" / storage.MARKER)
    assert restricted.read(str(tmp_path / "ck"), trusted=False) == restricted.read(str(tmp_path / "ck"), trusted=True)


# -- flaky and slow ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), TimeoutError("slow"), OSError(errno.EIO, "input")])
def test_what_may_pass_is_tried_again_with_growing_pauses(error, monkeypatch, caplog):
    pauses: list[float] = []
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 1.0)
    monkeypatch.setattr(storage.time, "sleep", pauses.append)
    answers = iter([error, error, error, "there"])

    def answer() -> str:
        if isinstance(value := next(answers), str):
            return value
        raise value

    assert storage.retried(answer) == "there"
    assert pauses == [1, 2, 4]
    assert [record.message for record in caplog.records][-1] == f"{type(error).__name__}: {error}, trying again in 4 s"
    pauses.clear()
    answers = iter([error] * 8)
    with pytest.raises(type(error)):
        storage.retried(answer)
    assert pauses == [1, 2, 4, 8, 16, 32]
    assert len(list(answers)) == 1


@pytest.mark.parametrize(
    "error", [FileNotFoundError("x"), PermissionError("x"), OSError(errno.ENOSPC, "full"), ValueError("a mistake")]
)
def test_what_stays_is_raised_at_once(error):
    answers = iter([error])
    with pytest.raises(type(error)) as caught:
        storage.retried(lambda: (_ for _ in ()).throw(next(answers)))
    assert caught.value is error


@pytest.mark.parametrize(
    ("code", "change"),
    [("ENOSPC", "free space"), ("EDQUOT", "free space"), ("EROFS", "make it writable"), ("EACCES", "make it writable")],
)
def test_a_failure_says_what_to_change(code, change):
    error = OSError(getattr(errno, code), "the reason")
    failure = storage.failure(error, "s3://b/1.ckpt")
    assert str(failure).startswith("the checkpoint 's3://b/1.ckpt' could not be written (")
    assert f"the reason): {change}" in str(failure)
    assert storage._lasts(error)
    assert storage.failure(CheckpointException("write", {1: (RuntimeError("CUDA out of memory"), None)}), "x") is None


def test_errors_of_clients_that_are_no_os_errors_count():
    class HttpError(Exception):
        __module__ = "gcsfs.retry"

    answers = iter([HttpError("503"), "there"])

    def answer() -> str:
        if isinstance(value := next(answers), str):
            return value
        raise value

    assert storage.retried(answer) == "there"


@pytest.mark.parametrize(("every", "async_save"), [(16, False), (23, False), (31, False), (16, True)])
def test_a_store_of_which_every_few_operations_fail_takes_a_whole_run(every, async_save, tmp_path):
    folder, failed = "teststore://runs", []
    whole = fit(5)

    def fault(number: int, name: str, path: str) -> None:
        if name != "write" and number % every == 0:
            failed.append(name)
            raise ConnectionResetError(f"{name} {path}")

    faults(fault)
    fit(3, each(folder, save_last=True, async_save=async_save))
    faults(lambda *_: None)
    assert complete(folder) == ["3", "last"]
    assert storage.listed(folder) == [("/runs/3.ckpt", True), ("/runs/last.ckpt", True)], "removed as a whole"
    faults(fault)
    resumed = fit(5, each(folder, save_last=True, async_save=async_save), ckpt_path=f"{folder}/last.ckpt")
    assert torch.equal(resumed, whole)
    assert len(failed) > 5
    assert len(set(failed)) > 3


def test_a_write_that_breaks_off_is_written_again_from_its_start(tmp_path):
    broken: list[int] = []

    def fault(number: int, name: str, path: str) -> None:
        if name == "write" and "distcp" in path and number % 30 == 0 and len(broken) < 3:
            broken.append(number)
            raise ConnectionResetError("in the middle")

    faults(fault)
    fit(2, each("teststore://runs"))
    assert len(broken) == 3
    assert torch.equal(fit(4, ckpt_path="teststore://runs/2.ckpt"), fit(4))


def test_last_is_found_in_a_store(tmp_path):
    fit(2, each("teststore://runs"))
    steps = Watch("teststore://runs")
    assert torch.equal(fit(4, each("teststore://runs"), steps, ckpt_path="last"), fit(4))
    assert list(steps.seen) == [3, 4]


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
def test_a_run_that_cannot_read_its_last_checkpoint_does_not_start_over(tmp_path):
    fit(2, each("teststore://runs"))
    asked = iter(range(100))

    def fault(number: int, name: str, path: str) -> None:
        if name == "info" and path.endswith(storage.MARKER) and next(asked) == 1:  # Lightning's own question
            raise ConnectionResetError("down")

    faults(fault)
    with pytest.raises(ConnectionError, match=r"2\.ckpt' was found and then not: .*, start the run again"):
        fit(4, each("teststore://runs"), ckpt_path="last")
    assert complete("teststore://runs") == ["2"]


# -- a save that fails -------------------------------------------------------------------------------------------------


def full(number: int, name: str, path: str) -> None:
    if name == "write":
        raise OSError(errno.ENOSPC, "No space left on device")


def closed(number: int, name: str, path: str) -> None:
    if name in ("open", "makedirs"):
        raise PermissionError(errno.EACCES, "Permission denied", path)


def down(number: int, name: str, path: str) -> None:
    raise ConnectionRefusedError("the store is down")


def no_marker(number: int, name: str, path: str) -> None:
    if name == "write" and storage.MARKER in path:
        raise OSError(errno.ENOSPC, "No space left on device")


FAULTS = {
    "full": (full, r"could not be written \(OSError.*: .*No space left.*\): free space there, lower save_top_k"),
    "closed": (closed, r"could not be written \(PermissionError.*: .*Permission denied.*\): make it writable"),
    "down": (down, r"could not be written \(ConnectionRefusedError: the store is down\): look at the file system"),
    "no marker": (no_marker, r"could not be written \(OSError: .*No space left.*\): free space there"),
}


class Ill(Watch):
    """The store has a fault in some iterations, but for its own look at it."""

    def __init__(self, folder: str, fault: Callable[[int, str, str], None], iterations: tuple[int, ...]) -> None:
        super().__init__(folder, lambda iteration: faults(fault if iteration in iterations else lambda *_: None))

    def on_train_batch_start(self, *args: Any) -> None:
        faults(lambda *_: None)
        super().on_train_batch_start(*args)


@pytest.mark.parametrize(("fault", "said"), FAULTS.values(), ids=FAULTS)
def test_a_save_that_fails_is_reported_and_the_run_goes_on(fault, said):
    watch = Ill("teststore://runs", fault, (2, 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = fit(5, watch, each("teststore://runs"))
    reports = [str(w.message) for w in caught if "could not be written" in str(w.message)]
    assert len(reports) == 2
    for iteration, report in zip((2, 3), reports, strict=True):
        assert report.startswith(f"the checkpoint 'teststore://runs/{iteration}.ckpt' ")
        assert re.search(said, report)
    assert watch.seen == {1: [], 2: ["1"], 3: ["1"], 4: ["1"], 5: ["4"]}, "the last good one is kept"
    assert storage.listed("teststore://runs") == [("/runs/5.ckpt", True)], "nothing is left of the others"
    assert torch.equal(weights, fit(5))


def test_a_last_save_that_fails_is_an_error():
    watch = Ill("teststore://runs", full, (3,))
    with pytest.warns(UserWarning, match="could not be written"), pytest.raises(storage.SaveFailed, match="free space"):
        fit(3, watch, each("teststore://runs"))
    faults(lambda *_: None)
    assert complete("teststore://runs") == ["2"]
    assert torch.equal(fit(4, each("teststore://runs"), ckpt_path="last"), fit(4))


def test_a_save_that_fails_spoils_no_ranking():
    """The best two of a metric; the best of all is not written."""

    class Scored(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.log("score", {1: 3.0, 2: 9.0, 3: 1.0, 4: 2.0, 5: 5.0}[self.trainer.global_step])

    watch = Ill("teststore://runs", full, (2,))
    keep = each("teststore://runs", monitor="score", mode="max", save_top_k=2, save_last=False)
    with pytest.warns(UserWarning, match="could not be written"):
        fit(5, watch, keep, module=Scored())
    assert watch.seen == {1: [], 2: ["1"], 3: ["1"], 4: ["1", "3"], 5: ["1", "4"]}
    assert complete("teststore://runs") == ["1", "5"]
    assert (keep.best_model_path, keep.best_model_score) == ("teststore://runs/5.ckpt", 5.0)


def test_an_old_checkpoint_that_cannot_be_removed_is_reported():
    def fault(number: int, name: str, path: str) -> None:
        if name == "rm_file" and path.endswith("/1.ckpt/meta.pt"):
            raise PermissionError(errno.EACCES, "Permission denied")

    faults(fault)
    with pytest.warns(
        UserWarning, match=r"1\.ckpt' is not needed any more and could not be removed: .*; remove it by hand"
    ):
        fit(3, each("teststore://runs"))
    assert complete("teststore://runs") == ["1", "3"]


# -- beside the run ----------------------------------------------------------------------------------------------------


def beside(folder: Any, **options: Any) -> IterationCheckpoint:
    return each(folder, async_save=True, **options)


def of(checkpoints: str, fault: Callable[[int, str, str], None]) -> None:
    """A fault of some checkpoints, by a character class of their names."""
    pattern = re.compile(rf"/[{checkpoints}]\.(new\.)?ckpt")
    faults(lambda number, name, path: fault(number, name, path) if pattern.search(path) else None)


class Held:
    """Holds up a checkpoint's first write until `let_go`."""

    def __init__(self, checkpoint: str) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()
        of(checkpoint, self.fault)

    def fault(self, number: int, name: str, path: str) -> None:
        if name == "write":
            self.reached.set()
            assert self.let_go.wait(30)


def test_what_is_saved_beside_the_run_is_the_state_at_the_end_of_its_iteration():
    held, weights = Held("2"), {}
    module = Toy()

    def before(iteration: int) -> None:
        weights[iteration] = None if module.net is None else module.net.weight.full_tensor().detach().clone()
        if iteration == 4:  # its save waits for the one before
            assert held.reached.wait(30)
            held.let_go.set()

    saver = IterationCheckpoint("teststore://runs", "{step}", every_n_train_steps=2, save_top_k=-1, async_save=True)
    whole = fit(6, Watch("teststore://runs", before), saver, module=module)
    assert not torch.equal(weights[3], weights[4]), "parameters changed while they were written"
    assert complete("teststore://runs") == ["2", "4", "6"]
    for start in (2, 4):
        assert torch.equal(fit(6, ckpt_path=f"teststore://runs/{start}.ckpt"), whole)


def test_the_host_copy_keeps_containers_and_its_memory():
    background = Background(torch.device("cpu"), None)
    state = {"weight": torch.ones(3), "step": torch.tensor(1.0), "options": [{"betas": (0.9, 0.99), "foreach": None}]}
    first = background.copied(state)
    places = first["weight"].data_ptr(), first["step"].data_ptr()
    state["weight"].add_(1)
    state["step"].add_(1)
    assert (first["weight"].tolist(), first["step"].item(), first["options"]) == ([1] * 3, 1, state["options"])
    second = background.copied(state)
    assert (second["weight"].data_ptr(), second["step"].data_ptr()) == places
    assert (second["weight"].tolist(), second["step"].item()) == ([2] * 3, 2)
    state["weight"] = torch.ones(5)
    assert background.copied(state)["weight"].tolist() == [1] * 5


def test_one_checkpoint_at_a_time_is_under_way(monkeypatch):
    write, under_way, most = FSDPUlyssesStrategy._write, [], []

    def slow(self: Any, *args: Any) -> None:
        under_way.append(threading.current_thread().name)
        most.append(len(under_way))
        time.sleep(0.15)
        write(self, *args)
        under_way.pop()

    class Asks(Watch):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint("teststore://mine/x.ckpt")
                assert complete("teststore://mine") == ["x"]

    monkeypatch.setattr(FSDPUlyssesStrategy, "_write", slow)
    module = Toy()
    fit(5, Asks("teststore://runs"), beside("teststore://runs"), module=module)
    assert most == [1] * 6
    assert module.phases.seconds["checkpoint"] > 0.1, "waiting for the one before is said"
    assert complete("teststore://runs") == ["5"]


def test_what_is_being_written_stays_when_the_next_one_is_asked_for(monkeypatch):
    write, weights, module = FSDPUlyssesStrategy._write, {}, Toy()

    class Asks(Watch):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            step = trainer.global_step
            weights[step] = module.net.weight.full_tensor().detach().clone()
            state = trainer._checkpoint_connector.dump_checkpoint(False)
            trainer.strategy.save_in_background(state, f"{self.folder}/{step}.ckpt", lambda group: None)

    monkeypatch.setattr(FSDPUlyssesStrategy, "_write", lambda *args: time.sleep(0.2) or write(*args))
    fit(3, Asks("teststore://runs"), module=module)
    assert complete("teststore://runs") == ["1", "2", "3"]
    for step, held in weights.items():
        assert torch.equal(fit(step, ckpt_path=f"teststore://runs/{step}.ckpt"), held)


@pytest.mark.parametrize("save_last", [False, True])
def test_beside_the_run_an_older_checkpoint_goes_when_the_newer_one_is_complete(save_last):
    markers: list[set[str]] = []
    faults(lambda *_: markers.append({name for name in list(Store.store) if name.endswith(storage.MARKER)}))
    fit(4, beside("teststore://runs", save_last=save_last))
    first = next(i for i, there in enumerate(markers) if there)
    assert all(markers[first:])
    assert complete("teststore://runs") == ["4", *["last"] * save_last]


@pytest.mark.parametrize(("fault", "said"), FAULTS.values(), ids=FAULTS)
def test_a_save_that_fails_beside_the_run_is_reported(fault, said):
    of("23", fault)
    watch = Watch("teststore://runs")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = fit(5, watch, beside("teststore://runs"))
    reports = [str(w.message) for w in caught if "could not be written" in str(w.message)]
    assert [re.search(r"'.*?'", report)[0] for report in reports] == [f"'teststore://runs/{i}.ckpt'" for i in (2, 3)]
    assert all(re.search(said, report) for report in reports)
    assert watch.seen[3] == watch.seen[4] == ["1"]
    assert storage.listed("teststore://runs") == [("/runs/5.ckpt", True)]
    assert torch.equal(weights, fit(5))


def test_a_last_save_that_fails_beside_the_run_is_an_error():
    of("3", full)
    with pytest.warns(UserWarning, match="could not be written"), pytest.raises(storage.SaveFailed, match="free space"):
        fit(3, beside("teststore://runs"))
    assert complete("teststore://runs") == ["2"]
    faults(lambda *_: None)
    assert torch.equal(fit(4, beside("teststore://runs"), ckpt_path="last"), fit(4))


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_ends_by_an_error_ends_the_checkpoint_that_is_under_way(fails):
    held = Held("2")

    def before(iteration: int) -> None:
        if iteration == 3:
            assert held.reached.wait(30)
            threading.Timer(0.1, held.let_go.set).start()
            raise ValueError("of the run")

    def fault(number: int, name: str, path: str) -> None:
        held.fault(number, name, path)
        if fails:
            full(number, name, path)

    of("2", fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="of the run"):
            fit(5, Watch("teststore://runs", before), beside("teststore://runs"))
    assert complete("teststore://runs") == ["1" if fails else "2"]
    reports = [str(w.message) for w in caught if "2.ckpt' could not be written" in str(w.message)]
    assert [report.endswith("change the checkpoint's dirpath") for report in reports] == [True] * fails


def test_a_mistake_beside_the_run_ends_it(monkeypatch):
    def broken(*_: Any) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(storage, "finish", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        fit(3, beside("teststore://runs"))


def test_other_strategies_cannot_save_beside_the_run(tmp_path):
    trainer = pl.Trainer(accelerator="cpu", logger=False, max_epochs=1, callbacks=[beside(tmp_path)])
    with pytest.raises(ValueError, match=r"needs FSDPUlyssesStrategy: set trainer\.strategy"):
        trainer.fit(Toy(), Resumable(range(2)))


# -- which are kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("store", [False, True])
def test_last_is_made_of_the_files_of_the_latest(store, async_save, tmp_path):
    folder = "teststore://runs" if store else str(tmp_path)
    written: list[str] = []
    faults(lambda number, name, path: written.append(path) if name == "open" and "distcp" in path else None)
    fit(3, each(folder, save_last=True, async_save=async_save))
    assert complete(folder) == ["3", "last"]
    if store:
        assert written == [f"/runs/{i}.ckpt/__0_0.distcp" for i in (1, 2, 3)]
    else:
        assert (tmp_path / "3.ckpt/__0_0.distcp").samefile(tmp_path / "last.ckpt/__0_0.distcp")
    faults(lambda *_: None)
    for name in ("3", "last"):
        assert torch.equal(fit(4, ckpt_path=f"{folder}/{name}.ckpt"), fit(4))
    fit(4, each(folder, save_last=True, async_save=async_save), ckpt_path=f"{folder}/last.ckpt")
    assert complete(folder) == ["4", "last"], "the one name goes on"


@pytest.mark.parametrize("async_save", [False, True])
def test_a_last_that_cannot_be_made_is_reported(async_save):
    def fault(number: int, name: str, path: str) -> None:
        if name == "cp_file" and not path.endswith(".tmp"):
            raise PermissionError(errno.EACCES, "Permission denied")

    faults(fault)
    keep = each("teststore://runs", save_last=True, async_save=async_save)
    with pytest.warns(UserWarning, match=r"last\.ckpt' could not be written .*: make it writable"):
        fit(3, keep)
    assert (complete("teststore://runs"), keep.last_model_path) == (["3"], "")


@pytest.mark.parametrize("async_save", [False, True])
def test_last_as_a_link(async_save, tmp_path):
    fit(3, each(tmp_path, save_last="link", async_save=async_save))
    assert (tmp_path / "last.ckpt").is_symlink()
    assert os.readlink(tmp_path / "last.ckpt") == "3.ckpt"
    assert complete(str(tmp_path)) == ["3", "last"]
    assert torch.equal(fit(4, ckpt_path=str(tmp_path / "last.ckpt")), fit(4))


@pytest.mark.parametrize("store", [False, True])
def test_the_latest_few_are_kept_over_resumes(store, tmp_path):
    folder = "teststore://runs" if store else str(tmp_path)
    fit(4, each(folder, save_top_k=3))
    assert complete(folder) == ["2", "3", "4"]
    fit(6, each(folder, save_top_k=2), ckpt_path="last")
    assert complete(folder) == ["5", "6"], "those of the attempt before count, and the one it went on from"
    fit(7, each(folder, save_top_k=-1), ckpt_path=f"{folder}/5.ckpt")
    assert complete(folder) == ["5", "6", "6-v1", "7"]
    fit(8, each(folder, save_top_k=2), ckpt_path=f"{folder}/5.ckpt")
    assert complete(folder) == ["5", "7", "8"], "one that was asked for by name is not removed"
    fit(9, each(folder, save_top_k=0), ckpt_path=f"{folder}/8.ckpt")
    assert complete(folder) == ["5", "7", "8"]
    fit(10, each(folder), ckpt_path="last")
    assert complete(folder) == ["10"]


def test_what_others_keep_in_the_folder_stays(tmp_path):
    class Scored(Toy):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.log("score", float(self.trainer.global_step))

    def run(iterations: int, **options: Any) -> None:
        best = IterationCheckpoint(tmp_path, "{step}", 1, monitor="score", save_last=False)
        fit(iterations, each(tmp_path, save_top_k=2), best, module=Scored(), **options)

    run(3)
    (tmp_path / "mine.ckpt").mkdir()
    (tmp_path / "mine.ckpt" / storage.MARKER).touch()
    assert complete(str(tmp_path)) == ["1-v1", "2", "3", "mine"]
    run(5, ckpt_path=str(tmp_path / "3.ckpt"))
    assert complete(str(tmp_path)) == ["1-v1", "3", "4", "5", "mine"]


def test_a_new_run_removes_nothing_of_the_ones_before(tmp_path):
    fit(2, each(tmp_path, save_top_k=2))
    fit(3, each(tmp_path, save_top_k=2))
    assert complete(str(tmp_path)) == ["1", "2", "2-v1", "3"]


def test_what_was_not_completed_is_overwritten(tmp_path):
    (tmp_path / "2.ckpt").mkdir()
    (tmp_path / "2.ckpt/__1_0.distcp").touch()
    fit(2, each(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.ckpt"]
    assert not (tmp_path / "2.ckpt/__1_0.distcp").exists()


def test_files_are_written_part_by_part(monkeypatch, tmp_path):
    """DCP holds on to what a file gets until it is complete; of a GPU's state that is pinned memory."""
    monkeypatch.setattr(storage, "PART", 1000)
    held: list[weakref.ref[Tensor]] = []
    most, write = [0], filesystem._write_item

    def watched(transforms: Any, stream: Any, data: Tensor, *args: Any) -> Any:
        held.append(weakref.ref(data))
        most.append(sum(tensor.nbytes for ref in held if (tensor := ref()) is not None))
        return write(transforms, stream, data, *args)

    monkeypatch.setattr(filesystem, "_write_item", watched)
    block = torch.arange(1250.0)  # tensors that share memory, as a copy of the state does, are copied once more
    sizes = (100, 150, 100, 700, 100, 50, 50)
    state = dict(zip(map(str, range(len(sizes))), block.split(sizes), strict=True))
    dcp.save(state, storage_writer=storage.Writer(str(tmp_path)))
    assert max(most) == 2800
    assert sorted(p.name for p in tmp_path.glob("*.distcp")) == [f"__0_{n}0.distcp" for n in ("", 1, 2, 3)]
    read = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dcp.load(read, checkpoint_id=str(tmp_path))
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())


# -- a process that dies while it saves --------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["teststore", "testdisk"])
@pytest.mark.parametrize("foreign", [False, True])
def test_at_every_moment_of_overwriting_a_checkpoint_one_is_complete(protocol, foreign, tmp_path):
    """The process dies before its n-th operation, for every n."""

    class Dead(BaseException):
        pass

    def save(value: float) -> None:
        target = storage.prepare(path)
        dcp.save({"x": torch.full((5,), value)}, storage_writer=storage.Writer(target))
        storage.finish(target, path, storage.packed({"value": value}))

    died, found = 0, []
    while True:
        folder = f"{protocol}://{tmp_path}/{died}"
        path = f"{folder}/last.ckpt"
        save(1.0)
        fs, root = fsspec.core.url_to_fs(path)
        if foreign:
            fs.pipe_file(f"{root}/notes.txt", b"mine")

        reached: list[int] = []

        def fault(number: int, name: str, path: str, limit: int = died, reached: list[int] = reached) -> None:
            if number > limit:
                reached.append(number)
                raise Dead

        faults(fault)
        try:
            save(2.0)
        except BaseException:  # torch has one of its own
            if not reached:
                raise
        finished = not reached
        faults(lambda *_: None)
        latest = latest_complete(folder)
        marker, index = restricted.read(latest, trusted=False)
        state = {"x": torch.zeros(5)}
        dcp.load(state, storage_reader=restricted.Reader(latest, index), planner=restricted.Planner(latest))
        assert state["x"].tolist() == [marker["value"]] * 5
        found.append(marker["value"])
        assert fs.exists(f"{root}/notes.txt") == foreign
        if finished:
            break
        save(3.0)  # the next run goes on from what was left
        assert restricted.read(path, trusted=False)[0] == {"value": 3.0}
        assert [name for name, _ in storage.listed(folder)] == [root]
        died += 1
    assert found == sorted(found)
    assert {1.0, 2.0} == set(found)
    assert died > 15


# -- two ranks ---------------------------------------------------------------------------------------------------------


def failing(rank: int, folder: str) -> list[dict[str, Any]]:
    """Runs of which the one, then the other rank cannot write in iterations 2 and 4, then rank 0 not the marker."""
    faulthandler.dump_traceback_later(150, exit=True)  # a hang fails the test
    storage.FIRST_WAIT_S = 1e-4
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    write = storage._write

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def told(case: str) -> dict[str, Any]:
        def before(iteration: int) -> None:
            ill = iteration in (2, 4)
            storage._write = no_room if ill and case == "marker" else write
            page = (4096, hard)  # no file of this process may grow beyond it
            resource.setrlimit(resource.RLIMIT_FSIZE, page if ill and case == str(rank) else (soft, hard))

        watch, error = Watch(f"{folder}/{case}", before), "none"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                fit(4, watch, each(f"{folder}/{case}"), devices=2)
            except storage.SaveFailed as failure:
                error = str(failure)
        before(0)
        reports = [str(w.message) for w in caught if "could not be written" in str(w.message)]
        return {"error": error, "seen": watch.seen, "reports": reports}

    results = [told(case) for case in ("0", "1", "marker")]
    results.append(beside_two(rank, f"{folder}/beside"))
    try:
        storage.on_rank_zero(lambda: restricted.read(f"{folder}/evil", trusted=False))
    except ValueError as error:
        results.append({"refused": f"{type(error).__name__}: {error}"})
    faulthandler.cancel_dump_traceback_later()
    return results


def beside_two(rank: int, folder: str) -> dict[str, Any]:
    """A run that saves meanwhile, slowly on rank 0, and of which rank 1 cannot write iterations 2 and 4 of 5."""
    write, alone = storage.Writer.write_data, fit(5, devices=2)

    def slow(self: Any, *args: Any) -> Any:
        if rank == 0:
            time.sleep(0.3)
        elif re.search(r"/[24]\.ckpt", str(self.path)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *args)

    storage.Writer.write_data = slow
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = fit(5, beside(folder, save_top_k=-1), devices=2)
    storage.Writer.write_data = write
    reports = [str(w.message) for w in caught if "could not be written" in str(w.message)]
    resumed = fit(5, devices=2, ckpt_path=f"{folder}/3.ckpt")
    equal = torch.equal(weights, alone) and torch.equal(resumed, alone)
    return {"reports": reports, "equal": equal, "left": complete(folder)}


def test_a_rank_that_cannot_write_holds_up_no_other(tmp_path):
    """Files are limited by the kernel; the marker, which rank 0 writes alone, by us."""
    (tmp_path / "evil").mkdir()
    torch.save({}, tmp_path / "evil" / storage.MARKER)
    (tmp_path / "evil/.metadata").write_bytes(pickle.dumps(Evil(tmp_path / "proof")))
    one, other = spawn(failing, 2, str(tmp_path))
    assert one.pop()["refused"] == other.pop()["refused"]
    assert not (tmp_path / "proof").exists()
    for told in (beside_0 := one.pop(), beside_1 := other.pop()):
        assert (told["equal"], told["left"]) == (True, ["1", "3", "5"])
    assert [re.search(r"\d\.ckpt.*rank 1", report) is not None for report in beside_0["reports"]] == [True, True]
    assert beside_1["reports"] == []
    why = [
        r"\(OSError on rank 0: .*File too large\)",
        r"\(OSError on rank 1: .*File too large\)",
        r"\(OSError: .*No space",
    ]
    for case, reason, *ranks in zip(("0", "1", "marker"), why, one, other, strict=True):
        for told in ranks:
            assert re.search(rf"4\.ckpt' could not be written {reason}", told["error"])
            assert told["seen"] == {1: [], 2: ["1"], 3: ["1"], 4: ["3"]}
        assert [re.search(r"\d\.ckpt", report)[0] for report in ranks[0]["reports"]] == ["2.ckpt", "4.ckpt"]
        assert ranks[1]["reports"] == []
        assert sorted(path.name for path in (tmp_path / case).iterdir()) == ["3.ckpt"]
