"""Models that are rounded to fit a budget."""

import json
import math
from copy import deepcopy
from pydoc_data.topics import topics

import pytest
import torch
from strategies import same_bits
from tiny_models import same_weights
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5ForConditionalGeneration,
    WhisperForConditionalGeneration,
)
from transformers.modeling_outputs import SequenceClassifierOutput

import slimtensors
from slimtensors.codecs import Trellis
from slimtensors.codecs.plan import Plan, decode, encode
from slimtensors.errors import ConfigError, MismatchError
from slimtensors.folder.weights import FolderOptions
from slimtensors.layerwise.divergence import Reference
from slimtensors.layerwise.fit import TOLERANCE, FitTensor, Fitter
from slimtensors.layerwise.resume import WorkFolder
from slimtensors.layerwise.statistics import Statistics
from slimtensors.layerwise.stored_weights import StoredWeights
from slimtensors.parallel import serially
from slimtensors.recipe import Calibration
from slimtensors.tensor import Spec
from slimtensors.transformers import Budget, fit
from slimtensors.transformers.data import find_generation_obstacle, generate_batches

TEXT = "\n".join(topics.values()).encode()
LENGTH = 64


def make_batches(count, start=0, rows=4):
    """Return batches of bytes of the documentation of Python."""
    ids = torch.tensor(list(TEXT[start : start + count * rows * LENGTH]))
    return [{"input_ids": x} for x in ids.view(count, rows, LENGTH)]


CALIBRATION, HELD_OUT = make_batches(12, start=200_000), make_batches(4, start=300_000)
DATA = {"dataset": CALIBRATION, "calibration": Calibration(samples=48, evaluate=HELD_OUT)}


