"""`slimtensors sync`: publish versions of a model, follow them, list them."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from slimtensors.archive import Archive, save
from slimtensors.archive.summary import format_bytes
from slimtensors.cli import console
from slimtensors.errors import ConfigError
from slimtensors.storage import check_separate, local_path, locate
from slimtensors.sync import Follower, Update, Version, following, publishing

EXAMPLES = (
    "slimtensors sync publish my-model s3://bucket/run --step 100",
    "slimtensors sync follow s3://bucket/run served-model --interval 5",
    "slimtensors sync list s3://bucket/run",
)

_MAX_SHARD = "5GB"


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    actions = verb.add_subparsers(metavar="ACTION", required=True)
    _add_publish(actions.add_parser("publish", help="write a model as the next version"))
    _add_follow(actions.add_parser("follow", help="bring a file or folder to the newest version"))
    _add_list(actions.add_parser("list", help="list the versions of a store"))


def run(options: argparse.Namespace) -> int:
    """Run one of the actions."""
    action: Callable[[argparse.Namespace], int] = options.action
    return action(options)


def _add_publish(action: argparse.ArgumentParser) -> None:
    console.add_source(action)
    _add_store(action)
    action.add_argument(
        "--step", type=int, metavar="N", help="step (default: the version's number)"
    )
    action.add_argument(
        "--keyframe",
        action="store_true",
        help="write a version that can be read alone, also of another structure",
    )
    action.add_argument(
        "--keyframe-every", type=int, default=50, metavar="N", help="versions per keyframe (50)"
    )
    action.add_argument(
        "--keep", type=int, metavar="N", help="newest versions to keep (default: all)"
    )
    action.add_argument(
        "--takeover", action="store_true", help="replace a publisher that was killed"
    )
    console.add_threads(action)
    _add_common(action)
    action.set_defaults(action=_publish)


def _add_follow(action: argparse.ArgumentParser) -> None:
    _add_store(action)
    action.add_argument("target", help="a safetensors file or model folder to keep up to date")
    action.add_argument("--once", action="store_true", help="update once and exit")
    action.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between requests (1)"
    )
    console.add_threads(action)
    _add_common(action)
    action.set_defaults(action=_follow)


def _add_list(action: argparse.ArgumentParser) -> None:
    _add_store(action)
    _add_common(action)
    action.set_defaults(action=_list)


def _add_store(action: argparse.ArgumentParser) -> None:
    action.add_argument("store", help="folder or URL of the versions (s3://...)")


def _add_common(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--storage-options",
        metavar="JSON",
        help="endpoint and credentials for the file system, as JSON or @FILE",
    )
    console.add_json(action)


def _publish(options: argparse.Namespace) -> int:
    console.require_models(options.source)
    check_separate(locate(options.store), [options.source])
    storage = _parse_storage(options.storage_options)
    with Archive(options.source) as archive:
        tensors = dict(archive.items(threads=options.threads))
    with publishing(
        options.store,
        tensors,
        options.keyframe_every,
        keep=options.keep,
        takeover=options.takeover,
        threads=options.threads,
        storage_options=storage,
    ) as out:
        number = 1 if out.newest is None else out.newest.number + 1
        step = number if options.step is None else options.step
        out.publish(step, keyframe=options.keyframe)
        published = out.wait()
    assert published is not None
    if options.json:
        console.print_json(published.to_json())
    else:
        print(f"{_describe(published.version)}; {published.requests} requests")
    return 0


def _follow(options: argparse.Namespace) -> int:
    if options.interval <= 0:
        raise ConfigError(f"--interval must be a number of seconds, got {options.interval:g}")
    check_separate(locate(options.target), [options.store])
    target = local_path(options.target)
    follower = following(
        options.store,
        threads=options.threads,
        storage_options=_parse_storage(options.storage_options),
    )
    if not options.once:
        _await_first(follower, options.interval)
    tensors = _read_target(target)
    while True:
        if tensors is None:
            update, tensors = follower.load()
        else:
            update = follower.update(tensors)
        if update.tensors:
            _write_target(tensors, target, options.threads)
        if update.tensors or options.once:
            _print_update(update, as_json=options.json)
        if options.once:
            return 0
        time.sleep(options.interval)


def _list(options: argparse.Namespace) -> int:
    follower = following(options.store, storage_options=_parse_storage(options.storage_options))
    versions = follower.versions()
    if options.json:
        rows = [version.to_json() for version in versions]
        console.print_json({"versions": rows, "requests": follower.traffic.requests})
        return 0
    for version in versions:
        print(_describe(version))
    return 0


def _await_first(follower: Follower, interval: float) -> None:
    """Wait until a store has a version; a message says so."""
    is_waiting = False
    while True:
        try:
            follower.versions()
        except FileNotFoundError as error:
            if not is_waiting:
                print(f"slimtensors: {error}; waiting", file=sys.stderr)
            is_waiting = True
            time.sleep(interval)
        else:
            return


def _read_target(target: Path) -> dict[str, Tensor] | None:
    """Return the tensors of an existing file or folder, None if there are none."""
    if not target.exists() or (target.is_dir() and not any(target.glob("*.safetensors"))):
        return None
    with Archive(target) as archive:
        return dict(archive.items())


def _write_target(tensors: dict[str, Tensor], target: Path, threads: int | None) -> None:
    shards = None if target.suffix == ".safetensors" else _MAX_SHARD
    save(tensors, target, preset="dense", max_shard_size=shards, threads=threads)


def _print_update(update: Update, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(update.to_json()), flush=True)
        return
    kind = "from a keyframe" if update.from_keyframe else f"by {update.versions} deltas"
    change = f"{update.tensors} tensors changed {kind}" if update.versions else "up to date"
    size = format_bytes(update.bytes)
    print(
        f"version {update.number} (step {update.step}): {change}; {size},"
        f" {update.requests} requests",
        flush=True,
    )


def _describe(version: Version) -> str:
    sizes = []
    if version.delta_bytes is not None:
        bits = version.bits_per_change
        rate = f", {bits:.1f} bits per change" if bits is not None else ""
        share = version.changed / version.items if version.items else 0.0
        sizes.append(f"delta {format_bytes(version.delta_bytes)} ({share:.2%} changed{rate})")
    if version.keyframe_bytes is not None:
        sizes.append(f"keyframe {format_bytes(version.keyframe_bytes)}")
    return f"version {version.number} (step {version.step}): {', '.join(sizes)}"


def _parse_storage(text: str | None) -> dict[str, Any] | None:
    """Return the options of a file system from JSON, or from a JSON file after `@`."""
    if text is None:
        return None
    try:
        data = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except ValueError as error:
        raise ConfigError(f"--storage-options: invalid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError("--storage-options: expected a JSON object")
    return data
