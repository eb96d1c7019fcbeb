"""Publish and follow: every version arrives bit for bit, completely or not at all."""

import logging
import resource
import shutil
import uuid

import fsspec
import pytest
import torch
from strategies import same_bits
from sync.tools import (
    Stubborn,
    assert_equal,
    assert_follows,
    copy_of,
    make_state,
    step_,
    zeros,
)
from torch import nn

import slimtensors
from slimtensors.errors import (
    ConfigError,
    CorruptFileError,
    InUseError,
    MismatchError,
    UnsupportedTensorError,
)
from slimtensors.sync import following, publishing


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    """Return the URL of a store that does not exist yet."""
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def stubborn():
    """Return the URL of a store whose uploads wait while its gate is closed."""
    Stubborn.gate.set()
    Stubborn.entered.clear()
    Stubborn.full = False
    yield f"stubborn://{uuid.uuid4().hex}"
    Stubborn.gate.set()


only_local = pytest.mark.parametrize("url", ["local"], indirect=True)
"""For tests that do not depend on the file system."""


def publish(url, state, steps, **options):
    """Publish a version per step."""
    with publishing(url, state, **options) as out:
        for step in steps:
            step_(state, step)
            out.publish(step)
            out.wait()
    return out


def test_a_follower_has_the_bits_of_every_version(url):
    state = make_state()
    served, follower = zeros(state), following(url)
    with publishing(url, state, keyframe_every=3) as out:
        for step in range(5):
            step_(state, step)
            out.publish(step)
            published = out.wait()
            update = follower.update(served)
            assert_equal(served, state)
            assert (update.number, update.step) == (step + 1, step)
            assert update.from_keyframe == (step == 0)
            assert published.version.number == step + 1
            if step:
                assert update.bytes < follower.versions()[0].keyframe_bytes
    assert [v.keyframe is not None for v in follower.versions()] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert [v.delta is not None for v in follower.versions()] == [False, True, True, True, True]
    again = follower.update(served)
    assert (again.versions, again.tensors, again.requests) == (0, 0, 1)


@only_local
def test_a_module_is_updated_in_place(url):
    trained, served = nn.Linear(8, 4), nn.Linear(8, 4)
    addresses = [x.data_ptr() for x in served.parameters()]
    with publishing(url, trained) as out:
        out.publish(1)
    following(url).update(served)
    assert_equal(served.state_dict(), trained.state_dict())
    assert [x.data_ptr() for x in served.parameters()] == addresses
    assert all(x.requires_grad for x in served.parameters())
    with torch.inference_mode():
        frozen = {name: torch.zeros_like(x) for name, x in trained.state_dict().items()}
    following(url).update(frozen)
    assert_equal(frozen, dict(trained.state_dict()))


@only_local
def test_wrappers_do_not_change_names(url):
    trained, served = nn.Linear(3, 2), nn.Linear(3, 2)
    compiled = nn.Module()
    compiled._orig_mod = trained  # as torch.compile wraps it
    with publishing(url, compiled) as out:
        out.publish(1)
    following(url).update(served)
    assert_equal(served.state_dict(), trained.state_dict())


@only_local
def test_missed_versions_arrive_as_a_chain_or_from_a_keyframe_whichever_is_smaller(url):
    state = make_state()
    early, late = zeros(state), zeros(state)
    publish(url, state, range(1))
    followers = following(url), following(url)
    followers[0].update(early)
    publish(url, state, range(1, 4), keyframe_every=100)
    update = followers[0].update(early)
    assert (update.from_keyframe, update.versions) == (False, 3)
    assert_equal(early, state)
    followers[1].update(late)
    for step in range(4, 7):  # everything changes: three deltas are larger than a keyframe
        for x in (state["weight"], state["half"]):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(step)))
        publish(url, state, [step], keyframe_every=6)
    update = followers[1].update(late)
    assert update.from_keyframe
    assert update.versions <= 2
    assert_equal(late, state)


