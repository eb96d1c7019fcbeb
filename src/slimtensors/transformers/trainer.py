"""Checkpoints for the Trainer of transformers: compressed, and complete or absent.

`SlimTrainer` overrides the methods by which a Trainer writes and reads a checkpoint folder. The
Trainer and its `TrainingArguments` still decide when to save, how many checkpoints to keep, and
which one is best.
"""

import itertools
import logging
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.dynamic_module_utils import custom_object_save
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy

from slimtensors.checkpoint import (
    build_checkpoint,
    list_checkpoints,
    restore_checkpoint,
)
from slimtensors.checkpoint.loop import Checkpointing, CheckpointOptions, TrainingObjects
from slimtensors.checkpoint.loop_folder import RunIntegrity
from slimtensors.checkpoint.manifest import is_checkpoint, read_manifest, read_metrics
from slimtensors.checkpoint.pretrained import open_pretrained
from slimtensors.checkpoint.profiles import Profile, find_profile
from slimtensors.checkpoint.run import Retention, check_base_options, select_resumable
from slimtensors.checkpoint.state import Stateful, capture_rng, is_stateful, restore_rng
from slimtensors.checkpoint.store import StoredState, flatten_in_place, read_files
from slimtensors.errors import ConfigError, FormatError, MismatchError, MissingBaseError
from slimtensors.folder.config_json import describe_checkpoint, update_config
from slimtensors.parallel import check_threads
from slimtensors.storage import StrPath

_log = logging.getLogger(__name__)

TRAINING_ARGS = "training_args.json"
_RANKS = "rng_ranks"
"""Key of the random states of all processes but the first."""
_SENTINEL = "checkpoint-is-incomplete.txt"
"""File that the Trainer writes before a save on SIGTERM (`enable_jit_checkpoint`)."""


@dataclass(frozen=True)
class CheckpointSettings:
    """How `SlimTrainer` stores checkpoints."""

    base: str | None = None
    """None saves each checkpoint in full, so that its folder can be copied and removed on its own.
    `auto` stores differences from the last one that was saved in full, `chain` from the previous
    one."""
    keyframe_every: int = 8
    """One checkpoint in this number is saved in full."""
    profile: str | Profile = "exact"
    """Precision of weights and optimizer state, as for `save_checkpoint`."""
    async_: bool = False
    """Write in the background; the files may be incomplete when `on_save` is called."""
    pretrained: StrPath | None = None
    """Folder or file from which the model was loaded: weights that are still equal to it take no
    space, others are stored as differences. Must stay as it is. None stores all weights."""
    extra: Mapping[str, Stateful] = field(default_factory=dict)
    """Further objects with a state to save and restore, by name."""
    threads: int | None = None

    def __post_init__(self) -> None:
        check_base_options(self.base, self.keyframe_every)
        check_threads(self.threads)
        for name in [name for name, part in self.extra.items() if not is_stateful(part)]:
            raise ConfigError(f"extra: {name!r} has no state_dict and load_state_dict")
        if _RANKS in self.extra:
            raise ConfigError(f"extra: {_RANKS!r} is a reserved key; choose another name")
        build_checkpoint(nn.Identity(), extra=dict.fromkeys(self.extra), rng_state=False)
        if find_profile(self.profile).is_model_only:
            raise ConfigError(f"cannot resume from profile {find_profile(self.profile).name!r}")


