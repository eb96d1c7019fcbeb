"""Delta checkpoints and precision profiles."""

import json
import shutil

import pytest
import torch
from checkpoint.manifests import edit_manifest, forge_id
from hypothesis import given, settings
from hypothesis import strategies as st
from reliability_tools import edit_manifest as edit_file_manifest
from strategies import bits, same_bits
from training import Run, build_state, copy_state, equal_states

import slimtensors
from slimtensors.checkpoint import (
    PROFILES,
    Filter,
    Profile,
    checkpointing,
    flatten,
    list_checkpoints,
    load_checkpoint,
    remove_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    verify_run,
)
from slimtensors.checkpoint.tensor_entry import (
    TensorEntry,
    make_noise,
    multiply_steps,
    round_mantissa,
    round_to_steps,
    take_roots,
)
from slimtensors.errors import ConfigError, CorruptFileError, MismatchError
from slimtensors.tensor import Spec


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def states(request):
    run = Run(dtype=request.param, width=64)
    found = []
    for steps in (5, 3, 3):
        run.train(steps)
        found.append(copy_state(build_state(run, metrics={"loss": 1.0})))
    return found


def test_an_exact_delta_is_bitwise_equal(tmp_path, states):
    save_checkpoint(states[0], tmp_path / "a")
    b = save_checkpoint(states[1], tmp_path / "b", base=tmp_path / "a")
    c = save_checkpoint(states[2], tmp_path / "c", base=tmp_path / "b")  # a chain
    assert (b.manifest.kind, b.manifest.base.name, b.errors) == ("delta", "a", {})
    assert equal_states(load_checkpoint(tmp_path / "b"), states[1])
    assert equal_states(load_checkpoint(tmp_path / "c"), states[2])
    assert c.manifest.base.name == "b"


def test_unchanged_tensors_take_no_space(tmp_path, states):
    save_checkpoint(states[0], tmp_path / "a")
    same = save_checkpoint(states[0], tmp_path / "b", base=tmp_path / "a")
    assert same.summary.stored_bytes == 0
    assert equal_states(load_checkpoint(tmp_path / "b"), states[0])


def test_tensors_missing_in_the_base_are_stored_whole(tmp_path, states):
    fresh = build_state(Run(seed=4, width=64))
    save_checkpoint(fresh, tmp_path / "a")
    save_checkpoint(states[1], tmp_path / "b", base=tmp_path / "a")
    assert equal_states(load_checkpoint(tmp_path / "b"), states[1])
    save_checkpoint({"other": torch.ones(3)}, tmp_path / "c")
    save_checkpoint(states[1], tmp_path / "d", base=tmp_path / "c")
    assert equal_states(load_checkpoint(tmp_path / "d"), states[1])


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_empty_moments_round_trip(tmp_path, profile, shape):
    moments = {"exp_avg": torch.empty(shape), "exp_avg_sq": torch.empty(shape)}
    state = {"model": {"w": torch.ones(3)}, "optimizer": {"state": {0: moments}}}
    save_checkpoint({"model": {"w": torch.zeros(3)}, "n": 1}, tmp_path / "a")
    save_checkpoint(state, tmp_path / "b", base=tmp_path / "a", profile=profile)
    if not PROFILES[profile].is_model_only:
        assert equal_states(load_checkpoint(tmp_path / "b"), state)