@only_local
def test_patches_change_a_copy_to_the_newest_version(url):
    state = make_state()
    copy, follower = {}, following(url)

    def receive():
        patches = list(follower.patches())
        for patch in patches:
            if patch.indices is None:
                copy[patch.name] = patch.values.clone()
            else:
                x = copy[patch.name].contiguous()
                x.view(-1)[patch.indices] = patch.values
                copy[patch.name] = x
            assert patch.shape == state[patch.name].shape
            assert patch.dtype == state[patch.name].dtype
        return patches

    publish(url, state, [0])
    assert all(patch.indices is None for patch in receive())
    assert_equal(copy, {name: state[name] for name in copy})
    publish(url, state, [1, 2])
    patches = {patch.name: patch for patch in receive()}
    assert patches.keys() == {"weight", "tied", "half", "mask", "wide", "steps", "turned"}
    assert 0 < len(patches["weight"].indices) <= 80
    assert_equal(copy, {name: state[name] for name in copy})
    assert copy.keys() == state.keys()
    assert receive() == []


@only_local
def test_patches_that_were_not_taken_are_followed_by_whole_tensors(url):
    state = make_state()
    follower = following(url)
    publish(url, state, [0])
    assert len(list(follower.patches())) == len(state)
    publish(url, state, [1])
    next(iter(follower.patches()))
    patches = list(follower.patches())
    assert len(patches) == len(state)
    assert all(patch.indices is None for patch in patches)
    assert all(same_bits(patch.values, state[patch.name]) for patch in patches)
    assert list(follower.patches()) == []


@only_local
def test_a_changed_model_is_noticed_and_repaired_from_a_keyframe(url, caplog):
    state = make_state()
    publish(url, state, [0])
    served, follower = zeros(state), following(url)
    follower.update(served)
    served["zero"].fill_(1)  # no delta contains this tensor
    publish(url, state, [1])
    with caplog.at_level(logging.WARNING):
        update = follower.update(served)
    assert "zero: differs from version 1" in caplog.text
    assert update.from_keyframe
    assert_equal(served, state)


@only_local
def test_a_follower_starts_from_any_recent_version_that_a_model_has(url):
    state = make_state()
    publish(url, state, [0, 1])
    served = {name: x.clone() for name, x in state.items()}  # not tied either
    publish(url, state, [2])
    update = following(url).update(served)
    assert not update.from_keyframe
    assert update.versions == 1
    assert_equal(served, state)


@only_local
def test_a_follower_goes_to_the_version_it_is_asked_for(url):
    state, served, follower = make_state(), zeros(make_state()), following(url)
    publish(url, state, [0])
    first = copy_of(state)
    publish(url, state, [1, 2])
    assert follower.update(served, number=1).number == 1
    assert_equal(served, first)
    assert follower.update(served, number=3).versions == 2
    assert_equal(served, state)
    follower.update(served, number=1)  # back
    assert_equal(served, first)
    assert len(list(follower.patches(number=1))) == len(state)
    with pytest.raises(FileNotFoundError, match="version 9 not found"):
        follower.update(served, number=9)


@only_local
def test_one_follower_updates_several_models(url):
    state = make_state()
    publish(url, state, [0])
    first, second, follower = zeros(state), zeros(state), following(url)
    follower.update(first)
    follower.update(second)
    publish(url, state, [1])
    assert not follower.update(first).from_keyframe
    assert not follower.update(second).from_keyframe
    assert_equal(first, state)
    assert_equal(second, state)


@only_local
def test_a_later_publisher_continues_with_deltas(url):
    state = make_state()
    publish(url, state, [0])
    publish(url, copy_of(state), [1])
    newest = following(url).versions()[-1]
    assert (newest.number, newest.keyframe) == (2, None)
    assert newest.changed < newest.items / 10
    untied = {name: x.clone() for name, x in state.items()}
    publish(url, untied, [2])  # other files, so that a keyframe is needed
    newest = following(url).versions()[-1]
    assert (newest.number, newest.delta) == (3, None)
    assert_follows(url, untied)


