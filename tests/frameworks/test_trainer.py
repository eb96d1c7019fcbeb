"""SlimTrainer instead of the Trainer of transformers: the same script, the same results."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from frameworks.trainer_runs import (
    Lines,
    Plain,
    SlimTrainer,
    StopAt,
    Trainer,
    build,
    interrupt,
    make_llama,
    names,
    train,
)
from process_tools import torchrun
from safetensors.torch import load_file
from strategies import same_bits
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from slimtensors.checkpoint import list_checkpoints, load_checkpoint, verify_run
from slimtensors.errors import ConfigError, CorruptFileError, MismatchError
from slimtensors.transformers import CheckpointSettings
from slimtensors.transformers.trainer import SlimCheckpoints

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TESTS = Path(__file__).parents[1]
PATH = str(TESTS)
DDP = TESTS / "frameworks" / "programs" / "train_ddp.py"
LOAD_WITHOUT_IMPORT = TESTS / "transformers" / "programs" / "load_without_import.py"
EVAL = {"eval_strategy": "steps", "eval_steps": 3}
OPTIONS = {
    "steps": {},
    "epoch": {"save_strategy": "epoch"},
    "best": {"save_strategy": "best", "metric_for_best_model": "loss", **EVAL},
    "limit": {"save_total_limit": 2},
    "limit and best": {"save_total_limit": 2, "load_best_model_at_end": True, **EVAL},
    "only best": {"save_total_limit": 1, "load_best_model_at_end": True, **EVAL},
    "greater": {
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        **EVAL,
    },
    "only model": {"save_only_model": True},
    "bf16": {"bf16": True, "gradient_accumulation_steps": 2},
    "none": {"save_strategy": "no"},
}
MORE_OPTIONS = ("epoch", "limit", "greater", "none")
"""Options that are similar to others, or part of other tests."""


def weights(trainer):
    return trainer.model.state_dict()


def assert_equal_weights(left, right):
    assert left.keys() == right.keys()
    assert all(same_bits(x, right[name]) for name, x in left.items())


def read_state(folder):
    """The Trainer's state in a checkpoint, without what names its folder or measures time."""
    state = json.loads((folder / "trainer_state.json").read_text())
    if state["best_model_checkpoint"] is not None:
        state["best_model_checkpoint"] = state["best_model_checkpoint"].rpartition("/")[2]
    for entry in state["log_history"]:
        for key in [key for key in entry if "runtime" in key or "per_second" in key]:
            del entry[key]
    return state


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.long] * (kind in MORE_OPTIONS)) for kind in OPTIONS],
)
def test_checkpoints_and_results_are_those_of_the_trainer(tmp_path, kind):
    options = OPTIONS[kind]
    native, expected = train(Trainer, tmp_path / "native", **options)
    ours, recorder = train(SlimTrainer, tmp_path / "ours", **options)
    assert recorder.losses == expected.losses
    assert recorder.saved == expected.saved
    assert names(tmp_path / "ours") == names(tmp_path / "native")
    assert_equal_weights(weights(ours), weights(native))
    for name in names(tmp_path / "ours"):
        left, right = (read_state(tmp_path / run / name) for run in ("ours", "native"))
        assert left == right
    if list_checkpoints(tmp_path / "ours"):
        assert verify_run(tmp_path / "ours")


@pytest.mark.parametrize(
    ("kind", "step"), [("steps", 8), ("epoch", 7), ("limit and best", 13), ("bf16", 7)]
)
def test_a_resumed_run_is_bitwise_equal(tmp_path, kind, step):
    options = OPTIONS[kind]
    whole, expected = train(Trainer, tmp_path / "whole", **options)
    interrupt(SlimTrainer, tmp_path / "run", step, **options)
    resumed, recorder = train(SlimTrainer, tmp_path / "run", resume=True, **options)
    assert recorder.losses == {
        step: expected.losses[step] for step in expected.losses if step >= min(recorder.losses)
    }
    assert len(recorder.losses) < 14
    assert_equal_weights(weights(resumed), weights(whole))
    assert names(tmp_path / "run") == names(tmp_path / "whole")
    last = names(tmp_path / "run")[-1]
    assert read_state(tmp_path / "run" / last) == read_state(tmp_path / "whole" / last)


