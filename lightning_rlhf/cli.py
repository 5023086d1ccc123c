"""``lightning-rlhf fit|validate|test|plan|rewards --config FILE``, ``lightning-rlhf export CHECKPOINT OUT``: LightningCLI with
this package's defaults and one-line errors.

Constructor signatures are the schema of the YAML: ``model`` is `PPOLightningModule` unless ``class_path`` names another,
``data`` is `PromptDataModule`, ``rollout`` holds the arguments of the `RolloutCallback` (a module that draws no responses has
none), ``trainer`` those of Lightning's.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal, NoReturn, TypeVar

import lightning.pytorch as pl
import torch.distributed as dist
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelSummary, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from transformers.utils.logging import disable_progress_bar

from lightning_rlhf.callbacks.checkpoint import IterationCheckpoint, versions_of
from lightning_rlhf.callbacks.hf_export import ExportFailed
from lightning_rlhf.callbacks.manifest import resolved_config
from lightning_rlhf.callbacks.preemption import Preemption, checkpoint_of_job, restarts
from lightning_rlhf.callbacks.progress import IterationProgress
from lightning_rlhf.callbacks.rollout import RolloutCallback
from lightning_rlhf.callbacks.samples import Samples
from lightning_rlhf.callbacks.summary import PlanSummary
from lightning_rlhf.callbacks.watchdog import Watchdog, must_end
from lightning_rlhf.cli_errors import fail, is_first_of_node
from lightning_rlhf.last_words import Ended, exchanged
from lightning_rlhf.meeting import FailedElsewhere
from lightning_rlhf.modules.base import RLHFLightningModule
from lightning_rlhf.modules.roles import SCORED
from lightning_rlhf.modules.training import TrainedModule
from lightning_rlhf.options import flat
from lightning_rlhf.plan.offline import plan_offline, precision_name
from lightning_rlhf.plan.table import full, show
from lightning_rlhf.precision import FSDP2Precision
from lightning_rlhf.rewards import RewardError
from lightning_rlhf.storage import SaveFailed
from lightning_rlhf.strategy import FSDPUlyssesStrategy
from lightning_rlhf.trial import table, try_run

OBSERVERS = ("Throughput", "Memory", "Samples", "IterationCheckpoint")
"""Callbacks that a run has by default; ``trainer.callbacks: []`` removes them, ``callbacks+:`` appends."""

CLEAN_UP_S = 120.0
"""What one of several processes may take to end after an error."""

_WITHOUT_TRAINER = ("plan", "rewards")
"""Commands that look at a configuration and start nothing: a Trainer would look for the GPUs."""

_NOISE = (
    r".*does not have many workers.*",
    r".*in eval mode at the start of training.*",
    r".*LeafSpec.*is deprecated.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*sync_dist=True.*",
    r".*there is no last checkpoint available.*",  # `_Commands` says so
)


class RLHFParser(LightningArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # an inner parser that tries one of several types
            super().error(message, ex)
        fail(message, code=2, own=is_first_of_node(), met=False)


class _Started(pl.Callback):
    """Knows whether the first batch was reached (until then an error is about the configuration), and why other ranks ended."""

    started = False
    ended: Ended | None = None

    def on_train_batch_start(self, *args: Any) -> None:
        self.started = True

    def on_validation_batch_start(self, *args: Any) -> None:
        self.started = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.world_size > 1 and isinstance(exception, Exception):  # the others wait for this process's end
            must_end(f"the clean-up after {type(exception).__name__}", CLEAN_UP_S)
            self.ended = exchanged(exception)
            if self.ended is not None and self.ended.cause is not None:
                exception.add_note(f"lightning-rlhf: {self.ended.cause}")


class _SavedConfig(SaveConfigCallback):
    """Says where it could not be written: an error of a full disk has no path."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        folder = trainer.log_dir
        try:
            super().setup(trainer, pl_module, stage)
        except OSError as error:
            raise OSError(
                f"{folder}/{self.config_filename} could not be written ({error}): free space there, make it writable, or change"
                " trainer.default_root_dir, of a logger its save_dir"
            ) from error


