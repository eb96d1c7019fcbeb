"""Fine-tuning in frameworks, with checkpoints as differences from the pretrained model."""

import pytest
import torch
from frameworks.trainer_runs import Lines
from strategies import same_bits
from tiny_models import MODELS
from transformers import AutoModelForCausalLM, TrainingArguments

import slimtensors
from slimtensors.checkpoint import checkpointing, load_checkpoint, verify_run
from slimtensors.errors import MismatchError, MissingBaseError
from slimtensors.transformers import SlimTrainer
from slimtensors.transformers.trainer import CheckpointSettings

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def read_entries(folder):
    """Return the entries of the weights in a checkpoint."""
    with slimtensors.open(folder / "state.safetensors") as archive:
        table = archive.delta["checkpoint"].items()
        return {name: entry for name, entry in table if name.startswith(("model.", "state_dict."))}


def equal_states(first, second):
    return first.keys() == second.keys() and all(same_bits(first[k], second[k]) for k in first)


@pytest.mark.parametrize("kind", ["mixtral", "llama-tied", "bert"])
def test_weights_that_transformers_renames_or_merges_are_found(tmp_path, kind):
    original = MODELS[kind][0]()
    original.save_pretrained(tmp_path / "base")
    model = type(original).from_pretrained(tmp_path / "base")
    run, base = tmp_path / "run", tmp_path / "base"
    with checkpointing(run, model, every=1, async_=False, pretrained=base) as ckpt:
        saved = ckpt.step()
    assert saved.unmatched == []
    assert {entry["as"] for entry in read_entries(saved.path).values()} == {"same"}
    loaded = load_checkpoint(saved.path)["model"]
    assert equal_states(dict(loaded), dict(model.state_dict()))
    if kind == "mixtral":
        merged = read_entries(saved.path)["model.model.layers.0.mlp.experts.gate_up_proj"]["from"]
        assert len(merged) == 8
        assert merged[1] == "model.layers.0.block_sparse_moe.experts.0.w3.weight"


def make_trainer(folder, pretrained, steps, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    model.requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(True)
    args = TrainingArguments(
        str(folder),
        max_steps=steps,
        save_steps=2,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_total_limit=2,
        lr_scheduler_type="constant",
    )
    settings = CheckpointSettings(pretrained=pretrained, **options)
    return SlimTrainer(model, args, train_dataset=Lines(), checkpoints=settings)


@pytest.mark.parametrize("base", [None, "auto"])
def test_the_trainer_stores_trained_weights_only(tmp_path, base):
    pretrained, run = tmp_path / "base", tmp_path / "run"
    MODELS["llama-tied"][0]().save_pretrained(pretrained)
    make_trainer(run, pretrained, 4, base=base).train()
    resumed = make_trainer(run, pretrained, 6, base=base)
    resumed.train(resume_from_checkpoint=True)
    whole = make_trainer(tmp_path / "other", pretrained, 6, base=base)
    whole.train()
    assert equal_states(resumed.model.state_dict(), whole.model.state_dict())
    entries = read_entries(run / "checkpoint-6")
    kept = {name for name, entry in entries.items() if entry["as"] == "same"}
    assert entries.keys() - kept == {
        f"model.model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")
    }
    again = AutoModelForCausalLM.from_pretrained(run / "checkpoint-6")
    assert equal_states(again.state_dict(), resumed.model.state_dict())
    assert verify_run(run)
    pretrained.rename(tmp_path / "elsewhere")
    assert AutoModelForCausalLM.from_pretrained(run / "checkpoint-6")  # found beside the run
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "elsewhere").rename(tmp_path / "far" / "away" / "x")
    with pytest.raises(MissingBaseError, match="needs the pretrained model base"):
        AutoModelForCausalLM.from_pretrained(run / "checkpoint-6")


def test_the_trainer_refuses_the_weights_of_another_model(tmp_path):
    MODELS["llama-tied"][0]().save_pretrained(tmp_path / "base")
    slimtensors.save({"w": torch.ones(3)}, tmp_path / "other.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    settings = CheckpointSettings(pretrained=tmp_path / "other.safetensors")
    with pytest.raises(MismatchError, match="is not the pretrained model of these weights"):
        SlimTrainer(
            model, TrainingArguments(str(tmp_path / "run"), use_cpu=True), checkpoints=settings
        )


def test_lightning_stores_trained_weights_only(tmp_path):
    pytest.importorskip("lightning")
    from frameworks.lightning_runs import make_model, make_trainer, weights_of
    from lightning.pytorch.callbacks import ModelCheckpoint

    from slimtensors.integrations.lightning import SlimCheckpointIO, load_from_checkpoint

    model = make_model()
    weights = {name: x.clone() for name, x in model.net.state_dict().items()}
    slimtensors.save(weights, tmp_path / "base.safetensors")
    model.net[0].requires_grad_(False)
    plugin = SlimCheckpointIO(pretrained=tmp_path / "base.safetensors")
    callbacks = [ModelCheckpoint(tmp_path / "run", save_last=True)]
    trainer = make_trainer(tmp_path, plugin=plugin, epochs=2, callbacks=callbacks)
    trainer.fit(model)
    entries = read_entries(tmp_path / "run" / "last.ckpt")
    kinds = {name: entry["as"] for name, entry in entries.items()}
    assert {name for name, kind in kinds.items() if kind == "same"} == {
        "state_dict.net.0.weight",
        "state_dict.net.0.bias",
    }
    again = load_from_checkpoint(type(model), tmp_path / "run" / "last.ckpt")
    assert equal_states(weights_of(again), weights_of(model))


def test_peft_models_are_stored_as_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    MODELS["llama-tied"][0]().save_pretrained(tmp_path / "base")

    def make():
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model = peft.get_peft_model(model, config)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(trained, lr=1e-2)

    def train(steps):
        model, optimizer = make()
        with checkpointing(
            tmp_path / "run", model, optimizer, every=2, pretrained=tmp_path / "base"
        ) as ckpt:
            for _ in range(ckpt.start, steps):
                ids = torch.randint(0, 96, (2, 8))
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step()
        return model

    train(4)
    entries = read_entries(tmp_path / "run" / "step-00000002")
    stored = {name for name, entry in entries.items() if entry["as"] != "same"}
    assert stored
    assert all(".lora_" in name for name in stored)
    resumed = train(6)
    (tmp_path / "run").rename(tmp_path / "first")
    assert equal_states(resumed.state_dict(), train(6).state_dict())