def test_a_delta_with_few_changed_weights_is_small(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(512, 512).bfloat16()
    y = torch.where(torch.rand(x.shape) < 0.015, x * 1.01, x)
    save_checkpoint({"model": {"w": x}}, tmp_path / "a")
    saved = save_checkpoint({"model": {"w": y}}, tmp_path / "b", base=tmp_path / "a")
    assert x.nbytes > 30 * saved.summary.stored_bytes


def test_a_missing_or_different_base_raises(tmp_path, states):
    a = save_checkpoint(states[0], tmp_path / "a")
    save_checkpoint(states[1], tmp_path / "b", base=tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(
        MismatchError, match=rf"delta of a \(id {a.manifest.id}\), which was not found"
    ):
        load_checkpoint(tmp_path / "b")
    assert "is a delta of a" in verify_run(tmp_path).damaged["b"]
    back = load_checkpoint(tmp_path / "b", base=tmp_path / "elsewhere")
    assert equal_states(back, states[1])
    save_checkpoint(states[2], tmp_path / "a")
    with pytest.raises(MismatchError, match=r"the checkpoint at .*a has id"):
        load_checkpoint(tmp_path / "b")


def test_a_base_with_the_right_id_but_other_tensors_raises(tmp_path, states):
    save_checkpoint(states[0], tmp_path / "a")
    save_checkpoint(states[1], tmp_path / "b", base=tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    other = save_checkpoint(states[2], tmp_path / "a").manifest.id
    edit_manifest(tmp_path / "b", lambda data: data["base"].update(id=other))
    with pytest.raises(MismatchError, match="difference from another tensor"):
        load_checkpoint(tmp_path / "b")


def test_a_delta_does_not_load_as_a_model_and_needs_a_base_in_the_same_folder(tmp_path, states):
    save_checkpoint(states[0], tmp_path / "a")
    save_checkpoint(states[1], tmp_path / "b", base=tmp_path / "a")
    with pytest.raises(ConfigError, match="is a delta"):
        slimtensors.load(tmp_path / "b" / "state.safetensors")
    with pytest.raises(ConfigError, match="same parent folder as its deltas"):
        save_checkpoint(states[1], tmp_path / "deep" / "c", base=tmp_path / "a")
    with pytest.raises(ConfigError, match="is the base of b"):
        remove_checkpoint(tmp_path / "a")
    remove_checkpoint(tmp_path / "b")
    remove_checkpoint(tmp_path / "a")
    assert list_checkpoints(tmp_path) == []


def test_flatten_writes_a_checkpoint_without_a_base(tmp_path, states):
    save_checkpoint(states[0], tmp_path / "a")
    save_checkpoint(states[1], tmp_path / "b", base=tmp_path / "a", profile="all")
    want = load_checkpoint(tmp_path / "b")
    flat = flatten(tmp_path / "b", tmp_path / "c")
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    assert equal_states(load_checkpoint(tmp_path / "c"), want)
    assert (flat.manifest.kind, flat.manifest.profile) == ("full", "all")
    assert flat.errors


@pytest.mark.parametrize("profile", ["optimizer-bf16", "optimizer", "all"])
@pytest.mark.parametrize("has_base", [True, False])
def test_profiles_round_only_their_roles_and_report_the_error(tmp_path, states, profile, has_base):
    save_checkpoint(states[0], tmp_path / "a")
    base = tmp_path / "a" if has_base else None
    saved = save_checkpoint(states[2], tmp_path / "b", base=base, profile=profile)
    back = load_checkpoint(tmp_path / "b")
    assert saved.manifest.profile == profile
    assert json.loads((tmp_path / "b" / "checkpoint.json").read_text())["profile"] == profile
    before, after = (slimtensors.archive.tree.flatten(s)[0] for s in (states[2], back))
    assert list(before) == list(after)
    for name, x in before.items():
        y = after[name]
        assert y.dtype == x.dtype
        if name not in saved.errors:
            is_tied = name == "model.out.weight"
            assert is_tied or same_bits(x, y), name
            continue
        assert x.dim() > 1
        assert profile == "all" or name.startswith("optimizer.")
        error = float((y.double() - x.double()).norm() / x.double().norm())
        assert saved.errors[name] == pytest.approx(error, rel=1e-3, abs=1e-9)
    for name in after:
        if name.endswith("exp_avg_sq"):
            assert (after[name] >= 0).all()
            assert same_bits(after[name] == 0, before[name] == 0)
    run = Run(dtype=states[2]["model"]["back.weight"].dtype, width=64)
    restore_checkpoint(back, *run.parts(), dataloader=run.batches)
    assert all(torch.isfinite(torch.tensor(run.train(3))))


def test_rounding_errors_do_not_accumulate_along_a_chain(tmp_path):
    run = Run(width=64)
    run.train(3)
    save_checkpoint(build_state(run), tmp_path / "0")
    errors = []
    for i in range(1, 7):
        run.train(1)
        state = build_state(run)
        saved = save_checkpoint(state, tmp_path / str(i), base=tmp_path / str(i - 1), profile="all")
        errors.append(saved.errors["model.back.weight"])
    assert max(errors) < 1.5 * errors[0]


def test_updates_smaller_than_a_step_survive_on_average(tmp_path):
    moved = torch.full((256, 256), 0.02)
    moved[:64] = 1.0
    before = torch.randn(256, 256)
    save_checkpoint({"model": {"w": before}}, tmp_path / "a")
    after = {"model": {"w": before + moved}}
    save_checkpoint(after, tmp_path / "b", base=tmp_path / "a", profile="all")
    back = load_checkpoint(tmp_path / "b")["model"]["w"] - before
    assert float(back[64:].mean()) == pytest.approx(0.02, abs=0.002)


def test_saving_is_deterministic(tmp_path, states):
    for name in ("a", "b"):
        save_checkpoint(states[1], tmp_path / name, profile="optimizer")
    assert (tmp_path / "a" / "state.safetensors").read_bytes() == (
        tmp_path / "b" / "state.safetensors"
    ).read_bytes()


def test_a_profile_of_more_bits_than_a_dtype_has_can_be_loaded(tmp_path, states):
    own = Profile("own", first_bits=9, second_bits=12, weight_bits=23)
    save_checkpoint(states[0], tmp_path / "a")
    for name, base in (("b", None), ("c", tmp_path / "a")):
        saved = save_checkpoint(states[1], tmp_path / name, base=base, profile=own)
        assert load_checkpoint(tmp_path / name)["step"] == states[1]["step"]
        assert all(error < 0.01 for error in saved.errors.values())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.uint8, torch.int32, torch.float8_e4m3fn]
)
def test_second_moments_of_every_dtype_are_stored_as_differences(tmp_path, dtype):
    def build(steps):
        second = (torch.arange(960).view(24, 40) % 100 + steps).to(dtype)
        moments = {"step": torch.tensor(10.0 + steps), "exp_avg_sq": second}
        groups = [{"params": [0], "betas": (0.9, 0.99)}]
        return {"optimizer": {"state": {0: moments}, "param_groups": groups}}

    save_checkpoint(build(0), tmp_path / "a")
    save_checkpoint(build(1), tmp_path / "b", base=tmp_path / "a")
    assert equal_states(load_checkpoint(tmp_path / "b"), build(1))


@pytest.mark.parametrize("count", [1, 15, 4096])
def test_roots_are_rounded_correctly_on_every_machine(count):
    x = torch.rand(count, generator=torch.Generator().manual_seed(0)) * 1e-5
    assert same_bits(take_roots(x), x.double().sqrt().float())
    assert take_roots(torch.tensor([-1.0, 0.0, 4.0])).nan_to_num(7.0).tolist() == [7.0, 0.0, 2.0]


@pytest.mark.parametrize("options", [{"first_bits": 0}, {"weight_bits": 24}, {"first_step": -1.0}])
def test_profiles_refuse_impossible_precision(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be"):
        Profile("own", **options)


def test_filters_restrict_a_profile(tmp_path, states):
    only = Filter(modules=("back",))
    saved = save_checkpoint(states[0], tmp_path / "a", profile="optimizer-bf16", lossy=only)
    known = {"optimizer.state.2.exp_avg", "optimizer.state.2.exp_avg_sq"}
    assert set(saved.errors) <= known
    with pytest.raises(ConfigError, match="did you mean 'optimizer-bf16'"):
        save_checkpoint(states[0], tmp_path / "b", profile="optimizer-fp16")
    with pytest.raises(ConfigError, match="cannot be combined"):
        save_checkpoint(states[0], tmp_path / "b", base=tmp_path / "a", quantize_i8=True)


def test_a_moment_with_nan_is_kept_exact_and_reported(tmp_path, states):
    state = copy_state(states[1])
    state["optimizer"]["state"][2]["exp_avg"][1, 2] = float("nan")
    saved = save_checkpoint(state, tmp_path / "a", profile="optimizer")
    name = "optimizer.state.2.exp_avg"
    assert saved.kept_exact == {name: "contains NaN or infinity; kept exact"}
    back = load_checkpoint(tmp_path / "a")["optimizer"]["state"][2]["exp_avg"]
    assert same_bits(back, state["optimizer"]["state"][2]["exp_avg"])


def test_history_profile_stores_the_weights_in_bf16(tmp_path, states):
    save_checkpoint(states[0], tmp_path / "a")
    saved = save_checkpoint(states[1], tmp_path / "b", base=tmp_path / "a", profile="history")
    back = load_checkpoint(tmp_path / "b")
    assert back["optimizer"] is None
    assert back["step"] == states[1]["step"]
    for name, x in states[1]["model"].items():
        want = x.bfloat16().to(x.dtype) if x.dim() > 1 else x
        assert same_bits(back["model"][name], want)
    assert saved.manifest.profile == "history"


def start_loop(run, folder, **options):
    return checkpointing(folder, *run.parts(), dataloader=run.batches, **options)


@pytest.fixture
def _any_delta_size(monkeypatch):
    """Allow deltas of any size: those of small models are large."""
    monkeypatch.setattr("slimtensors.checkpoint.run._MAX_DELTA_RATIO", 10.0)


def list_bases(folder):
    return [
        (p.name, p.manifest.base.name[-2:] if p.manifest.base else "")
        for p in list_checkpoints(folder)
    ]


@pytest.mark.usefixtures("_any_delta_size")
@pytest.mark.parametrize(
    ("base", "bases"),
    [
        ("auto", ["", "01", "01", "", "04", "04", ""]),
        ("chain", ["", "01", "02", "", "04", "05", ""]),
        (None, [""] * 7),
    ],
)
def test_keyframe_every_sets_the_keyframe_interval(tmp_path, base, bases):
    run = Run()
    for part in (4, 3):  # in two runs
        with start_loop(run, tmp_path, every=1, base=base, keyframe_every=3) as ckpt:
            for _ in range(part):
                run.train(1)
                ckpt.step()
    assert [manifest for _, manifest in list_bases(tmp_path)] == bases
    assert verify_run(tmp_path)
    losses = run.train(3)
    again = Run(seed=9)
    with start_loop(again, tmp_path) as ckpt:
        assert ckpt.start == 7
    assert again.train(3) == losses


def test_a_keyframe_follows_a_delta_that_is_too_large(tmp_path):
    run = Run()
    with start_loop(run, tmp_path, every=1) as ckpt:
        for _ in range(4):
            run.train(1)
            ckpt.step()
    assert [manifest for _, manifest in list_bases(tmp_path)] == ["", "01", "", "03"]


@pytest.mark.usefixtures("_any_delta_size")
def test_the_base_of_a_kept_delta_is_kept(tmp_path):
    run = Run()
    with start_loop(run, tmp_path, every=1, keep_last=1, keyframe_every=3) as ckpt:
        for step in range(1, 6):
            run.train(1)
            ckpt.step()
            ckpt.wait()
            names = [int(name[-2:]) for name, _ in list_bases(tmp_path)]
            assert names == {1: [1], 2: [1, 2], 3: [1, 3], 4: [4], 5: [4, 5]}[step]


@pytest.mark.usefixtures("_any_delta_size")
def test_keep_history_reduces_old_checkpoints(tmp_path):
    run = Run()
    with start_loop(
        run, tmp_path, every=1, keep_last=1, keyframe_every=3, keep_history=True
    ) as ckpt:
        for _ in range(7):
            run.train(1)
            ckpt.step()
    found = {p.name: p.manifest for p in list_checkpoints(tmp_path)}
    assert [name for name, m in found.items() if m.profile == "exact"] == ["step-00000007"]
    old = [name for name, m in found.items() if m.profile == "history"]
    assert old == [f"step-{i:08d}-history" for i in range(1, 7)]
    assert sum(found[name].base is None for name in old) == 1
    assert verify_run(tmp_path)
    with start_loop(Run(), tmp_path) as ckpt:
        assert ckpt.start == 7


def test_invalid_save_options_raise(tmp_path):
    for options in ({"base": "last"}, {"profile": "history"}, {"keyframe_every": 0}):
        with pytest.raises(ConfigError):
            start_loop(Run(), tmp_path, **options)


def edit_entries(path, change):
    """Edit the tensor entries of a file, with valid checksums."""
    file = path / "state.safetensors"
    file.write_bytes(edit_file_manifest(file.read_bytes(), lambda m: change(m["delta"])))
    forge_id(path)


FIRST, SECOND = "optimizer.state.2.exp_avg", "optimizer.state.2.exp_avg_sq"


def roots(by):
    return {"as": "roots", "dtype": "float32", "shape": [64, 64], "by": by, "step": 0.5}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda delta: delta.pop("tied"), "tied: missing"),
        (
            lambda delta: delta["tied"].update({"x": "nowhere"}),
            "x: tied to, or a copy of, an invalid name nowhere",
        ),
        (lambda delta: delta["tied"].update({"x": []}), "tied: x: expected text"),
        (lambda delta: delta.update(checkpoint=[]), "checkpoint: expected an object"),
        (lambda delta: delta["checkpoint"].update({"new": {"as": "whole"}}), "new: dtype: missing"),
        (lambda delta: delta["checkpoint"].update({"new": 1}), "new: expected an object"),
        (lambda delta: delta["checkpoint"].update({FIRST: roots(FIRST)}), "invalid sibling"),
        (lambda delta: delta["checkpoint"].update({FIRST: roots("nowhere")}), "invalid sibling"),
        (lambda delta: delta["checkpoint"].update({FIRST: roots([])}), f"{FIRST}: by: expected"),
        ({"bits": 99}, "bits: expected an integer from 1 to"),
        ({"seed": -1}, "seed: expected an integer from 0"),
        ({"shape": [1, 2]}, "expected"),
        ({"shape": [1 << 62, 4]}, "shape too large"),
        ({"dtype": []}, "unknown dtype"),
        ({"dtype": "complex64", "times": 2}, "dtype: complex64"),
        ({"times": "x"}, "times: expected a number"),
        ({"times": "NaN"}, "times: expected a finite number"),
        ({"times": float("inf")}, "times: expected a finite number"),
        ({"times": 10**400}, "times: expected a number that fits a double"),
        ({"as": "guess"}, "as: unknown kind 'guess'"),
        ({"as": []}, "as: expected text"),
        ({"as": "steps", "base": "x", "step": float("nan")}, "step: expected a finite number"),
        ({"base": 3}, "base: "),
        ({"color": 3}, "color: unknown key"),
    ],
)
def test_an_invalid_entry_is_an_error_with_file_tensor_and_key(tmp_path, edit, message):
    torch.manual_seed(0)
    state = {"optimizer": {"state": {2: {"exp_avg_sq": torch.rand(64, 64)}}}}
    save_checkpoint(state, tmp_path / "a")
    state["optimizer"]["state"][2]["exp_avg"] = torch.rand(64, 64)
    save_checkpoint(state, tmp_path / "b", base=tmp_path / "a")
    name = FIRST if "a number" in message else SECOND

    def change(delta):
        if callable(edit):
            edit(delta)
        else:
            delta["checkpoint"][name].update(edit)

    edit_entries(tmp_path / "b", change)
    with pytest.raises(CorruptFileError, match=rf"b/state\.safetensors: .*{message}") as caught:
        load_checkpoint(tmp_path / "b")
    if not callable(edit):
        assert name in str(caught.value)