def make_model(tied=True, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 10}
    config = LlamaConfig(
        vocab_size=256,
        **sizes,
        **heads,
        tie_word_embeddings=tied,
        eos_token_id=None,
        initializer_range=0.1,
        **options,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Run on one thread: these models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained():
    """A small model of the documentation of Python."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=200)
    for batch in make_batches(200, rows=8):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert loss.item() < 2.6
    return model.bfloat16().eval()


@pytest.fixture
def folder(trained, tmp_path):
    trained.save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def weight_bytes(folder):
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measure(trained, model):
    with Reference(trained, HELD_OUT) as reference:
        return reference.compare(model)


def test_a_folder_fits_its_budget_and_loads(trained, folder, tmp_path):
    _, report = fit(folder, "80kB", output_dir=tmp_path / "small", **DATA)
    assert report.weight_bytes == weight_bytes(tmp_path / "small")
    assert 80_000 * (1 - TOLERANCE) <= report.weight_bytes <= 80_000
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not any(info.values())
    found = measure(trained, model)
    assert found.kl == pytest.approx(report.divergence.kl, rel=0.1)
    assert found.kl < 0.25
    assert 0.6 < found.top1 < 1
    assert 1 - math.sqrt(found.kl / 2) < found.acceptance < 1  # Pinsker's inequality
    written = json.loads((tmp_path / "small" / "fit_report.json").read_text())
    assert written["measured"]["kl"] == report.divergence.kl
    assert {x["name"] for x in written["tensors"]} < set(slimtensors.load(tmp_path / "small"))
    assert [x["bytes"] for x in written["curve"]] == sorted(x["bytes"] for x in written["curve"])


def test_the_same_input_gives_the_same_bytes(folder, tmp_path):
    for name in "ab":
        fit(folder, "80kB", output_dir=tmp_path / name, how=FolderOptions(threads=2), **DATA)
    a, b = (next((tmp_path / x).glob("*.safetensors")).read_bytes() for x in "ab")
    assert a == b


def test_statistics_beat_rounding_with_the_same_step_everywhere(trained, folder):
    _, report = fit(folder, Budget(bits=3.0), **DATA)
    plain = deepcopy(trained)
    sizes = []
    for step in (0.25, 0.3, 0.35, 0.4, 0.5):
        state, total = {}, 0
        for name, x in trained.state_dict().items():
            if x.dim() == 2 and name != "lm_head.weight":
                coded = encode(Plan(Trellis(step)), x)
                state[name] = decode(coded)
                total += sum(leaf.numel() for _, leaf in coded.leaves())
        plain.load_state_dict({**trained.state_dict(), **state})
        plain.tie_weights()
        sizes.append((total, measure(trained, plain).kl))
    larger = [kl for total, kl in sizes if total > report.weight_bytes]
    assert larger
    assert report.divergence.kl < 0.5 * max(larger)


def test_a_maximum_divergence_is_met_on_held_out_data(trained, folder, tmp_path):
    _, report = fit(folder, Budget(kl=0.1), output_dir=tmp_path / "small", **DATA)
    assert 0.05 < report.divergence.kl <= 0.1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert measure(trained, model).kl == pytest.approx(report.divergence.kl, rel=0.1)


def test_masks_and_ignored_layers_are_kept(trained, tmp_path):
    pruned = deepcopy(trained)
    for layer in pruned.model.layers:
        weight = layer.mlp.up_proj.weight.data
        weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.5] = 0
    pruned.save_pretrained(tmp_path / "dense")
    ignore = ["re:.*down_proj", "model.layers.0.self_attn.q_proj"]
    model, report = fit(tmp_path / "dense", Budget(bits=4.0), ignore=ignore, **DATA)
    rounded = {name for name, *_ in report.tensors}
    for name, x in pruned.named_parameters():
        now = model.get_parameter(name)
        assert bool((now[x == 0] == 0).all())
        is_ignored = "down_proj" in name or name == "model.layers.0.self_attn.q_proj.weight"
        assert same_bits(now, x) == (is_ignored or x.dim() == 1)
        assert is_ignored == (name not in rounded) or x.dim() == 1
    with pytest.raises(ConfigError, match="ignore: 'nothing' matches no layer"):
        fit(tmp_path / "dense", "90kB", ignore=["nothing"], **DATA)


def test_a_tied_weight_is_exact_if_one_of_its_layers_is_ignored(trained, folder):
    model, report = fit(folder, Budget(bits=5.0), ignore=["lm_head"], **DATA)
    assert same_bits(model.model.embed_tokens.weight, trained.model.embed_tokens.weight)
    assert "model.embed_tokens.weight" not in {name for name, *_ in report.tensors}


def test_shards_and_untied_heads_fit_together(tmp_path):
    model = make_model(tied=False).bfloat16()
    model.save_pretrained(tmp_path / "dense", max_shard_size="150kB")
    how = FolderOptions(max_shard_size="40kB")
    _, report = fit(tmp_path / "dense", "100kB", output_dir=tmp_path / "small", how=how, **DATA)
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 2
    assert weight_bytes(tmp_path / "small") == report.weight_bytes <= 100_000
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert not same_bits(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


class StopError(Exception):
    pass


def test_an_interrupted_run_resumes(folder, tmp_path, monkeypatch):
    import slimtensors.layerwise.fit as module

    fit(folder, "80kB", output_dir=tmp_path / "whole", **DATA)
    settings = Calibration(samples=48, evaluate=HELD_OUT, work=tmp_path / "work")
    calls = []
    round_matrix = module.round_matrix

    def stop(*args, **options):
        calls.append(1)
        if len(calls) == 40:
            raise StopError
        return round_matrix(*args, **options)

    monkeypatch.setattr(module, "round_matrix", stop)
    with pytest.raises(StopError):
        fit(folder, "80kB", CALIBRATION, output_dir=tmp_path / "small", calibration=settings)
    assert not (tmp_path / "small").exists()
    monkeypatch.setattr(module, "round_matrix", round_matrix)
    monkeypatch.setattr(
        "slimtensors.layerwise.fisher._run", lambda *args, **options: pytest.fail("statistics")
    )
    fit(folder, "80kB", CALIBRATION, output_dir=tmp_path / "small", calibration=settings)
    whole, small = (next((tmp_path / x).glob("*.safetensors")) for x in ("whole", "small"))
    assert whole.read_bytes() == small.read_bytes()
    with pytest.raises(MismatchError, match="different calibration"):
        fit(folder, "80kB", make_batches(12), calibration=settings)


def test_healing_lowers_the_divergence(trained, folder, tmp_path):
    _, plain = fit(folder, "60kB", **DATA)
    _, report = fit(folder, "60kB", heal=0.1, output_dir=tmp_path / "small", **DATA)
    assert report.weight_bytes <= 60_000
    assert any(note.startswith("healed: ") for note in report.notes)
    assert report.divergence.kl < plain.divergence.kl
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert measure(trained, model).kl == pytest.approx(report.divergence.kl, rel=0.1)
    assert not same_bits(model.model.norm.weight, trained.model.norm.weight)


def test_a_model_generates_its_own_calibration_data(trained, folder):
    settings = Calibration(samples=32, length=LENGTH, batch_size=4)
    _, report = fit(folder, "80kB", calibration=settings)
    assert report.notes[0] == "calibrated on text that the model generated"
    assert report.divergence.kl < 0.5


def make_encoder():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return BertModel(BertConfig(vocab_size=256, num_attention_heads=4, **sizes)).eval()


def test_an_encoder_is_judged_by_the_direction_of_its_outputs(tmp_path):
    model = make_encoder()
    model.save_pretrained(tmp_path / "dense")
    _, report = fit(tmp_path / "dense", Budget(bits=3.0), output_dir=tmp_path / "small", **DATA)
    assert report.divergence.kl is None
    assert report.divergence.cosine > 0.97
    again = AutoModel.from_pretrained(tmp_path / "small")
    assert again.encoder.layer[0].attention.self.query.weight.dtype is torch.float32
    with pytest.raises(ConfigError, match="maximum divergence requires logits"):
        fit(tmp_path / "dense", Budget(kl=0.1), **DATA)


def test_without_data_a_model_that_is_silent_needs_four_bits(tmp_path):
    make_encoder().save_pretrained(tmp_path / "dense")
    with pytest.raises(ConfigError, match=r"cannot generate text .* at least 4 bits"):
        fit(tmp_path / "dense", Budget(bits=3.9))
    _, report = fit(tmp_path / "dense", Budget(bits=4.5), output_dir=tmp_path / "small")
    assert report.divergence is None
    assert "without calibration data" in report.notes[0]
    assert weight_bytes(tmp_path / "small") <= 4.5 / 8 * report.parameters


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3))
        self.head = nn.Linear(64, 100)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def test_any_module_with_a_loss_is_rounded(tmp_path):
    torch.manual_seed(0)
    model = Pictures()
    data = [torch.randn(16, 3, 12, 12) for _ in range(24)]

    def score(model, batch):
        logits = model(batch)
        labels = torch.multinomial(logits.softmax(-1), 1)[:, 0]
        return -functional.cross_entropy(logits, labels, reduction="sum"), len(logits)

    settings = Calibration(samples=256)
    found, report = fit(
        model,
        Budget(bits=5.0),
        data,
        calibration=settings,
        objective=score,
        output_dir=tmp_path / "small",
    )
    assert found is model
    assert {name for name, *_ in report.tensors} == {"features.2.weight", "head.weight"}
    assert all(loss is not None for *_, loss, _ in report.tensors)
    state = slimtensors.load(tmp_path / "small")
    assert all(same_bits(x, state[name]) for name, x in model.state_dict().items())
    assert report.divergence.cosine > 0.98

    def constant(model, batch):
        return torch.zeros(()), 1

    with pytest.raises(ConfigError, match="the loss does not depend on any observed layer"):
        fit(Pictures(), Budget(bits=5.0), data, calibration=settings, objective=constant)


class Wide(nn.Module):
    """A convolution whose outputs are as wide as they have channels."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(16, 32, 3, padding=1)
        self.scale = nn.Parameter(torch.logspace(-2, 2, 32)[:, None, None])

    def forward(self, x):
        return (self.first(x) * self.scale).flatten(1)


def test_sensitivities_of_a_convolution_are_those_of_its_channels():
    torch.manual_seed(0)
    model = Wide()
    before = model.first.weight.detach().clone()
    data = [torch.randn(4, 16, 32, 32) for _ in range(8)]
    fit(model, Budget(bits=8.0), data, calibration=Calibration(samples=24))
    errors = (model.first.weight - before).square().mean((1, 2, 3))
    assert errors[:4].mean() > 100 * errors[-4:].mean()


class Score(nn.Module):
    """A model with one logit, as rerankers have it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Linear(64, 1)
        )

    def forward(self, x):
        return SequenceClassifierOutput(logits=self.net(x))


def test_a_single_logit_is_not_taken_for_a_distribution():
    torch.manual_seed(0)
    model, data = Score(), [torch.randn(16, 64) for _ in range(20)]
    with Reference(model, data[:4]) as reference:
        other = deepcopy(model)
        for x in other.parameters():
            x.data *= -3
        assert reference.compare(model).cosine > 0.999
        assert reference.compare(other).cosine < 0.9
    _, report = fit(model, Budget(bits=6.0), data, calibration=Calibration(samples=256))
    assert report.divergence.kl is None
    assert all(loss is not None for *_, loss, _ in report.tensors)


def test_a_model_whose_outputs_overflow_is_refused(trained):
    model = deepcopy(trained)
    model.model.norm.weight.data.fill_(3e38)
    with pytest.raises(ConfigError, match="outputs of the model are not finite"):
        fit(model, Budget(bits=4.0), **DATA)


def test_masked_logits_have_a_finite_divergence(trained):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = deepcopy(trained)

        def forward(self, **batch):
            out = self.inner(**batch)
            out.logits[..., :7] = torch.finfo(out.logits.dtype).min
            return out

    with Reference(Masked(), HELD_OUT[:1]) as reference:
        assert reference.compare(Masked()).kl == pytest.approx(0, abs=1e-4)


def test_a_module_is_restored_after_an_error(monkeypatch):
    torch.manual_seed(0)
    model = Pictures().train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    data = [torch.randn(16, 3, 12, 12) for _ in range(24)]
    apply = StoredWeights.apply

    def stop(self, *args):
        apply(self, *args)
        raise StopError

    monkeypatch.setattr(StoredWeights, "apply", stop)
    with pytest.raises(StopError):
        fit(model, Budget(bits=5.0), data, calibration=Calibration(samples=256))
    assert all(same_bits(x, before[name]) for name, x in model.state_dict().items())
    assert model.training
    assert all(x.requires_grad for x in model.parameters())


def test_what_can_be_refused_is_refused_before_any_work(folder, tmp_path):
    (tmp_path / "small").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        fit(folder, "80kB", output_dir=tmp_path / "small", **DATA)
    settings = Calibration(samples=48, evaluate=HELD_OUT, work=tmp_path / "work")
    with pytest.raises(ConfigError, match="objective that is defined in a module"):
        fit(folder, "80kB", CALIBRATION, calibration=settings, objective=lambda model, batch: None)


@pytest.mark.parametrize("kind", [T5ForConditionalGeneration, WhisperForConditionalGeneration])
def test_encoder_decoders_do_not_generate_calibration_data(kind):
    with torch.device("meta"):
        model = kind(kind.config_class())
    assert "cannot generate text" in find_generation_obstacle(model)


def test_generated_text_has_at_most_the_length_of_the_model(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=1, n_head=2)
    config.bos_token_id = config.eos_token_id = 0
    model = GPT2LMHeadModel(config)
    model.generation_config.repetition_penalty = 5.0
    batches = generate_batches(model, Calibration(samples=4, length=24), lambda *_: None)
    assert batches[0]["input_ids"].shape == (4, 16)


def test_experts_without_enough_inputs_are_reported(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = MixtralConfig(
        vocab_size=256,
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=1,
    )
    model = MixtralForCausalLM(config)
    with torch.no_grad():  # no token prefers expert 3
        model.model.layers[0].mlp.gate.weight[3] = 0
        model.model.layers[0].mlp.gate.weight *= 100
        model.model.embed_tokens.weight += 0.1
        model.model.layers[0].mlp.gate.weight[3] = -1
    model.save_pretrained(tmp_path / "dense")
    _, report = fit(tmp_path / "dense", Budget(bits=5.0), output_dir=tmp_path / "small", **DATA)
    notes = {name: note for name, *_, note in report.tensors if note}
    assert notes
    assert all("experts" in name for name in notes)
    assert any("rounded without statistics" in note for note in report.notes)
    loaded = MixtralForCausalLM.from_pretrained(tmp_path / "small")
    assert all(bool(x.isfinite().all()) for x in loaded.parameters())


def test_a_budget_that_cannot_be_met_is_refused_with_the_least_possible(folder):
    with pytest.raises(ConfigError, match=r"budget of 5\.0 kB is too small: .* makes \d"):
        fit(folder, "5kB", **DATA)


def test_a_budget_above_the_lossless_size_is_met_without_loss(trained, folder, tmp_path):
    _, report = fit(folder, Budget(bits=15.0), output_dir=tmp_path / "small", **DATA)
    assert report.notes == ("the budget is larger than the lossless size: stored without loss",)
    assert report.weight_bytes == weight_bytes(tmp_path / "small")
    written = json.loads((tmp_path / "small" / "fit_report.json").read_text())
    assert written["weight_bytes"] == report.weight_bytes
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "small"), trained)


def test_a_pruned_model_is_not_rounded_if_the_budget_is_above_its_lossless_size(trained, tmp_path):
    pruned = deepcopy(trained)
    for x in pruned.parameters():
        if x.dim() == 2:
            x.data *= x.abs() >= x.abs().float().quantile(0.97)
    pruned.save_pretrained(tmp_path / "dense")
    dense = weight_bytes(tmp_path / "dense")
    _, report = fit(tmp_path / "dense", int(0.25 * dense), **DATA)
    assert report.notes == ("the budget is larger than the lossless size: stored without loss",)
    assert report.weight_bytes < 0.2 * dense


def test_zeros_of_a_pruned_weight_need_less_than_half_a_bit():
    torch.manual_seed(0)
    net = nn.Linear(512, 512, bias=False)
    weight = net.weight.data
    weight *= torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.03
    data = [torch.randn(32, 512) for _ in range(8)]
    _, report = fit(net, Budget(bits=0.4), data, calibration=Calibration(samples=256))
    assert 0.3 < report.bits <= 0.4


def test_a_budget_is_met_although_many_steps_have_the_same_size(tmp_path):
    weights = torch.randn(96, 256, generator=torch.Generator().manual_seed(0))
    tensor = FitTensor("w", Spec.of(weights), lambda: weights, Trellis())
    unit = 512

    def measure(solution):
        return math.ceil(solution.stored_bytes / unit) * unit

    for budget in range(9_000, 10_000, 200):
        fitter = Fitter([tensor], Statistics(WorkFolder(tmp_path, {})), serially)
        assert budget - 2 * unit < measure(fitter.solve(budget, 0, measure)) <= budget


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name(trained, tmp_path, bad):
    model = deepcopy(trained)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = bad
    model.save_pretrained(tmp_path / "dense")
    with pytest.raises(ConfigError, match=r"NaN or infinity in model\.layers\.1\.mlp\.up_proj"):
        fit(tmp_path / "dense", "80kB", **DATA)


def test_dead_inputs_and_short_data_are_handled(trained, tmp_path):
    model = deepcopy(trained)
    model.model.layers[0].input_layernorm.weight.data[5:20] = 0  # inputs that are always 0
    model.save_pretrained(tmp_path / "dense")
    _, report = fit(tmp_path / "dense", "80kB", CALIBRATION[:1])
    assert any("samples of calibration data" in note for note in report.notes)
    assert any("divergence was not measured" in note for note in report.notes)
    assert report.divergence is None
    assert report.weight_bytes <= 80_000
    few = [{"input_ids": x["input_ids"][:1]} for x in CALIBRATION[:1]]
    with pytest.raises(ConfigError, match="too little calibration data for any weight; pass more"):
        fit(tmp_path / "dense", "80kB", few)
    _, report = fit(tmp_path / "dense", Budget(bits=4.5), few)
    assert any("too little calibration data for any weight" in note for note in report.notes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": "60MB", "bits": 3.0},
        {"bits": 0},
        {"kl": -1.0},
        {"bits": math.inf},
        {"size": 60.5},
    ],
)
def test_budgets_are_one_positive_number(options):
    with pytest.raises(ConfigError, match="budget"):
        Budget(**options)