class _Commands(pl.Trainer):
    """Lightning makes a subcommand of each method: of those that a run has, and of one that only looks at it."""

    asks_for_last = False

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """The strategy learns here which checkpoint ``ckpt_path``, last or best is: Lightning says so once models are built."""
        if isinstance(self.strategy, FSDPUlyssesStrategy):
            self.strategy.resumes_from = kwargs.get("ckpt_path")
            self.strategy.options = flat(resolved_config(self) or {})
        if self.asks_for_last and kwargs.get("ckpt_path") is None:
            savers = [c for c in self.checkpoint_callbacks if isinstance(c, IterationCheckpoint)]
            places = " or ".join(versions_of(saver.folder(self)) for saver in savers)
            begins = "the run starts from the beginning" if self.training else "the model is taken as it is"
            rank_zero_warn(
                f"ckpt_path: last finds no complete checkpoint in {places or 'any folder, for want of an IterationCheckpoint'}:"
                f" {begins}; if there is one elsewhere, give its path"
            )
        return super()._run(*args, **kwargs)

    def plan(self, devices: PositiveInt | None = None, device_memory_gb: PositiveFloat = 80.0) -> None:
        """Prints what a run would do and need, and what is wrong with it; loads nothing, needs no GPU.

        Args:
            devices: GPUs per node, instead of ``trainer.devices``.
            device_memory_gb: memory of one GPU, 2^30 bytes.
        """

    def rewards(
        self, rows: PositiveInt = 8, completion: str | None = None, completion_column: str | None = None
    ) -> None:
        """Tries the reward functions on rows of the training data, without a model: right answers, a text, nothing and junk.

        Args:
            rows: how many, evenly over the data.
            completion: a text to try on every row.
            completion_column: column of right answers; by default answer, solution, ground_truth, response or completion.
        """

    def export(self) -> None:
        """Writes the policy of a checkpoint as a Hugging Face folder; needs neither a GPU nor the data."""


