"""Training by a recipe: masks, teachers, stages, resuming, and the written files."""

import json
from copy import deepcopy
from pathlib import Path

import jsonschema
import pytest
import torch
from strategies import same_bits
from tiny_models import bert, llama, same_weights
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, TrainingArguments

import slimtensors
from slimtensors.checkpoint import points
from slimtensors.errors import ConfigError, MismatchError
from slimtensors.folder.compress import compress_folder
from slimtensors.recipe import (
    GPTQ,
    ConstantPruning,
    Distillation,
    GradualMagnitudePruning,
    MagnitudePruning,
    MovementPruning,
    Quantize,
    Recipe,
    SparseGPT,
    Stage,
)
from slimtensors.recipe.training import divergence
from slimtensors.transformers.auto import SparseAutoModelForCausalLM
from slimtensors.transformers.data import Examples, calibration_batches
from slimtensors.transformers.train import train
from slimtensors.transformers.training_stage import DistillationTrainer

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "recipe-report.json"
MLP = ["re:.*mlp"]
ATTENTION = ["re:.*self_attn"]


@pytest.fixture(autouse=True)
def one_thread():
    """Run on one thread: these models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Lines(Dataset):
    """A few lines of random tokens."""

    def __init__(self, count=16):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        ids = torch.randint(0, 96, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


class KilledError(Exception):
    """Stand-in for a killed process."""


class KilledLines(Lines):
    """Lines that end training after so many were read."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def __getitem__(self, i):
        self.reads -= 1
        if self.reads < 0:
            raise KilledError
        return super().__getitem__(i)


def options(steps=6, **more):
    return {
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        **more,
    }


def zeros(model, word):
    weights = [p for name, p in model.named_parameters() if word in name and p.dim() == 2]
    return sum(int((p == 0).sum()) for p in weights) / sum(p.numel() for p in weights)


def test_a_model_is_trained_pruned_and_written(tmp_path):
    recipe = [
        MovementPruning(0.9, targets=MLP, end=1.0),
        ConstantPruning(ATTENTION),
        Distillation(),
    ]
    model, report = train(
        llama(), recipe, Lines(), output_dir=tmp_path, training_args=options(), eval_dataset=Lines()
    )
    assert zeros(model, "mlp") == pytest.approx(0.9, abs=1e-3)
    assert zeros(model, "self_attn") == pytest.approx(0.5, abs=1e-3)
    assert zeros(model, "lm_head") < 0.5  # no modifier keeps these zeros
    assert model.config.use_cache
    assert not model.training
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same_weights(found, model)
    assert {t.codec for t in slimtensors.inspect(tmp_path).tensors} == {"bitmask", "plain"}
    assert Recipe.load(tmp_path / "recipe.yaml") == Recipe.of(recipe)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data == json.loads(json.dumps(report.to_json()))
    jsonschema.validate(data, json.loads(SCHEMA.read_text()), jsonschema.Draft202012Validator)
    assert data["stages"][0]["steps"] == 6
    assert data["stages"][0]["evaluation"]["eval_loss"] > 0
    by_name = {layer.name: layer for layer in report.layers}
    assert by_name["model.layers.0.mlp.up_proj"].sparsity == pytest.approx(0.9, abs=1e-3)
    assert by_name["model.layers.0.mlp.up_proj"].bits < 6
    assert "lm_head" not in by_name
    assert [step.modifier for step in report.steps] == ["MovementPruning", "ConstantPruning"]
    assert "mlp.up_proj" in report.format_layers()


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_accumulation_steps": 2, "optim": "sgd", "optim_args": "momentum=0.9"},
        {"bf16": True, "weight_decay": 0.1},
        {"optim": "adafactor", "lr_scheduler_type": "cosine"},
    ],
    ids=["accumulated", "bf16", "adafactor"],
)
def test_masks_are_kept_with_all_training_arguments(tmp_path, more):
    before = llama()
    masks = {n: p == 0 for n, p in before.named_parameters() if "proj" in n}
    model, _ = train(
        deepcopy(before),
        ConstantPruning(),
        Lines(),
        output_dir=tmp_path,
        training_args=TrainingArguments(output_dir="unused", **options(3, **more)),
    )
    after = dict(model.named_parameters())
    for name, mask in masks.items():
        assert same_bits(after[name].detach()[mask], torch.zeros(int(mask.sum())))
        assert int((after[name] == 0).sum()) == int(mask.sum())
    assert not same_weights(model, before)