def mix_bits(x):
    """Return the noise for an index as a signed integer: the slow reference of `make_noise`."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * factor % 2**32
    x ^= x >> 16
    return x - 2**32 if x >= 2**31 else x


def test_noise_is_reproducible():
    assert make_noise(100, 12345).tolist() == [mix_bits(12345 + i) for i in range(100)]
    assert make_noise(3, 2**31 - 2).tolist() == [mix_bits(2**31 - 2 + i) for i in range(3)]
    x = make_noise(1 << 16, 7).double()
    assert abs(float(x.mean())) < 2**31 / 100
    assert x.unique().numel() == 1 << 16


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31 - 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kept_bits=st.integers(1, 23),
)
def test_mantissas_are_rounded_to_a_neighbor(seed, dtype, kept_bits):
    x = bits(seed, 64, dtype, 0.9)
    x = torch.where(torch.isfinite(x), x, 1.0)
    x = torch.where(x.abs() < torch.finfo(dtype).max / 4, x, 1.0)
    for rounding_seed in (None, seed):
        y = round_mantissa(x, kept_bits, rounding_seed).to(dtype)
        spacing = torch.maximum(x.abs(), y.abs()).double() * 2.0**-kept_bits
        tiny = torch.finfo(dtype).smallest_normal
        assert ((y.double() - x.double()).abs() <= spacing + tiny).all()
    if kept_bits == 7 and dtype is torch.float32:
        assert same_bits(round_mantissa(x, 7, None), x.bfloat16())


def test_stochastic_rounding_is_unbiased():
    x = torch.full((1 << 16,), 1.0 + 1 / 50)
    assert float(round_mantissa(x, 4, 3).float().mean()) == pytest.approx(1.02, abs=3e-4)
    q = round_to_steps(x, 0.5, 3)
    assert q.dtype is torch.int8
    assert float(multiply_steps(q, 0.5).mean()) == pytest.approx(1.02, abs=3e-3)
    assert round_to_steps(x, 1e-12, None) is None


def test_entries_round_trip_through_json():
    data = {
        "as": "by-exponent",
        "dtype": "float32",
        "shape": [2, 3],
        "times": 0.98,
        "bits": 5,
        "seed": 7,
        "base": "00ff",
    }
    assert TensorEntry.from_json(json.loads(json.dumps(data))).to_json() == data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_predict_multiplies_the_base(dtype):
    base = torch.randn(300, 301).to(dtype)
    entry = TensorEntry("difference", Spec.of(base), base="00ff", times=0.98)
    assert same_bits(entry.predict(base), base * 0.98)


def test_profiles_are_listed_by_name():
    assert all(profile.name == name for name, profile in PROFILES.items())
    assert [name for name, profile in PROFILES.items() if profile.is_exact] == ["exact"]