def test_a_resume_by_the_native_trainer_is_refused(tmp_path):
    interrupt(SlimTrainer, tmp_path, 7)
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        train(Trainer, tmp_path, resume=True)


def test_a_checkpoint_contains_no_weights_for_other_loaders_and_no_pickle(tmp_path):
    interrupt(SlimTrainer, tmp_path, 4)
    files = {path.name for path in (tmp_path / "checkpoint-3").rglob("*")}
    assert files == {
        "checkpoint.json",
        "config.json",
        "generation_config.json",
        "state.safetensors",
        "trainer_state.json",
        "training_args.json",
    }
    args = json.loads((tmp_path / "checkpoint-3" / "training_args.json").read_text())
    assert args["save_steps"] == 3


def test_the_checkpoint_that_was_asked_for_is_resumed(tmp_path):
    whole, _ = train(Trainer, tmp_path / "whole")
    interrupt(SlimTrainer, tmp_path / "a", 4)
    interrupt(SlimTrainer, tmp_path / "b", 7, learning_rate=0.1)
    resumed, recorder = train(
        SlimTrainer, tmp_path / "b", resume=str(tmp_path / "a" / "checkpoint-3")
    )
    assert min(recorder.losses) == 4
    assert_equal_weights(weights(resumed), weights(whole))


def test_every_checkpoint_has_the_metrics_of_its_own_step(tmp_path):
    trainer, _ = train(SlimTrainer, tmp_path, metric_for_best_model="loss", **EVAL)
    logged = {
        entry["step"]: entry["eval_loss"]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    }
    found = {
        p.manifest.step: p.manifest.metrics.get("eval_loss") for p in list_checkpoints(tmp_path)
    }
    assert found == {step: logged.get(step) for step in found}
    assert len(set(found.values())) > 2
    best = min(logged, key=logged.get)
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")


def test_the_best_model_is_the_one_that_was_evaluated(tmp_path):
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss", **EVAL}
    options |= {"greater_is_better": True}  # an early checkpoint is best
    trainer, _ = train(SlimTrainer, tmp_path, **options)
    best = load_checkpoint(trainer.state.best_model_checkpoint)
    assert best["step"] < 12
    assert_equal_weights(weights(trainer), best["model"])
    assert trainer.evaluate()["eval_loss"] == best["metrics"]["eval_loss"]


@pytest.mark.parametrize("make_model", [make_llama, Plain])
def test_a_native_checkpoint_is_resumed(tmp_path, make_model):
    whole, expected = train(Trainer, tmp_path / "whole", make_model=make_model)
    interrupt(Trainer, tmp_path / "run", 7, make_model=make_model)
    resumed, recorder = train(SlimTrainer, tmp_path / "run", resume=True, make_model=make_model)
    assert recorder.losses == {step: expected.losses[step] for step in range(7, 15)}
    assert_equal_weights(weights(resumed), weights(whole))
    assert names(tmp_path / "run") == names(tmp_path / "whole")


def test_a_plain_module_is_resumed(tmp_path):
    whole, expected = train(Trainer, tmp_path / "whole", make_model=Plain)
    interrupt(SlimTrainer, tmp_path / "run", 8, make_model=Plain)
    resumed, recorder = train(SlimTrainer, tmp_path / "run", resume=True, make_model=Plain)
    assert recorder.losses == {step: expected.losses[step] for step in range(7, 15)}
    assert_equal_weights(weights(resumed), weights(whole))