@only_local
def test_versions_report_bytes_and_bits_per_change(url):
    state = {"w": torch.zeros(1 << 16, dtype=torch.bfloat16)}
    publish_one = torch.arange(0, 1 << 16, 97)
    with publishing(url, state) as out:
        out.publish(1)
        out.wait()
        state["w"][publish_one] = 1.0
        out.publish(2)
        published = out.wait()
    version = following(url).versions()[-1]
    assert version.changed == len(publish_one)
    assert version.bits_per_change == 8 * version.delta_bytes / version.changed
    assert published.to_json()["changed"] == version.changed
    assert published.requests >= 2


def test_a_keyframe_is_an_ordinary_file(tmp_path):
    state = make_state()
    publish(tmp_path / "run", state, [0])
    (file,) = (tmp_path / "run" / "v00000001").glob("keyframe-*.safetensors")
    assert_equal(slimtensors.load(file), state)


def test_retention_keeps_what_the_kept_versions_need(url):
    state = make_state()
    publish(url, state, range(5), keyframe_every=3, keep=2)
    assert [v.number for v in following(url).versions()] == [4, 5]
    publish(url, state, [5], keyframe_every=3, keep=2)
    assert [v.number for v in following(url).versions()] == [4, 5, 6]
    assert_follows(url, state)
    served, follower = zeros(state), following(url)
    follower.update(served)
    publish(url, state, range(6, 8), keyframe_every=2, keep=1)
    follower.update(served)  # its own version was removed
    assert_equal(served, state)


def test_a_second_publisher_is_refused_and_may_take_over(url):
    state = make_state()
    with publishing(url, state) as first:
        first.publish(1)
        first.wait()
        with pytest.raises(InUseError, match=r"process \d+ on .*takeover"), publishing(url, state):
            pass
        with publishing(url, state, takeover=True) as second:
            step_(state, 2)
            second.publish(2)
            second.wait()
            first.publish(3)
            with pytest.raises(InUseError, match="taken over"):
                first.wait()
    assert [v.step for v in following(url).versions()] == [1, 2]
    publish(url, state, [4])  # both have unregistered


def test_a_damaged_store_is_not_continued_and_stays_free(url):
    state = make_state()
    publish(url, state, [0])
    system, files = files_of(url)
    (manifest,) = (path for path in files if path.endswith("manifest.json"))
    good = system.cat_file(manifest)
    system.pipe_file(manifest, good[:-20])
    for _ in range(2):  # no publisher stays registered
        with pytest.raises(CorruptFileError, match="v00000001"), publishing(url, state):
            pass
    system.pipe_file(manifest, good)
    publish(url, state, [1])
    assert_follows(url, state)


@only_local
def test_another_structure_needs_a_keyframe(url):
    state = make_state()
    served, follower = zeros(state), following(url)
    with publishing(url, state) as out:
        out.publish(1)
        out.wait()
        follower.update(served)
        del state["float8"]
        state["half"] = torch.zeros(3)
        state["extra"] = torch.zeros(4)
        with pytest.raises(MismatchError) as error:
            out.publish(2)
        for text in ("float8: missing", "extra: new", "half: float32 [3], published as float16"):
            assert text in str(error.value)
        out.publish(2, keyframe=True)
    before = copy_of(served)
    with pytest.raises(MismatchError, match="extra: not in the model"):
        follower.update(served)
    assert_equal(served, before)
    assert_follows(url, state)
    assert {patch.name for patch in following(url).patches()} == set(state)


@only_local
def test_tensors_tied_in_the_model_must_be_tied_in_the_store(url):
    state = {"a": torch.zeros(3), "b": torch.zeros(3)}
    with publishing(url, state) as out:
        out.publish(1)
    shared = torch.zeros(3)
    with pytest.raises(MismatchError, match=r"a and b|b and a"):
        following(url).update({"a": shared, "b": shared})


def files_of(url):
    """Return the files of a store by path, and functions to write and to remove one."""
    if "://" not in url:
        url = f"file://{url}"
    system, root = fsspec.core.url_to_fs(url)
    return system, sorted(path for path in system.find(root) if not path.endswith("publisher.json"))