class RLHFCLI(LightningCLI):
    """The defaults, and the commands that are none of Lightning's."""

    progress = _Started()  # of this process's run

    def __init__(self, args: Sequence[str] | None = None) -> None:
        super().__init__(
            TrainedModule,
            pl.LightningDataModule,
            trainer_class=_Commands,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_callback=_SavedConfig,
            save_config_kwargs={"overwrite": True},
            parser_class=RLHFParser,
            parser_kwargs={"allow_abbrev": False, "description": "RLHF and RLVR for Hugging Face language models."},
            args=None if args is None else list(args),
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        dataloaders = {"model", "dataloaders", "datamodule"}
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": dataloaders,
            "test": dataloaders,
            "plan": set(),
            "rewards": set(),
            "export": set(),
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        _add_imports(parser)
        parser.add_lightning_class_args(RolloutCallback, "rollout")
        parser.set_defaults(
            {
                "model": {"class_path": "lightning_rlhf.PPOLightningModule"},
                "data": {"class_path": "lightning_rlhf.PromptDataModule"},
                "rollout.engine": {"class_path": "lightning_rlhf.rollout.TransformersEngine"},
                "trainer.strategy": {"class_path": "lightning_rlhf.FSDPUlyssesStrategy"},
                "trainer.log_every_n_steps": 1,
                "trainer.num_sanity_val_steps": 0,
                "trainer.inference_mode": False,
                "trainer.callbacks": [{"class_path": f"lightning_rlhf.{name}"} for name in OBSERVERS],
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)  # not super(): it warns that a program calls `main` with arguments

    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning would unpickle what is no folder, for hyper-parameters that no checkpoint here has."""

    def _set_seed(self) -> None:
        if self.subcommand != "export":  # nothing is drawn
            super()._set_seed()

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        with_rollouts = isinstance(self.model, RLHFLightningModule)
        if not with_rollouts:
            self._refuse_rollout_options()
        options = self._get(self.config_init, "trainer")
        if options.enable_checkpointing is False:  # Lightning refuses it beside the default callback
            given = options.callbacks if isinstance(options.callbacks, list) else [options.callbacks]
            options.callbacks = [c for c in given if c is not None and not isinstance(c, IterationCheckpoint)]
        trainer = super().instantiate_trainer(**kwargs)
        if not with_rollouts:
            trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, RolloutCallback | Samples)]  # type: ignore[attr-defined]
        bars = [i for i, callback in enumerate(trainer.callbacks) if type(callback) is RichProgressBar]  # type: ignore[attr-defined]
        for i in bars:  # Lightning's default
            trainer.callbacks[i] = IterationProgress()  # type: ignore[attr-defined]
        trainer.callbacks.insert(0, self.progress)  # type: ignore[attr-defined]
        for kind in (Watchdog, Preemption):  # last: what Preemption saves has seen all other callbacks
            if not any(isinstance(callback, kind) for callback in trainer.callbacks):  # type: ignore[attr-defined]
                trainer.callbacks.append(kind())  # type: ignore[attr-defined]
        if any(isinstance(callback, ModelSummary) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            trainer.callbacks.insert(0, PlanSummary())  # type: ignore[attr-defined]
        return trainer

    def _refuse_rollout_options(self) -> None:
        assert self.subcommand is not None
        defaults = self._parser(self.subcommand).get_defaults().rollout.as_flat()
        for name, value in vars(self.config[self.subcommand].rollout.as_flat()).items():
            if value != getattr(defaults, name, None):
                raise ValueError(f"rollout.{name}: {type(self.model).__name__} draws no responses: leave rollout out")

    def before_fit(self) -> None:
        """An attempt that torchrun or SLURM started again goes on where the one before got to, whatever ``ckpt_path`` says."""
        if not restarts():
            return
        found = checkpoint_of_job(self.trainer)
        if found is not None:
            self.config_init.fit.ckpt_path = found
        begins = f"goes on from {found}" if found else "finds no checkpoint of an earlier one and begins as that did"
        rank_zero_info(f"lightning-rlhf: attempt {restarts() + 1} of this job {begins}")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        if subcommand == "export":
            return _export_parser(self.parser_class(**kwargs))
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand in _WITHOUT_TRAINER:  # a saved configuration of a fit has them
            parser.add_method_arguments(klass, "fit", skip=self.subcommands()["fit"])
        return parser

    def instantiate_classes(self) -> None:
        if self.subcommand == "export":
            return None
        if self.subcommand not in _WITHOUT_TRAINER:
            return super().instantiate_classes()
        self.config_init = self.parser.instantiate_classes(self.config)
        return None

    def _run_subcommand(self, subcommand: str) -> None:
        if subcommand == "export":
            from lightning_rlhf.export import export_checkpoint

            given = self.config.export
            print(export_checkpoint(**{name: given[name] for name in inspect.signature(export_checkpoint).parameters}))
            return None
        if subcommand == "rewards":
            asked = self.config_init.rewards
            trials = try_run(asked.model, asked.data, asked.rows, asked.completion, asked.completion_column)
            show(table(trials))
            if any(trial.errors for trial in trials):
                sys.exit(1)
            return None
        if subcommand != "plan":
            self.trainer.asks_for_last = self.config_init[subcommand].ckpt_path == "last"  # type: ignore[attr-defined]
            return super()._run_subcommand(subcommand)
        made = self.config_init.plan
        if not isinstance(made.model, RLHFLightningModule):
            raise ValueError(f"plan is for runs with rollouts, {type(made.model).__name__} has none: start it with fit")
        plan = plan_offline(
            made.model, made.data, made.rollout, made.trainer, made.devices, int(made.device_memory_gb * 2**30)
        )
        show(full(plan))
        if any(problem.kind == "error" for problem in plan.problems):
            sys.exit(1)
        return None

    def before_instantiate_classes(self) -> None:
        for name in self.config[self.subcommand].imports:
            try:
                import_module(name)
            except Exception as error:  # whatever the user's module raises
                raise ValueError(f"imports: {name!r} cannot be imported: {type(error).__name__}: {error}") from error
        if self.subcommand == "export":
            return
        trainer = self.config[self.subcommand].trainer
        FSDP2Precision(precision_name(trainer.get("precision")))  # Lightning's own refusal recommends others
        for theirs, default, ours in (
            ("gradient_clip_val", None, "max_grad_norm"),
            ("accumulate_grad_batches", 1, "micro_batch_tokens"),
        ):
            if trainer.get(theirs, default) != default:
                raise ValueError(f"trainer.{theirs} is for automatic optimisation: set model.{ours} instead")


def _add_imports(parser: LightningArgumentParser) -> None:
    parser.add_argument(
        "--imports",
        type=list[str],
        default=[],
        help="Modules to import first, such as one that registers a model with transformers' Auto classes.",
    )


def _export_parser(parser: LightningArgumentParser) -> LightningArgumentParser:
    """Arguments of `export_checkpoint`."""
    parser.add_argument("checkpoint", type=str, help="Checkpoint folder of a run, local or a URL.")
    parser.add_argument("out", type=str, help="Local folder to write.")
    parser.add_argument("--adapter", action="store_true", help="Of LoRA the adapter alone, in peft's format.")
    parser.add_argument(
        "--dtype",
        type=Literal["bfloat16", "float32"],
        help="Of the tensors: bfloat16 if not given, of an adapter the one it was trained in.",
    )
    parser.add_argument("--model", type=str, help="Where the model that the run started from is now.")
    parser.add_argument("--config", type=str, help="YAML of the run, for checkpoints that do not say what the run was.")
    parser.add_argument("--average", action="store_true", help="The moving average of the weights (model.ema_decay).")
    parser.add_argument(
        "--role", type=Literal[("actor", *SCORED)], help="Which model; by default the first that the run trained."
    )
    _add_imports(parser)
    return parser


CLI = TypeVar("CLI", bound=RLHFCLI)


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return "try installing [litlogger]" not in record.getMessage()


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of ``lightning-rlhf``."""
    cli = run(RLHFCLI, args)
    trainer = getattr(cli, "trainer", None)  # plan, rewards and export have none
    for callback in trainer.callbacks if trainer else []:
        if isinstance(callback, RolloutCallback):
            callback.close()
    if dist.is_initialized():
        dist.destroy_process_group()  # NCCL warns of one that is left to the end of the process


def run(cli: type[CLI], args: Sequence[str] | None = None) -> CLI:
    """Parse the arguments and do what they say. Errors of the configuration end in one line.

    Set LIGHTNING_RLHF_TRACEBACK=1 to see where they come from. Errors after the first batch was reached are raised as they
    are, with their traceback, but for a reward function that breaks its contract and a last checkpoint or export that could
    not be written.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # your own module by class_path, as with `python -m`
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advertisement)
    disable_progress_bar()  # of the embedded engine's weights, one per process
    cli.progress = _Started()
    try:
        return cli(args)
    except (ValueError, TypeError, OSError, ImportError, MisconfigurationException, RuntimeError) as error:
        if os.environ.get("LIGHTNING_RLHF_TRACEBACK") or (
            cli.progress.started and not isinstance(error, SaveFailed | RewardError | ExportFailed)
        ):
            raise
        message = f"{error}" or type(error).__name__
        if isinstance(error, FailedElsewhere):
            fail(message)
        if (ended := cli.progress.ended) is None:  # the ranks have not met
            of_process = isinstance(error, RuntimeError | OSError) and not isinstance(error, FileNotFoundError)
            fail(message, own=of_process or is_first_of_node(), met=False)
        fail(ended.cause or message, own=0 in ended.silent if ended.echo else not ended.said_by_first)