class Growing(Plain):
    """A model with a buffer that grows while it is trained."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.empty(0))

    def forward(self, input_ids, labels=None):
        self.seen = torch.cat([self.seen, input_ids[:, 0].float()])
        return super().forward(input_ids, labels)

    def load_state_dict(self, state_dict, strict=True, assign=False):
        self.seen = torch.zeros_like(state_dict["seen"])
        return super().load_state_dict(state_dict, strict, assign)


def test_a_model_may_load_its_state_in_its_own_way(tmp_path):
    whole, _ = train(Trainer, tmp_path / "whole", make_model=Growing)
    interrupt(SlimTrainer, tmp_path / "run", 8, make_model=Growing)
    resumed, _ = train(SlimTrainer, tmp_path / "run", resume=True, make_model=Growing)
    assert len(whole.model.seen) == 4 * 14
    assert_equal_weights(weights(resumed), weights(whole))


def test_early_stopping_continues_to_count(tmp_path):
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss", **EVAL}
    options |= {"greater_is_better": True, "restore_callback_states_from_checkpoint": True}

    def run(cls, folder, *callbacks, **more):
        return build(cls, folder, EarlyStoppingCallback(3), *callbacks, **options, **more)[0]

    native = run(Trainer, tmp_path / "native")
    native.train()
    first = run(SlimTrainer, tmp_path / "ours", StopAt(7))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second = run(SlimTrainer, tmp_path / "ours")
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == native.state.global_step == 12
    assert second.state.stateful_callbacks == native.state.stateful_callbacks


@pytest.mark.parametrize(
    "settings", [{"base": "chain"}, pytest.param({"async_": True}, marks=pytest.mark.long)]
)
def test_training_again_sets_the_later_checkpoints_aside(tmp_path, settings):
    options = {"settings": CheckpointSettings(**settings)}
    train(SlimTrainer, tmp_path, **options)
    before = {p.name: load_checkpoint(p.path) for p in list_checkpoints(tmp_path)}
    resumed, _ = train(SlimTrainer, tmp_path, resume=str(tmp_path / "checkpoint-6"), **options)
    assert names(tmp_path) == ["checkpoint-12", "checkpoint-14"] + [
        f"checkpoint-{step}" for step in (3, 6, 9)
    ]
    aside = tmp_path / "earlier-run-1"
    assert {"checkpoint-9", "checkpoint-12", "checkpoint-14"} <= set(names(aside))
    for name in names(aside):
        assert_equal_weights(load_checkpoint(aside / name)["model"], before[name]["model"])
    assert_equal_weights(weights(resumed), before["checkpoint-14"]["model"])
    train(SlimTrainer, tmp_path, **options)
    assert set(names(tmp_path / "earlier-run-2")) == set(before)
    assert verify_run(tmp_path)
    assert verify_run(aside)


def test_training_over_native_checkpoints_sets_them_aside(tmp_path):
    train(Trainer, tmp_path)
    train(SlimTrainer, tmp_path, save_steps=6)
    assert names(tmp_path) == ["checkpoint-12", "checkpoint-14", "checkpoint-6"]
    assert len(names(tmp_path / "earlier-run-1")) == 5
    assert (tmp_path / "earlier-run-1" / "checkpoint-3" / "model.safetensors").is_file()


def test_an_interrupted_run_without_a_save_leaves_the_old_one_resumable(tmp_path):
    train(SlimTrainer, tmp_path)
    interrupt(SlimTrainer, tmp_path, 2)
    assert len(names(tmp_path)) == 5


@pytest.mark.parametrize("base", [pytest.param("auto", marks=pytest.mark.long), "chain"])
def test_rotation_never_removes_the_base_of_a_kept_difference(tmp_path, base):
    settings = CheckpointSettings(base=base, keyframe_every=3)
    trainer, _ = train(
        SlimTrainer,
        tmp_path,
        settings=settings,
        save_steps=1,
        save_total_limit=2,
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=1,
        greater_is_better=True,
        metric_for_best_model="loss",
    )
    assert verify_run(tmp_path)
    found = list_checkpoints(tmp_path)
    assert found[-1].manifest.step == 14
    assert any(point.manifest.base for point in found)
    assert len(found) <= 2 + 2 * settings.keyframe_every
    assert trainer.state.best_model_checkpoint in {str(point.path) for point in found}


def test_the_last_limit_of_one_keeps_a_best_difference_of_an_earlier_run(tmp_path):
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss", **EVAL}
    options |= {"greater_is_better": True}
    options |= {"make_model": make_tied}
    interrupt(SlimTrainer, tmp_path, 10, settings=CheckpointSettings(base="chain"), **options)
    best = list_checkpoints(tmp_path)[1]
    assert best.manifest.base is not None
    state = tmp_path / "checkpoint-9" / "trainer_state.json"
    changed = {"best_metric": 100, "best_global_step": 6, "best_model_checkpoint": str(best.path)}
    state.write_text(json.dumps(json.loads(state.read_text()) | changed))
    trainer, _ = train(SlimTrainer, tmp_path, resume=True, save_total_limit=1, **options)
    assert names(tmp_path) == [best.name]
    assert trainer.state.best_model_checkpoint == str(best.path)
    assert verify_run(tmp_path)
    assert_equal_weights(weights(trainer), load_checkpoint(best.path)["model"])
    loaded, info = AutoModelForCausalLM.from_pretrained(best.path, output_loading_info=True)
    assert not any(info.values())
    assert_equal_weights(weights(trainer), loaded.state_dict())


def test_the_last_limit_of_one_leaves_other_runs_alone(tmp_path):
    options = {"load_best_model_at_end": True, "metric_for_best_model": "loss", **EVAL}
    train(SlimTrainer, tmp_path / "a", settings=CheckpointSettings(base="chain"), **options)
    state = tmp_path / "a" / "checkpoint-9" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"best_metric": 0}))
    best = str(tmp_path / "a" / "checkpoint-9")
    other, _ = train(SlimTrainer, tmp_path / "b", resume=best, save_total_limit=1, **options)
    assert other.state.best_model_checkpoint == best
    assert verify_run(tmp_path / "a")


def test_the_best_checkpoint_is_never_one_of_an_earlier_run(tmp_path):
    options = {"metric_for_best_model": "loss", "greater_is_better": True, "save_total_limit": 1}
    train(SlimTrainer, tmp_path, save_steps=2)
    trainer, _ = train(
        SlimTrainer, tmp_path, save_steps=4, eval_strategy="steps", eval_steps=2, **options
    )
    assert trainer.state.best_global_step == 2  # evaluated, but not saved
    assert trainer.state.best_model_checkpoint is None
    assert names(tmp_path) == ["checkpoint-14"]


def test_a_checkpoint_that_was_written_again_is_read_again(tmp_path):
    path = str(tmp_path / "checkpoint-3")
    trainer, _ = build(SlimTrainer, tmp_path)
    for rate in (1e-4, 1e-2):
        saved, _ = train(SlimTrainer, tmp_path, max_steps=3, learning_rate=rate)
        trainer._load_from_checkpoint(path)
        assert_equal_weights(weights(trainer), weights(saved))


def test_a_save_after_training_leaves_the_other_checkpoints(tmp_path):
    trainer, _ = train(SlimTrainer, tmp_path, max_steps=6)
    trainer._save_checkpoint(trainer.model, None)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-6"]
    assert verify_run(tmp_path)


class Notes(TrainerCallback):
    """Write a file into the folder of each checkpoint, before or after it is saved."""

    def __init__(self, when):
        self.when, self.written = when, set()

    def write(self, args, state):
        if state.global_step not in self.written:
            self.written.add(state.global_step)
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}", "notes")
            folder.mkdir(parents=True)
            (folder / "text").write_text(str(state.global_step))

    def on_evaluate(self, args, state, control, **parts):
        if self.when == "before":
            self.write(args, state)

    def on_save(self, args, state, control, **parts):
        if self.when == "after":
            self.write(args, state)

    def on_epoch_end(self, args, state, control, **parts):
        control.should_evaluate = control.should_save = True  # once more, with other metrics


@pytest.mark.parametrize(
    ("when", "is_async"),
    [
        ("before", False),
        ("after", True),
        pytest.param("after", False, marks=pytest.mark.long),
        pytest.param("before", True, marks=pytest.mark.long),
    ],
)
def test_files_of_callbacks_stay_in_the_checkpoint(tmp_path, when, is_async):
    settings = CheckpointSettings(async_=is_async)
    trainer, _ = train(
        SlimTrainer,
        tmp_path,
        Notes(when),
        settings=settings,
        max_steps=6,
        load_best_model_at_end=True,
        **EVAL,
    )
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-6"]
    for step in (3, 6):
        text = tmp_path / f"checkpoint-{step}" / "notes" / "text"
        assert text.read_text() == str(step)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")
    assert verify_run(tmp_path)
    train(SlimTrainer, tmp_path, resume=True, max_steps=7)


def test_each_checkpoint_is_complete_by_default(tmp_path):
    trainer, _ = train(SlimTrainer, tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "checkpoint-14", tmp_path / "elsewhere" / "checkpoint-14")
    shutil.rmtree(tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "elsewhere" / "checkpoint-14")
    assert_equal_weights(model.state_dict(), weights(trainer))


def make_tied():
    """A model with tied weights, and with two frozen layers of the same bits."""
    model = make_llama(tie_word_embeddings=True)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)  # equal in all deltas
    with torch.no_grad():
        copied = model.model.layers[1].mlp.up_proj.weight
        copied.copy_(model.model.layers[0].mlp.up_proj.weight).requires_grad_(False)
    return model


def test_from_pretrained_loads_checkpoints(tmp_path):
    deltas = CheckpointSettings(base="auto")
    trainer, _ = train(SlimTrainer, tmp_path, make_model=make_tied, settings=deltas)
    delta = next(point for point in list_checkpoints(tmp_path) if point.manifest.base)
    for path in (delta.path, tmp_path / "checkpoint-14"):
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not any(info.values())
        assert_equal_weights(model.state_dict(), load_checkpoint(path)["model"])
    assert_equal_weights(model.state_dict(), weights(trainer))
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-14", dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "plain")
    shutil.rmtree(tmp_path / "checkpoint-14")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert_equal_weights(again.state_dict(), weights(trainer))
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def make_renamed(kind):
    """A model whose modules have other names than its files."""
    if kind == "bert":
        config = BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
        )
        return BertForMaskedLM(config)
    config = CONFIG_MAPPING["mixtral"](
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["bert", "mixtral"])
def test_a_model_from_a_checkpoint_is_saved_under_the_names_of_its_files(tmp_path, kind):
    trainer, _ = train(
        SlimTrainer, tmp_path / "run", make_model=lambda: make_renamed(kind), max_steps=1
    )
    loaded = type(trainer.model).from_pretrained(tmp_path / "run" / "checkpoint-1")
    assert_equal_weights(loaded.state_dict(), weights(trainer))
    saved = {}
    for name, model in (("loaded", loaded), ("trained", trainer.model)):
        model.save_pretrained(tmp_path / name)
        saved[name] = load_file(tmp_path / name / "model.safetensors")
    assert_equal_weights(saved["loaded"], saved["trained"])


def test_a_native_checkpoint_whose_weights_the_trainer_misses_is_refused(tmp_path):
    for kind in ("bert", "mixtral"):
        options = {"make_model": lambda kind=kind: make_renamed(kind), "max_steps": 5}
        interrupt(Trainer, tmp_path / kind, 4, **options)
    train(SlimTrainer, tmp_path / "bert", resume=True, make_model=lambda: make_renamed("bert"))
    with pytest.raises(MismatchError, match=r"did not find 3 weights .*mlp\.gate\.weight"):
        train(SlimTrainer, tmp_path / "mixtral", resume=True, **options)


def test_a_model_that_is_not_in_the_checkpoint_is_refused(tmp_path):
    interrupt(SlimTrainer, tmp_path, 4)
    with pytest.raises(MismatchError, match="mlp"):
        train(SlimTrainer, tmp_path, resume=True, make_model=Plain)


def test_the_tokenizer_is_saved_with_each_checkpoint(tmp_path, tokenizer):
    trainer, _ = build(SlimTrainer, tmp_path / "run", max_steps=3)
    trainer.processing_class = tokenizer
    trainer.train()
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "run" / "checkpoint-3")
    assert again("a b").input_ids == tokenizer("a b").input_ids


@pytest.fixture
def tokenizer(tmp_path):
    vocabulary = {"[UNK]": 0, "a": 1, "b": 2}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    file = tmp_path / "tokenizer.json"
    file.write_text(
        json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}})
    )
    return PreTrainedTokenizerFast(tokenizer_file=str(file))


def with_scaler(cls):
    """A Trainer with a gradient scaler, which needs a GPU otherwise."""

    class Scaled(cls):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64, growth_interval=2)

    return Scaled


def test_the_gradient_scaler_is_restored(tmp_path):
    whole, expected = train(with_scaler(Trainer), tmp_path / "whole")
    interrupt(with_scaler(SlimTrainer), tmp_path / "run", 8)
    resumed, recorder = train(with_scaler(SlimTrainer), tmp_path / "run", resume=True)
    assert whole.accelerator.scaler.get_scale() == 64 * 2**7
    assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    assert recorder.losses == {step: expected.losses[step] for step in range(7, 15)}


@pytest.mark.interop
def test_two_processes_are_resumed_with_their_own_random_states(tmp_path):
    done = torchrun(2, tmp_path, script=DDP, PYTHONPATH=PATH)
    assert done.returncode == 0, done.stderr[-2000:]
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    whole, interrupted, resumed = (results[name] for name in ("whole", "interrupted", "resumed"))
    assert interrupted["names"] == ["checkpoint-3", "checkpoint-6"]
    assert resumed["losses"] == {step: whole["losses"][step] for step in range(7, 10)}
    assert_equal_weights(resumed["model"], whole["model"])
    assert resumed["names"] == whole["names"]


def test_transformers_alone_does_not_load_a_checkpoint(tmp_path):
    interrupt(SlimTrainer, tmp_path, 4)
    done = subprocess.run(
        [sys.executable, LOAD_WITHOUT_IMPORT, tmp_path / "checkpoint-3"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["refused: OSError"]


def test_it_combines_with_other_trainers(tmp_path):
    class Combined(SlimTrainer, Seq2SeqTrainer):
        pass

    class Reversed(Seq2SeqTrainer, SlimTrainer):
        pass

    for cls in (Combined, Reversed):
        args = Seq2SeqTrainingArguments(
            tmp_path / cls.__name__,
            max_steps=2,
            save_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = cls(make_llama(), args, train_dataset=Lines())
        trainer.train()
        assert verify_run(tmp_path / cls.__name__).checkpoints == 2


class Annotated(Trainer):
    """A Trainer that writes files of its own, as Trainers of other packages do."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        Path(output_dir, "head.txt").write_text(Path(output_dir).name)

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        Path(output_dir, "card.md").write_text("# model")

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        Path(self.args.output_dir, f"checkpoint-{self.state.global_step}", "more.txt").touch()


