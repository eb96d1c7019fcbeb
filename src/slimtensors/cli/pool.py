"""`slimtensors pool`: keep many models in one folder, with their equal tensors stored once."""

import argparse
import sys
from collections.abc import Callable

from slimtensors.archive.summary import count_noun, format_bytes, format_table
from slimtensors.cli import console
from slimtensors.errors import ConfigError, shorten_list
from slimtensors.storage import LocalLocation, local_path
from slimtensors.sync import Pool
from slimtensors.tensor import Json

EXAMPLES = (
    "slimtensors pool add my-pool my-model my-finetune another-finetune",
    "slimtensors pool list my-pool",
    "slimtensors pool get my-pool my-finetune -o restored",
    "slimtensors pool remove my-pool another-finetune",
)

_Action = Callable[[argparse.Namespace], tuple[Json, str, int]]
"""Returns the result as JSON and as text, and the exit code."""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    actions = verb.add_subparsers(metavar="ACTION", required=True)

    def add_action(name: str, help: str, act: _Action) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        action.add_argument("pool", metavar="POOL", help="the folder of the pool")
        action.set_defaults(act=act)
        return action

    add = add_action("add", "add model folders; the pool is created if necessary", _add)
    add.add_argument("models", metavar="MODEL", nargs="+", help="a model folder")
    add.add_argument("--name", help="name in the pool (default: the name of the folder)")
    add.add_argument(
        "--base", metavar="NAME", help="store differences from this member (default: automatic)"
    )
    get = add_action("get", "write a model as it was added, byte for byte", _get)
    get.add_argument("name", metavar="NAME", help="name of the member")
    get.add_argument("-o", "--output", required=True, help="folder to write")
    get.add_argument("-f", "--force", action="store_true", help="replace an existing folder")
    listing = add_action("list", "list the models of a pool and what each costs", _list)
    remove = add_action("remove", "remove models, and what only they need", _remove)
    remove.add_argument("names", metavar="NAME", nargs="+", help="name of a member")
    clean = add_action("clean", "remove leftovers of interrupted processes", _clean)
    verify = add_action("verify", "decode all tensors and check their digests", _verify)
    for action in (add, get, verify):
        console.add_threads(action)
    for action in (add, get, listing, remove, clean, verify):
        console.add_json(action)


def run(options: argparse.Namespace) -> int:
    """Run the action and print its result."""
    result, text, code = options.act(options)
    if options.json:
        console.print_json(result)
    elif text:
        print(text)
    return int(code)


def _add(options: argparse.Namespace) -> tuple[Json, str, int]:
    if options.name is not None and len(options.models) > 1:
        raise ConfigError("--name can be used with one MODEL only")
    pool = Pool(options.pool)
    rows, lines = [], []
    for model in options.models:
        with console.progress(2 * _folder_bytes(model), "add") as bar:
            added = pool.add(
                model,
                name=options.name,
                base=options.base,
                threads=options.threads,
                progress=bar,
            )
        member = added.member
        rows.append(
            {
                "name": member.name,
                "bytes": member.size,
                "stored_bytes": added.stored_bytes,
                "tensors": len(member.named),
                "new_tensors": added.new_tensors,
                "base": member.base,
                "left_out": list(added.left_out),
            }
        )
        size = f"{format_bytes(member.size)} -> {format_bytes(added.stored_bytes)}"
        new = f"{added.new_tensors} of {count_noun(len(member.named), 'tensor')} new"
        base = f", differences from {member.base}" if member.base else ""
        lines.append(f"{member.name}: {size}, {new}{base}")
        if added.left_out:
            hidden = f"hidden files left out: {shorten_list(added.left_out)}"
            print(f"slimtensors: {model}: {hidden}", file=sys.stderr)
    return {"added": rows}, "\n".join(lines), 0


def _folder_bytes(model: str) -> int:
    folder = local_path(model)
    if not folder.is_dir():
        return 0  # `add` raises
    return sum((folder / name).stat().st_size for name in LocalLocation(folder).walk())


def _get(options: argparse.Namespace) -> tuple[Json, str, int]:
    pool = Pool(options.pool)
    member = pool.member(options.name)
    console.refuse_existing(options.output, options.pool, force=options.force)
    with console.progress(member.size, "get") as bar:
        pool.get(
            options.name,
            options.output,
            replace=options.force,
            threads=options.threads,
            progress=bar,
        )
    text = f"{options.output}: {count_noun(len(member.files), 'file')}, {format_bytes(member.size)}"
    return {"name": member.name, "files": len(member.files), "bytes": member.size}, text, 0


def _list(options: argparse.Namespace) -> tuple[Json, str, int]:
    pool = Pool(options.pool)
    own, stored = pool.own_bytes(), pool.stored_bytes()
    members = pool.members()
    total = sum(m.size for m in members)
    share = f" ({stored / total:.1%})" if total else ""
    rows = [
        (m.name, m.base or "-", format_bytes(m.size), format_bytes(own.get(m.name, 0)))
        for m in members
    ]
    table = format_table(("model", "base", "size", "needed by it alone"), rows, left=2)
    text = f"{table}\n{count_noun(len(members), 'model')}: {format_bytes(total)}"
    text += f" -> {format_bytes(stored)}{share}"
    described = [
        {"name": m.name, "bytes": m.size, "own_bytes": own.get(m.name, 0), "base": m.base}
        for m in members
    ]
    return {"members": described, "bytes": total, "stored_bytes": stored}, text, 0


def _remove(options: argparse.Namespace) -> tuple[Json, str, int]:
    pool = Pool(options.pool)
    freed = sum(pool.remove(name) for name in options.names)
    result = {"removed": options.names, "freed_bytes": freed}
    return (
        result,
        f"{count_noun(len(options.names), 'model')} removed, {format_bytes(freed)} freed",
        0,
    )


def _clean(options: argparse.Namespace) -> tuple[Json, str, int]:
    freed = Pool(options.pool).clean()
    return {"removed": [], "freed_bytes": freed}, f"{format_bytes(freed)} freed", 0


def _verify(options: argparse.Namespace) -> tuple[Json, str, int]:
    pool = Pool(options.pool)
    with console.progress(pool.stored_bytes(), "verify") as bar:
        found = pool.verify(threads=options.threads, progress=bar)
    for message in found.damaged:
        print(f"slimtensors: {message}", file=sys.stderr)
    counts = f"{count_noun(found.members, 'model')}, {count_noun(found.objects, 'object')}"
    verdict = f"{len(found.damaged)} damaged" if found.damaged else "all intact"
    result = {"members": found.members, "objects": found.objects, "damaged": found.damaged}
    return result, f"{counts}: {verdict}", 3 if found.damaged else 0