def test_bf16_needs_no_device_option(tmp_path):
    chosen = {name: x for name, x in options(1, bf16=True).items() if name != "use_cpu"}
    train(llama(), ConstantPruning(), Lines(), output_dir=tmp_path, training_args=chosen)


def test_the_second_stage_keeps_the_masks_of_the_first(tmp_path):
    recipe = """
    sparsity_stage:
      run_type: train
      pruning_modifiers:
        GradualMagnitudePruning:
          final_sparsity: 0.75
          mask_structure: "1:4"
          targets: ["re:.*mlp"]
    finetuning_stage:
      finetuning_modifiers:
        MovementPruning: {final_sparsity: 0.8, targets: ["re:.*self_attn"], apply_globally: true}
        DistillationModifier: {hardness: 1.0}
    """
    model, report = train(llama(), recipe, Lines(), output_dir=tmp_path, training_args=options(4))
    assert [stage.name for stage in report.stages] == ["sparsity", "finetuning"]
    structures = {layer.name: layer.structure for layer in report.layers}
    assert structures["model.layers.1.mlp.down_proj"] == "1:4"
    assert zeros(model, "mlp") == 0.75
    assert zeros(model, "self_attn") == pytest.approx(0.8, abs=1e-4)


@pytest.mark.parametrize("structure", ["unstructured", "2:4"])
@pytest.mark.parametrize("way", ["one stage", "three stages"])
def test_masks_are_kept_when_quantizing(tmp_path, structure, way):
    modifiers = [
        SparseGPT(0.5, mask_structure=structure),
        Distillation(),
        GPTQ("W4A16", ignore=["lm_head"]),
    ]
    stages = (
        modifiers if way == "one stage" else [Stage((m,), f"s{i}") for i, m in enumerate(modifiers)]
    )
    model, report = train(
        llama(hidden_size=128, intermediate_size=256),
        stages,
        Lines(),
        output_dir=tmp_path,
        training_args=options(2, save_strategy="epoch"),
    )
    assert len(list(tmp_path.glob("checkpoints/*/recipe.yaml"))) == 1
    assert [step.modifier for step in report.steps] == ["SparseGPT", "GPTQ"]
    assert {layer.structure for layer in report.layers} == {structure}
    assert report.sparsity >= 0.5
    found = SparseAutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in found.named_parameters():
        if "proj" in name:
            assert torch.equal(weight, model.get_parameter(name)), name
            if structure == "2:4":
                assert ((weight.view(-1, 4) != 0).sum(1) <= 2).all()
    assert len(report.stages) == 1


CUT = [
    MovementPruning(0.9, targets=MLP, end=7.0, start=0.5, update_frequency=0.5),
    GradualMagnitudePruning(0.7, targets=ATTENTION, init_sparsity=0.2, end=6.0),
    Distillation(hardness=0.3),
]


def test_a_resumed_run_is_bitwise_equal(tmp_path):
    start = llama(attention_dropout=0.2)
    args = options(40, save_strategy="steps", save_steps=20, lr_scheduler_type="cosine")
    whole, _ = train(
        deepcopy(start), CUT, Lines(), output_dir=tmp_path / "whole", training_args=args
    )
    home = tmp_path / "run"
    with pytest.raises(KilledError):
        train(deepcopy(start), CUT, KilledLines(4 * 26), output_dir=home, training_args=args)
    assert [p.name for p in points(home / "checkpoints" / "default")] == ["checkpoint-20"]
    resumed, report = train(
        deepcopy(start),
        CUT,
        Lines(),
        output_dir=home,
        training_args=args,
        resume_from_checkpoint=True,
    )
    assert report.stages[0].resumed_from == 20
    assert same_weights(resumed, whole)
    assert report.sparsity == pytest.approx(0.83, abs=0.02)

    # From the end, there is nothing left to train.
    again, report = train(
        deepcopy(start),
        CUT,
        Lines(),
        output_dir=home,
        training_args=args,
        resume_from_checkpoint=home / "checkpoints" / "default" / "checkpoint-40",
    )
    assert report.stages[0].loss is None
    assert same_weights(again, whole)

    with pytest.raises(
        MismatchError, match=r"was trained by another recipe; resume with .*recipe\.yaml"
    ):
        train(
            start,
            ConstantPruning(),
            Lines(),
            output_dir=home,
            training_args=args,
            resume_from_checkpoint=True,
        )
    with pytest.raises(ConfigError, match="is not a checkpoint of a stage"):
        train(start, CUT, Lines(), output_dir=home, resume_from_checkpoint=tmp_path / "elsewhere")