def test_a_damaged_file_changes_nothing(url):
    state = make_state()
    served, follower = zeros(state), following(url)
    publish(url, state, [0])
    follower.update(served)
    before = copy_of(served)
    publish(url, state, [1])
    system, files = files_of(url)
    for file in [path for path in files if "v00000002" in path]:
        good = system.cat_file(file)
        for bad in (good[:-9] + bytes([good[-9] ^ 4]) + good[-8:], good[: len(good) // 2]):
            system.pipe_file(file, bad)
            with pytest.raises(CorruptFileError, match="v00000002"):
                follower.update(served)
            with pytest.raises(CorruptFileError, match="v00000002"):
                list(follower.patches())
            assert_equal(served, before)
            follower = following(url)
            system.pipe_file(file, good)
        follower = following(url)
    follower.update(served)
    assert_equal(served, state)


@only_local
def test_a_replaced_version_does_not_fit_its_successor(url):
    state = make_state()
    publish(url, state, [0, 1, 2])
    system, files = files_of(url)
    (manifest,) = (path for path in files if path.endswith("v00000002/manifest.json"))
    from slimtensors.sync.manifest import Version

    version = Version.from_text(system.cat_file(manifest).decode())
    forged = Version(**{**vars(version), "step": 99})
    system.pipe_file(manifest, forged.to_text().encode())
    with pytest.raises(CorruptFileError, match="version 2 is not the one from which version 3"):
        following(url).update(zeros(state))


@only_local
def test_a_hole_is_named_unless_a_keyframe_follows_it(url):
    state = make_state()
    publish(url, state, range(5), keyframe_every=3)
    served = zeros(state)
    system, files = files_of(url)
    system.rm([path for path in files if "v00000002" in path])
    following(url).update(served)
    assert_equal(served, state)
    system.rm([path for path in files if "v00000004" in path])
    with pytest.raises(CorruptFileError, match="version 4 is missing; version 5 needs it"):
        following(url).update(zeros(state))


def test_a_store_that_is_deleted_changes_nothing(url):
    state = make_state()
    publish(url, state, [0])
    served, follower = zeros(state), following(url)
    follower.update(served)
    publish(url, state, [1])
    before = copy_of(served)
    system, files = files_of(url)
    system.rm([path for path in files if path.endswith(".safetensors")])
    with pytest.raises(FileNotFoundError, match="incomplete; nothing was changed"):
        follower.update(served)
    system.rm([path for path in files if path.endswith(".json")])
    with pytest.raises(FileNotFoundError, match="no versions"):
        follower.update(served)
    assert_equal(served, before)
    other = make_state(5)
    publish(url, other, [7])  # another run in the same place
    follower.update(served)
    assert_equal(served, other)


def test_a_publisher_notices_that_its_store_was_deleted(url):
    state = make_state()
    with publishing(url, state) as out:
        out.publish(0)
        out.wait()
        system, files = files_of(url)
        folder = files[0].rpartition("/")[0].rpartition("/")[0]
        system.rm(folder, recursive=True)
        out.publish(1)
        with pytest.raises((InUseError, FileNotFoundError), match=r"removed|no such file"):
            out.wait()
    with pytest.raises(FileNotFoundError, match="no versions"):
        following(url).update(state)
    publish(url, state, [2])
    assert_follows(url, state)


def test_what_a_killed_publisher_left_is_removed(url):
    state = make_state()
    publish(url, state, [0])
    system, files = files_of(url)
    folder = files[0].rpartition("/")[0].rpartition("/")[0]
    system.makedirs(f"{folder}/v00000002", exist_ok=True)
    system.pipe_file(f"{folder}/v00000002/delta-00000-dead.safetensors", b"half")
    assert [v.number for v in following(url).versions()] == [1]
    publish(url, state, [1])
    assert not [path for path in system.find(folder) if "dead" in path]
    assert_follows(url, state)


def test_a_busy_publisher_drops_to_the_newest(stubborn):
    state = make_state()
    with publishing(stubborn, state) as out:
        Stubborn.gate.clear()
        step_(state, 0)
        out.publish(0)
        assert Stubborn.entered.wait(60)  # version 1 is being uploaded
        for step in range(1, 6):
            step_(state, step)
            out.publish(step)
        newest = copy_of(state)
        step_(state, 6)  # after the copy: not published
        Stubborn.gate.set()
        published = out.wait()
    assert [v.step for v in following(stubborn).versions()] == [0, 5]
    assert published.dropped == 4
    assert_follows(stubborn, newest)


def test_a_full_disk_loses_no_version(stubborn):
    state = make_state()
    publish(stubborn, state, [0])
    with publishing(stubborn, state) as out:
        Stubborn.full = True
        step_(state, 1)
        out.publish(1)
        with pytest.raises(OSError, match="No space left"):
            out.wait()
        assert [v.step for v in following(stubborn).versions()] == [0]
        Stubborn.full = False
        step_(state, 2)
        out.publish(2)
    assert [v.step for v in following(stubborn).versions()] == [0, 2]
    assert_follows(stubborn, state)


def test_an_error_is_raised_by_the_next_call(stubborn):
    state = make_state()
    with publishing(stubborn, state) as out:
        Stubborn.full = True
        out.publish(1)
        Stubborn.entered.wait(60)
        while out._thread is not None:
            out._thread.join()
        Stubborn.full = False
        with pytest.raises(OSError, match="No space left"):
            out.publish(2)
        out.publish(3)
    assert [v.step for v in following(stubborn).versions()] == [3]


def test_a_limit_of_file_sizes_stops_both_sides_cleanly(tmp_path):
    state = {"w": torch.randn(5000)}
    url = f"memory://{uuid.uuid4().hex}"
    served = zeros(state)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(work):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            work()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with publishing(tmp_path / "run", state) as out:
        out.publish(1)
        out.wait()
        state["w"] *= 1.1

        def publish_again():
            out.publish(2)
            out.wait()

        with pytest.raises(OSError, match="File too large"):
            limited(publish_again)
    assert [v.step for v in following(tmp_path / "run").versions()] == [1]
    publish_to_memory = {"w": state["w"]}
    with publishing(url, publish_to_memory) as out:
        out.publish(1)
    with pytest.raises(OSError, match="File too large"):
        limited(lambda: following(url).update(served))
    assert not served["w"].any()
    following(url).update(served)
    assert_equal(served, state)


def test_a_file_url_is_a_folder(tmp_path):
    state = make_state()
    publish(f"file://{tmp_path}/run", state, [0])
    assert_follows(tmp_path / "run", state)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keyframe_every": 0}, "keyframe_every must be a positive integer"),
        ({"keep": 0}, "keep must be a positive integer"),
        ({"keep": True}, "keep must be a positive integer"),
        ({"threads": 0}, "threads must be a positive integer"),
    ],
)
def test_bad_options_are_named(tmp_path, options, text):
    with pytest.raises(ConfigError, match=text), publishing(tmp_path / "run", {}, **options):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_published_is_named(tmp_path):
    quantized = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)
    for value, error in (
        (3, "x: expected a tensor, got int"),
        (quantized, "x: torch's quantized tensors"),
        (torch.zeros(2).to_sparse(), "x: layout"),
    ):
        state = {"x": torch.zeros(2)}
        with publishing(tmp_path / "run", state) as out:
            state["x"] = value
            with pytest.raises(UnsupportedTensorError, match=error):
                out.publish(1)
    shutil.rmtree(tmp_path / "run")
    with publishing(tmp_path / "run", {"x": torch.zeros(2)}) as out:
        with pytest.raises(ConfigError, match="step must be an integer"):
            out.publish(1.5)
        out.publish(1)
    with pytest.raises(UnsupportedTensorError, match="x: layout"):
        following(tmp_path / "run").update({"x": torch.zeros(2).to_sparse()})
    with pytest.raises(ConfigError, match="closed"):
        out.publish(2)