class SlimTrainer(Trainer):
    """A Trainer of transformers whose checkpoints are compressed, and complete or absent.

    All arguments of the Trainer have their usual meaning. Checkpoints of other Trainers can be
    resumed too. The first save moves later checkpoints of an earlier run in the same folder to a
    subfolder `earlier-run-1`. Combine it with other Trainers by inheritance:
    `class MyTrainer(Seq2SeqTrainer, SlimTrainer): ...`. For a checkpoint, `save_model` and `_save`
    write everything but the weights to a temporary folder; files that a subclass adds are kept.

    Args:
        args: arguments of the Trainer.
        checkpoints: how checkpoints are stored.
        options: arguments of the Trainer.

    Example:
        >>> from slimtensors.transformers import SlimTrainer as Trainer
        >>> trainer = Trainer(model, TrainingArguments("run"), train_dataset=dataset)
        >>> trainer.train(resume_from_checkpoint=True)
    """

    def __init__(
        self, *args: Any, checkpoints: CheckpointSettings | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.checkpoints = checkpoints or CheckpointSettings()
        _check_support(self)
        self._run = _TrainerRun(self)
        self._pretrained = open_pretrained(self.checkpoints.pretrained, {"": self.model})

    def _inner_training_loop(self, *args: Any, **options: Any) -> Any:
        with self._run:
            return super()._inner_training_loop(*args, **options)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        self._run.save(self._get_output_dir(trial=trial))

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        if self._run.is_saving:
            _save_without_weights(self, Path(output_dir or self.args.output_dir))
        else:
            super()._save(output_dir, state_dict)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if is_checkpoint(Path(resume_from_checkpoint)):
            self._run.load_model(Path(resume_from_checkpoint), model)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        _check_missing(self.model, load_result.missing_keys)
        super()._issue_warnings_after_load(load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and is_checkpoint(Path(checkpoint)):
            self._run.load_optimizer(Path(checkpoint))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        self._run.start = self.state.global_step

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and is_checkpoint(Path(checkpoint)):
            self._run.load_scaler(Path(checkpoint))
        else:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and is_checkpoint(Path(checkpoint)):
            self._run.load_rng(Path(checkpoint))
        else:
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if not is_checkpoint(best):
            super()._load_best_model()
            return
        _log.info("loading the best model from %s", best)
        stored = StoredState(best, pretrained=self.checkpoints.pretrained)
        weights = stored.load_weights(threads=self.checkpoints.threads)
        restore_checkpoint({"model": weights}, self.model, rng_state=False)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self._run.finish()
        return super()._finalize_training(*args, **options)


def _check_support(trainer: SlimTrainer) -> None:
    """Raise `ConfigError` if the Trainer has options that do not work with our checkpoints."""
    args, base = trainer.args, trainer.checkpoints.base
    unsupported = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        "PEFT": _is_peft(trainer.model),
    }
    for name in [name for name, is_used in unsupported.items() if is_used]:
        raise ConfigError(f"SlimTrainer does not support {name}; use the Trainer of transformers")
    _check_overrides(type(trainer))
    if args.push_to_hub and args.hub_strategy != HubStrategy.END:
        strategy = args.hub_strategy.value
        raise ConfigError(
            f"SlimTrainer does not support hub_strategy={strategy!r}; use hub_strategy='end'"
        )
    if args.save_total_limit == 1 and base is not None:
        raise ConfigError(
            f"base={base!r} cannot be combined with save_total_limit=1: a difference needs another"
            " checkpoint"
        )


def _check_overrides(cls: type) -> None:
    """Raise `ConfigError` if other classes override methods that `SlimTrainer` would not call."""
    position = cls.__mro__.index(SlimTrainer)
    before, after = cls.__mro__[:position], cls.__mro__[position + 1 : cls.__mro__.index(Trainer)]
    for other, name in itertools.product(after, ("_save", "_save_checkpoint")):
        if name in vars(other):
            raise ConfigError(
                f"{other.__name__} overrides {name}: inherit from it first, as in"
                f" class {cls.__name__}({other.__name__}, SlimTrainer)"
            )
    unused = ("_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler")
    for other, name in itertools.product((*before, *after), unused):
        if name in vars(other):
            raise ConfigError(
                f"{other.__name__} overrides {name}, which SlimTrainer does not call; use"
                " CheckpointSettings(extra={name: object}) for additional states"
            )


class SlimCheckpoints:
    """The callback of earlier versions, which `SlimTrainer` replaces."""

    def __init__(self, **options: Any) -> None:
        raise ConfigError(
            "the callback SlimCheckpoints was replaced: use SlimTrainer instead of Trainer"
            " (from slimtensors.transformers import SlimTrainer as Trainer), with save_strategy,"
            " save_steps and save_total_limit in TrainingArguments"
        )


class _TrainerRun:
    """Saves and restores the state of a Trainer; a context manager around its training loop."""

    def __init__(self, trainer: SlimTrainer) -> None:
        self.start = 0
        """Step from which training resumed."""
        self._trainer = trainer
        self._stack: ExitStack | None = None
        """Set while the Trainer trains."""
        self._loop: Checkpointing | None = None
        self.is_saving = False
        """Whether the Trainer's `save_model` is called for a checkpoint."""
        self._files: dict[str, bytes] = {}
        """Files of the checkpoint that is saved, other than its state."""
        self._steps: set[int] = set()
        """Steps saved since training started."""
        self._resumed: tuple[str, dict[str, Any]] | None = None
        """Id of the checkpoint to resume from and its state, until all of it is restored."""
        self._ranks = _RankStates()

    def __enter__(self) -> None:
        self._stack, self.start, self._steps = ExitStack(), 0, set()

    def __exit__(self, *error: Any) -> None:
        stack, self._stack, self._loop, self._resumed = self._stack, None, None, None
        if stack is not None:
            stack.__exit__(*error)

    def save(self, folder: str) -> None:
        """Save the current step to a folder of checkpoints; called by all processes."""
        trainer = self._trainer
        args, state = trainer.args, trainer.state
        self._ranks.states = _gather_rng(args.world_size)
        self._steps.add(state.global_step)
        run, name = Path(folder), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        with TemporaryDirectory() as temporary:
            files = Path(temporary, name)  # subclasses may read the name
            files.mkdir()
            self._prepare_files(folder, files)
            self._files = read_files(files)
        if not args.should_save:
            return
        _remove_sentinel(run / name)
        if self._stack is None:  # a save outside of training
            self.start = state.global_step - 1
            with self._open(run) as loop:
                self._save(loop)
            return
        if self._loop is None or self._loop.run != run:
            self._loop = self._stack.enter_context(self._open(run))
        self._save(self._loop)

    def load_model(self, path: Path, model: nn.Module | None) -> None:
        """Read a checkpoint, and restore the model."""
        target = self._trainer.model if model is None else model
        restore_checkpoint(self._read(path), target, rng_state=False)

    def load_optimizer(self, path: Path) -> None:
        """Restore optimizer, scheduler and the objects of `extra`."""
        state = self._read(path)
        if state.get("optimizer") is None:
            _log.warning("%s contains only the model: the optimizer starts anew", path)
            return
        for name in self._trainer.checkpoints.extra.keys() - state.keys():
            raise MismatchError(
                f"{path}: no state of {name!r}; the checkpoint was saved without it"
            )
        restore_checkpoint(
            state,
            self._trainer.model,
            _unwrap_optimizer(self._trainer.optimizer),
            self._trainer.lr_scheduler,
            extra=self._trainer.checkpoints.extra,
            rng_state=False,
        )
        rest = {name: state.get(name) for name in ("scaler", "rng", _RANKS)}
        self._resumed = read_manifest(path).id, rest

    def load_scaler(self, path: Path) -> None:
        """Restore the gradient scaler, if there is one and it was saved."""
        scaler, saved = _find_scaler(self._trainer), self._read(path).get("scaler")
        if scaler is not None and saved is not None:
            scaler.load_state_dict(saved)

    def load_rng(self, path: Path) -> None:
        """Restore the random number generators of this process."""
        rank, state = self._trainer.args.process_index, self._read(path)
        states = [state.get("rng"), *(state.get(_RANKS) or {}).get("states", [])]
        if rank >= len(states) or states[rank] is None:
            _log.info("no random state of process %d: training is not reproducible", rank)
            return
        restore_rng(states[rank])
        self._resumed = None

    def finish(self) -> None:
        """Wait for the last save; prepare what the Trainer does at the end of training."""
        if self._loop is not None:
            self._loop.wait()
        trainer, args = self._trainer, self._trainer.args
        best = self._find_best(Path(trainer._get_output_dir(trainer._trial)))
        if args.should_save and args.save_total_limit == 1 and best and _is_delta(best):
            # The Trainer removes all checkpoints but the best one, also its bases.
            flatten_in_place(
                best, pretrained=trainer._pretrained, threads=trainer.checkpoints.threads
            )
        if args.world_size > 1:
            dist.barrier()  # all processes may load the best model

    def _prepare_files(self, run: str, folder: Path) -> None:
        """Write all files of a checkpoint but its state to a folder; called by all processes."""
        trainer = self._trainer
        self.is_saving = True
        try:
            trainer.save_model(str(folder), _internal_call=True)
        finally:
            self.is_saving = False
        if trainer.args.save_strategy != SaveStrategy.NO and trainer.state.best_global_step:
            self._record_best(run, trainer.state.best_global_step)
        if trainer.args.should_save:
            _update_callback_states(trainer)
            trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))

    def _record_best(self, folder: str, step: int) -> None:
        """Name the best checkpoint; one of an earlier run in this folder is about to be moved."""
        best, state = f"{folder.rstrip('/')}/{PREFIX_CHECKPOINT_DIR}-{step}", self._trainer.state
        is_known = step in self._steps or step <= self.start
        if step == state.global_step or (is_known and Path(best).is_dir()):
            state.best_model_checkpoint = best

    def _find_best(self, run: Path) -> Path | None:
        """Return the best checkpoint if it is in this folder; it may be in that of another run."""
        best = Path(self._trainer.state.best_model_checkpoint or "")
        return best if best.parent.resolve() == run.resolve() and best.name else None

    def _read(self, path: Path) -> dict[str, Any]:
        """Return the state of a checkpoint, which is read once while training starts."""
        found = read_manifest(path).id
        if self._resumed is None or self._resumed[0] != found:
            self._resumed = found, _load(path, self._trainer.checkpoints)
        return self._resumed[1]

    def _open(self, run: Path) -> Checkpointing:
        trainer, settings = self._trainer, self._trainer.checkpoints
        is_whole = not trainer.args.save_only_model
        objects = TrainingObjects(
            trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False),
            _unwrap_optimizer(trainer.optimizer) if is_whole else None,
            trainer.lr_scheduler if is_whole else None,
            _find_scaler(trainer) if is_whole else None,
            extra={**settings.extra, **({_RANKS: self._ranks} if self._ranks.states else {})},
            files=lambda: self._files,
        )
        options = CheckpointOptions(
            every=1,
            retention=Retention(),
            keep_history=False,
            base=settings.base,
            keyframe_every=settings.keyframe_every,
            profile=find_profile(settings.profile),
            is_async=settings.async_,
            resume=True,
            on_commit=None,
            threads=settings.threads,
            name=f"{PREFIX_CHECKPOINT_DIR}-{{}}",
            handles_sigterm=False,
            sets_newer_aside=True,
            merges_folders=True,
            stores_all_weights=True,
            pretrained=trainer._pretrained,
        )
        return Checkpointing(run, objects, options, start=self.start)

    def _save(self, loop: Checkpointing) -> None:
        state, limit = self._trainer.state, self._trainer.args.save_total_limit
        if limit is not None and limit > 0:
            best = self._find_best(loop.run)
            loop.retention = Retention(last=limit, names=frozenset([best.name] if best else ()))
        loop.step(state.global_step, epoch=int(state.epoch or 0), **_read_metrics(state))