def test_a_run_resumes_in_its_second_stage(tmp_path):
    stages = Recipe(
        (
            Stage((GradualMagnitudePruning(0.75, targets=MLP),), "first"),
            Stage((GradualMagnitudePruning(0.6, targets=ATTENTION),), "second"),
        )
    )
    args = options(4, save_strategy="steps", save_steps=2)
    whole, _ = train(llama(), stages, Lines(), output_dir=tmp_path / "whole", training_args=args)
    lines = KilledLines(1 + 4 * 7)  # the first is looked at
    with pytest.raises(KilledError):
        train(llama(), stages, lines, output_dir=tmp_path / "run", training_args=args)
    resumed, report = train(
        llama(),
        stages,
        Lines(),
        output_dir=tmp_path / "run",
        training_args=args,
        resume_from_checkpoint=True,
    )
    assert [stage.name for stage in report.stages] == ["second"]
    assert {layer.sparsity for layer in report.layers if "mlp" in layer.name} == {0.75}
    assert same_weights(resumed, whole)
    assert zeros(resumed, "mlp") == 0.75


def test_compressed_folders_are_decompressed_and_texts_tokenized(tmp_path, tokenizer):
    llama().save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    compress_folder(tmp_path / "dense", tmp_path / "small", preset="sparse")
    text = tmp_path / "text.txt"
    text.write_text("b c d e f g\n\nh i\nc d e\nk l m n\n")
    model, report = train(
        tmp_path / "small",
        ConstantPruning(),
        text,
        output_dir=tmp_path / "out",
        training_args=options(2),
    )
    assert report.sparsity == pytest.approx(0.5, abs=0.001)
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    train(
        tmp_path / "out",
        ConstantPruning(),
        ["b c d", "e f g h"],
        output_dir=tmp_path / "dense again",
        save_compressed=False,
        training_args=options(1),
    )
    assert {t.codec for t in slimtensors.inspect(tmp_path / "dense again").tensors} == {"plain"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "dense again")


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *"bcdefghijklmn"])}
    inner = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    )


@pytest.mark.parametrize("kind", ["jsonl", "csv", "rows"])
def test_labelled_texts_are_read_from_files_and_tables(tmp_path, tokenizer, kind):
    rows = [{"text": "b c d e", "label": 0}, {"text": "f", "label": 2}, {"text": "g", "label": 1}]
    dataset = rows if kind == "rows" else tmp_path / f"data.{kind}"
    lines = [json.dumps(row) for row in rows]
    if kind == "csv":
        lines = ["text,label", *(f"{row['text']},LABEL_{row['label']}" for row in rows)]
    (tmp_path / f"data.{kind}").write_text("\n".join(lines) + "\n")
    _, report = train(
        bert(),
        GradualMagnitudePruning(0.8, targets=["re:bert.encoder"]),
        dataset,
        output_dir=tmp_path / "out",
        training_args=options(3),
        tokenizer=tokenizer,
    )
    assert report.sparsity == pytest.approx(0.8, abs=1e-3)


def test_a_dataloader_is_used_as_it_is(tmp_path):
    seen = []

    def collate(rows):
        seen.append(rows)
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}

    loader = DataLoader(Lines(6), batch_size=3, collate_fn=collate)
    train(llama(), ConstantPruning(), loader, output_dir=tmp_path, training_args=options(2))
    assert [len(rows) for rows in seen[:2]] == [3, 3]
    first = torch.stack([row["input_ids"] for row in seen[0]])
    assert torch.equal(first, torch.stack([Lines()[i]["input_ids"] for i in range(3)]))
    odd = DataLoader(Lines(6), batch_size=3, drop_last=True)
    with pytest.raises(ConfigError, match="drop_last"):
        train(llama(), ConstantPruning(), odd, output_dir=tmp_path / "odd")


@pytest.mark.parametrize("steps", [1, 2])
def test_the_teachers_outputs_are_mixed_into_the_loss(tmp_path, steps):
    model, teacher = llama(), llama(layers=1)
    trainer = DistillationTrainer(
        model,
        TrainingArguments(str(tmp_path), **options(gradient_accumulation_steps=steps)),
        train_dataset=Lines(),
        teacher=teacher,
        distillation=Distillation(hardness=0.25, temperature=3.0),
    )
    row = {key: x[None] for key, x in Lines()[0].items()}
    output, target = model(**row), teacher(**row)
    expected = 0.75 * output.loss + 0.25 * divergence(output.logits, target.logits, temperature=3)
    model.train()
    torch.testing.assert_close(trainer.compute_loss(model, dict(row)), expected)
    assert trainer.loss_is_scaled_for_ga is False
    model.eval()
    torch.testing.assert_close(trainer.compute_loss(model, dict(row)), output.loss)
    assert not any(p.requires_grad for p in teacher.parameters())