def test_files_of_a_subclass_are_in_the_checkpoint(tmp_path):
    class Combined(Annotated, SlimTrainer):
        pass

    train(Annotated, tmp_path / "native", max_steps=3)
    trainer, _ = train(Combined, tmp_path / "ours", max_steps=3)
    added = {}
    for name in ("native", "ours"):
        folder = tmp_path / name / "checkpoint-3"
        added[name] = {path.name: path.read_text() for path in folder.glob("*.[tm]*")}
    assert added["ours"] == added["native"]
    assert added["ours"]["head.txt"] == "checkpoint-3"
    assert not (tmp_path / "ours" / "checkpoint-3" / "model.safetensors").exists()
    trainer.save_model(str(tmp_path / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_equal_weights(loaded.state_dict(), weights(trainer))


def test_methods_that_are_not_called_are_refused(tmp_path):
    class Wrong(SlimTrainer, Annotated):
        pass

    class OwnScaler(SlimTrainer):
        def _save_scaler(self, output_dir):
            raise NotImplementedError

    with pytest.raises(ConfigError, match=r"_save: .* class Wrong\(Annotated, SlimTrainer\)"):
        build(Wrong, tmp_path)
    with pytest.raises(ConfigError, match="OwnScaler overrides _save_scaler"):
        build(OwnScaler, tmp_path)


class Terminate(TrainerCallback):
    """Send SIGTERM after a step, and wait until the Trainer has noticed."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **parts):
        if state.global_step == self.step:
            signal.raise_signal(signal.SIGTERM)


def test_a_checkpoint_on_sigterm_is_complete(tmp_path, monkeypatch):
    class Now(threading.Timer):
        def __init__(self, delay, call):
            super().__init__(0, call)

        def start(self):
            self.function()

    monkeypatch.setattr("transformers.trainer_jit_checkpoint.threading.Timer", Now)
    train(SlimTrainer, tmp_path, Terminate(4), enable_jit_checkpoint=True, save_strategy="no")
    assert len(names(tmp_path)) == 1
    assert verify_run(tmp_path)
    assert not list(tmp_path.rglob("*incomplete*"))


def test_training_continues_past_a_damaged_checkpoint(tmp_path):
    interrupt(SlimTrainer, tmp_path, 7)
    state = tmp_path / "checkpoint-6" / "state.safetensors"
    raw = bytearray(state.read_bytes())
    raw[-9] ^= 1
    state.write_bytes(raw)
    older = str(tmp_path / "checkpoint-3")
    with pytest.raises(CorruptFileError, match=f"pass resume_from_checkpoint='{older}'"):
        train(SlimTrainer, tmp_path, resume=True)
    train(SlimTrainer, tmp_path, resume=older)
    assert verify_run(tmp_path)
    assert names(tmp_path / "earlier-run-1")[-1] == "checkpoint-6"


def test_unsupported_options_are_refused_when_the_trainer_is_built(tmp_path):
    with pytest.raises(ConfigError, match="base='auto' cannot be combined with save_total_limit=1"):
        build(SlimTrainer, tmp_path, save_total_limit=1, settings=CheckpointSettings(base="auto"))
    for options, message in [
        ({"base": "last"}, "base must be"),
        ({"keyframe_every": 0}, "keyframe_every"),
        ({"base": "chain", "keyframe_every": 1000}, "at most 200"),
        ({"profile": "history"}, "cannot resume"),
        ({"threads": 0}, "threads must be a positive integer, got 0"),
        ({"extra": {"count": 3}}, "'count' has no state_dict"),
        ({"extra": {"model": torch.nn.Identity()}}, "'model' is a reserved key"),
        ({"extra": {"rng_ranks": torch.nn.Identity()}}, "'rng_ranks' is a reserved key"),
    ]:
        with pytest.raises(ConfigError, match=message):
            CheckpointSettings(**options)
    with pytest.raises(ConfigError, match="use SlimTrainer instead of Trainer"):
        SlimCheckpoints(every=500)


def test_a_difference_that_was_copied_alone_is_refused(tmp_path):
    interrupt(SlimTrainer, tmp_path / "run", 7, settings=CheckpointSettings(base="chain"))
    copy = shutil.copytree(tmp_path / "run" / "checkpoint-6", tmp_path / "copy" / "checkpoint-6")
    with pytest.raises(MismatchError, match=r"a delta of checkpoint-3 .*; copy it there"):
        train(SlimTrainer, tmp_path / "run", resume=str(copy))
    shutil.copytree(tmp_path / "run" / "checkpoint-3", tmp_path / "copy" / "checkpoint-3")
    resumed, _ = train(SlimTrainer, tmp_path / "new", resume=str(copy))
    whole, _ = train(SlimTrainer, tmp_path / "whole")
    assert_equal_weights(weights(resumed), weights(whole))


def test_objects_of_the_user_are_saved_and_restored(tmp_path):
    ours, other = (torch.nn.Linear(3, 3) for _ in range(2))
    interrupt(SlimTrainer, tmp_path, 4, settings=CheckpointSettings(extra={"ema": ours}))
    train(SlimTrainer, tmp_path, resume=True, settings=CheckpointSettings(extra={"ema": other}))
    assert_equal_weights(other.state_dict(), ours.state_dict())
    settings = CheckpointSettings(extra={"other": other})
    with pytest.raises(MismatchError, match="no state of 'other'"):
        train(SlimTrainer, tmp_path, resume=str(tmp_path / "checkpoint-3"), settings=settings)


class OutOfMemory(TrainerCallback):
    """Fail once after a step, as a batch that does not fit the memory of a device."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **parts):
        if state.global_step == self.step:
            self.step = None
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_a_smaller_batch_resumes_from_the_checkpoint_again(tmp_path):
    interrupt(Trainer, tmp_path / "native", 4)
    native, _ = train(
        Trainer, tmp_path / "native", resume=True, per_device_train_batch_size=3, max_steps=8
    )
    interrupt(SlimTrainer, tmp_path / "ours", 4)
    ours, _ = train(
        SlimTrainer,
        tmp_path / "ours",
        OutOfMemory(5),
        resume=True,
        auto_find_batch_size=True,
        max_steps=8,
    )
    assert ours._train_batch_size == 3
    assert_equal_weights(weights(ours), weights(native))