@dataclass
class _RankStates:
    """The random states of all processes but the first."""

    states: list[dict[str, Any]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {"states": self.states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.states = state_dict["states"]


def _gather_rng(world_size: int) -> list[dict[str, Any]]:
    """Return the random states of all processes but the first."""
    if world_size <= 1:
        return []
    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, capture_rng())
    return states[1:]


def _update_callback_states(trainer: SlimTrainer) -> None:
    """Write the state of callbacks, such as the counter of early stopping, to `trainer.state`."""
    table = trainer.state.stateful_callbacks
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    found: dict[str, list[Any]] = {}
    for callback in [x for x in callbacks if isinstance(x, ExportableState)]:
        found.setdefault(type(callback).__name__, []).append(callback.state())
    for name, states in found.items():
        table[name] = states if isinstance(table.get(name), list) else states[-1]


def _remove_sentinel(path: Path) -> None:
    """Remove the Trainer's mark for an incomplete checkpoint, which ours never is."""
    (path / _SENTINEL).unlink(missing_ok=True)


def _save_without_weights(trainer: SlimTrainer, folder: Path) -> None:
    """Write what `Trainer._save` writes, but no weights and no pickle."""
    if not trainer.args.should_save:
        return
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if isinstance(model, PreTrainedModel):
        _save_config(model, folder)
    tokenizer = trainer.processing_class
    if tokenizer is None:
        tokenizer = getattr(trainer.data_collator, "tokenizer", None)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    (folder / TRAINING_ARGS).write_text(trainer.args.to_json_string() + "\n")


def _save_config(model: Any, folder: Path) -> None:
    """Write what `save_pretrained` writes besides weights, and how to load those."""
    config = deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    update_config(folder, describe_checkpoint)


def _read_metrics(state: Any) -> dict[str, float]:
    """Return the metrics that were logged at the current step."""
    entries = (entry for entry in state.log_history if entry.get("step") == state.global_step)
    logged = {key: value for entry in entries for key, value in entry.items()}
    return {key: x for key, x in read_metrics(logged).items() if key not in ("epoch", "step")}


def _load(path: Path, settings: CheckpointSettings) -> dict[str, Any]:
    """Load a checkpoint; if it is damaged, name the newest one that is intact."""
    try:
        stored = StoredState(path, pretrained=settings.pretrained)
        return stored.load_state(threads=settings.threads)
    except MissingBaseError:
        raise
    except (FormatError, MismatchError) as error:
        integrity = RunIntegrity(path.parent)
        points = select_resumable(list_checkpoints(path.parent))
        intact = next((point for point in reversed(points) if integrity.is_intact(point)), None)
        advice = f"pass resume_from_checkpoint={str(intact.path)!r}" if intact else "none is intact"
        raise type(error)(f"{error}; {advice}") from error


def _check_missing(model: nn.Module, missing: Collection[str]) -> None:
    """Raise `MismatchError` if weights were not in a native checkpoint, unless they are tied."""
    state = model.state_dict()
    loaded = {x.data_ptr() for name, x in state.items() if name not in missing}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    names = [name for name in missing if name in state and name not in ignored]
    lost = [name for name in names if state[name].data_ptr() not in loaded]
    if lost:
        raise MismatchError(
            f"the Trainer did not find {len(lost)} weights in the checkpoint, among them {lost[0]},"
            " and would train on from random ones; load it with from_pretrained instead, and train"
            " without resume_from_checkpoint"
        )


def _is_delta(path: Path) -> bool:
    return is_checkpoint(path) and read_manifest(path).base is not None


def _unwrap_optimizer(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _find_scaler(trainer: SlimTrainer) -> Any:
    return getattr(trainer.accelerator, "scaler", None)


def _is_peft(model: nn.Module) -> bool:
    """Return True for a model with adapters of the package `peft`, which need not be installed."""
    is_wrapper = any(cls.__module__.split(".")[0] == "peft" for cls in type(model).__mro__)
    return is_wrapper or bool(getattr(model, "_hf_peft_config_loaded", False))