@pytest.mark.parametrize(
    ("recipe", "dataset", "more", "message"),
    [
        (ConstantPruning(["re:nothing"]), Lines(), {}, "re:nothing"),
        (ConstantPruning(), [], {}, "the dataset is empty"),
        (ConstantPruning(), Lines(), {"lerning_rate": 1}, "did you mean 'learning_rate'"),
        (ConstantPruning(), Lines(), {"save_strategy": "best"}, "no, steps or epoch"),
        (ConstantPruning(), Lines(), {"load_best_model_at_end": True}, "load_best_model_at_end"),
        (MovementPruning(end=99), Lines(), {}, "ends after 99 epochs, but training lasts 1.5"),
        (MovementPruning(mask_structure="2:4", apply_globally=True), Lines(), {}, "globally"),
        ([MovementPruning(), ConstantPruning()], Lines(), {}, "pruned by both MovementPruning and"),
        (ConstantPruning(), ["text"], {}, "texts need a tokenizer"),
        (ConstantPruning(), "no.txt", {}, "no.txt: file not found"),
        ([Quantize("W8A16"), GPTQ("W4A16")], Lines(), {}, "a model can be quantized only once"),
        (Stage((MagnitudePruning(),), run_type="oneshot"), Lines(), {}, "use oneshot"),
        (Stage((MovementPruning(),), run_type="oneshot"), Lines(), {}, "has run_type oneshot"),
        (
            [Stage((Quantize("W8A16"),), "q"), Stage((ConstantPruning(),), "t")],
            Lines(),
            {},
            "stage t follows stage q, which quantizes",
        ),
    ],
)
def test_invalid_arguments_are_refused(tmp_path, recipe, dataset, more, message):
    with pytest.raises(ConfigError, match=message):
        train(llama(), recipe, dataset, output_dir=tmp_path, training_args=options(**more))


def test_resuming_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoint to resume from"):
        train(llama(), CUT, Lines(), output_dir=tmp_path, resume_from_checkpoint=True)


def test_an_old_run_is_not_overwritten(tmp_path):
    args = options(2, save_strategy="epoch", num_train_epochs=1, max_steps=-1)
    train(llama(), ConstantPruning(), Lines(8), output_dir=tmp_path, training_args=args)
    assert [p.name for p in points(tmp_path / "checkpoints" / "default")] == ["checkpoint-2"]
    with pytest.raises(ConfigError, match="already contains checkpoint-2; resume, or choose"):
        train(llama(), ConstantPruning(), Lines(8), output_dir=tmp_path, training_args=args)


def test_plain_modules_are_trained_too(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words, self.out = torch.nn.Embedding(96, 8), torch.nn.Linear(8, 96)

        def forward(self, input_ids, labels):
            logits = self.out(self.words(input_ids))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return {"loss": loss, "logits": logits}

    recipe = [GradualMagnitudePruning(0.75), Distillation()]
    model, _ = train(Net(), recipe, Lines(), output_dir=tmp_path, training_args=options())
    again = slimtensors.load(tmp_path / "model.safetensors")
    assert same_bits(again["out.weight"], model.out.weight.detach())
    assert int((again["out.weight"] == 0).sum()) == 96 * 8 * 0.75


class Reviews(Lines):
    """Rows of a table: a text, a number, and a label for a classifier."""

    def __getitem__(self, i):
        ids = super().__getitem__(i)["input_ids"]
        return {"input_ids": ids, "text": f"row {i}", "idx": i, "label": i % 3}


def test_columns_that_the_model_does_not_accept_are_ignored(tmp_path):
    args = {"max_steps": 1, "save_strategy": "no"}
    for rows in (Reviews(), [Reviews()[i] for i in range(8)]):
        _, report = train(bert(), [SparseGPT(0.5)], rows, output_dir=tmp_path, training_args=args)
        assert report.steps[0].layers[0].tokens == 12 * len(rows)
    strange = [{"picture": torch.ones(3), "label": 1}]
    with pytest.raises(
        ConfigError, match=r"accepts input_ids, .*; the data has only picture, label"
    ):
        calibration_batches(Examples(strange), bert(), None)
