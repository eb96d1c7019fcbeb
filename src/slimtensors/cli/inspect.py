"""`slimtensors inspect`: list the tensors of a file or folder and what each costs."""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from slimtensors.archive import Archive
from slimtensors.archive.bases import describe_delta, is_resolvable
from slimtensors.archive.summary import (
    Summary,
    TensorSummary,
    count_noun,
    format_bytes,
    format_markdown,
    format_table,
)
from slimtensors.checkpoint import Point, find_unreadable, is_run, points, state_file
from slimtensors.checkpoint.manifest import UNSEALED
from slimtensors.cli import console
from slimtensors.errors import ConfigError
from slimtensors.folder.compress import check_globs, match_globs
from slimtensors.folder.config_json import read_config
from slimtensors.report import (
    Report,
    collect,
    collect_run,
    is_report,
    new_report,
    read_fit_report,
    read_recipe,
    read_report,
    write_page,
)
from slimtensors.storage import is_distributed
from slimtensors.tensor import Json

_CARD_HEAD = ("stored as", "tensors", "dense", "stored", "bits per weight", "largest error")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(summary: Summary, listing: str, config: Json) -> str:
    """Return front matter for the hub, a table of sizes and errors, and the folded `listing`."""
    kinds: dict[str, list[TensorSummary]] = defaultdict(list)
    for tensor in summary.tensors:
        kinds[tensor.codec.partition("(")[0]].append(tensor)
    rows = [_card_row(kind, tensors) for kind, tensors in sorted(kinds.items()) if kind != "tied"]
    total = _card_row("total", [t for t in summary.tensors if t.codec != "tied"])
    table = format_markdown(_CARD_HEAD, [*rows, total], left=1)
    folded = f"<details><summary>Every tensor</summary>\n\n{listing}\n\n</details>"
    return f"{_front_matter(config)}\n\n{table}\n\n{folded}"


def _front_matter(config: Json) -> str:
    base = str(config.get("_name_or_path", ""))
    named = f"base_model: {base}" if _HUB_NAME.fullmatch(base) else "# base_model: OWNER/NAME"
    lines = [named, "base_model_relation: quantized", "tags:", "- slimtensors"]
    return "\n".join(["---", *lines, "---"])


def _card_row(kind: str, tensors: list[TensorSummary]) -> tuple[str, ...]:
    items = sum(t.items for t in tensors)
    stored = sum(t.stored_bytes for t in tensors)
    errors = [t.error for t in tensors if t.error is not None]
    return (
        kind,
        str(len(tensors)),
        format_bytes(sum(t.dense_bytes for t in tensors)),
        format_bytes(stored),
        f"{8 * stored / items:.2f}" if items else "",
        f"{max(errors):.2%}" if errors else "none",
    )


_HEAD = ("tensor", "dtype", "shape", "codec", "stored", "dense", "bits/item", "bound")


EXAMPLES = ("slimtensors inspect my-model-slim --only '*.mlp.*'",)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    console.add_source(verb)
    console.add_base(verb)
    console.add_filters(verb, "show")
    verb.add_argument("--parts", action="store_true", help="show the size of each part")
    verb.add_argument(
        "--bound",
        action="store_true",
        help="show the order-0 entropy in bits per item (reads all data)",
    )
    console.add_threads(verb)
    form = verb.add_mutually_exclusive_group()
    console.add_json(form)
    form.add_argument("--markdown", action="store_true", help="print a section for a model card")
    form.add_argument("--html", metavar="FILE", help="write a report page (reads all data)")
    verb.add_argument(
        "--against", metavar="OTHER", help="original model to measure errors against, for --html"
    )
    verb.add_argument("-f", "--force", action="store_true", help="replace an existing page")


def run(options: argparse.Namespace) -> int:
    """Print the table, or write the report page."""
    if options.base is not None and (options.html is not None or is_run(options.source)):
        raise ConfigError("--base applies to the list of tensors of a delta")
    if options.html is not None:
        return _page(options)
    if options.against is not None or options.force:
        raise ConfigError("--against and --force require --html")
    if is_run(options.source):
        return _run_folder(options)
    if is_report(options.source) or _recipe(options.source):
        raise ConfigError(f"{options.source} is a report; use --html FILE to make a page of it")
    summary = _distributed(options) if is_distributed(options.source) else _archive(options)
    is_fitted = any("trellis" in tensor.codec for tensor in summary.tensors)
    fit = read_fit_report(options.source) if is_fitted else None
    delta = _find_base(options)
    if options.json:
        extra = {"fit": fit, "delta": delta}
        console.print_json(
            summary.to_json() | {key: value for key, value in extra.items() if value}
        )
        return 0
    layout = format_markdown if options.markdown else format_table
    rows = [*_rows(summary, with_parts=options.parts), _total(summary)]
    columns = len(_HEAD) if options.bound else len(_HEAD) - 1
    listing = layout(_HEAD[:columns], [row[:columns] for row in rows], left=4)
    loss = _describe_fit(fit) if fit else []
    loss += [_describe_delta(delta)] if delta else []
    if options.markdown:
        card = model_card(summary, listing, read_config(options.source))
        print("\n\n".join([card, *(["\n".join(f"- {line}" for line in loss)] if loss else [])]))
    else:
        print("\n".join([listing, *loss]))
    return 0


def _find_base(options: argparse.Namespace) -> Json | None:
    """Return what a delta needs and the base that is found; None if the source is not a delta."""
    archive = None
    if not is_distributed(options.source):
        archive = Archive(state_file(options.source))
    if archive is None or not is_resolvable(archive):
        if options.base is not None:
            raise ConfigError(f"{options.source} is not a delta that needs a base; omit --base")
        return None
    return describe_delta(archive, options.base)


def _describe_delta(delta: Json) -> str:
    """Return a line about the base of a delta."""
    need = f"{count_noun(delta['needed'], 'tensor')}, digest {delta['digest']}"
    found = delta["found"]
    if not delta["needed"]:
        return "delta: no tensor needs the base"
    where = f"{found['path']} (found by: {found['found_by']})" if found else "not found"
    return f"delta of {delta['base'] or 'another model'} ({need}); base: {where}"


def _describe_fit(fit: Json) -> list[str]:
    """Return lines about the budget of a fitted model, and its predicted and measured loss."""
    budget = fit["budget"]
    limits = {
        "size": lambda x: f"{format_bytes(x) if isinstance(x, int) else x} of weight files",
        "bits": lambda x: f"{x} bits per parameter",
        "kl": lambda x: f"a KL divergence of {x}",
    }
    goals = [limits[key](value) for key, value in budget.items() if key in limits]
    lines = [
        f"budget: {', '.join(goals) or 'unknown'}; used: {format_bytes(fit['weight_bytes'])},"
        f" {fit['bits_per_parameter']:.3f} bits per parameter"
    ]
    if fit["predicted_kl"] is not None:
        lines.append(f"predicted loss: KL {fit['predicted_kl']:.3g}")
    found = fit["measured"]
    parts = []
    if found is not None and found["kl"] is not None:
        parts.append(f"KL {found['kl']:.3g} on {found['predictions']:,} held-out predictions")
    if found is not None and found["perplexity"] is not None:
        parts.append(f"perplexity {found['perplexity_before']:.2f} -> {found['perplexity']:.2f}")
    if found is not None and found["top1_agreement"] is not None:
        parts.append(f"top-1 agreement {found['top1_agreement']:.1%}")
    if found is not None and found["acceptance_rate"] is not None:
        parts.append(f"acceptance rate {found['acceptance_rate']:.1%}")
    return [*lines, f"measured loss: {', '.join(parts) or 'unknown'}"]


def _archive(options: argparse.Namespace) -> Summary:
    keep = match_globs(options.only, options.skip)
    with Archive(state_file(options.source)) as archive:
        check_globs(archive, options.only + options.skip)
        kept = archive.select(name for name in archive if keep(name))
        return _bounds(kept, options.threads) if options.bound else kept.summary()


def _distributed(options: argparse.Namespace) -> Summary:
    from slimtensors.checkpoint import distributed  # slow: imports torch.distributed

    if options.bound or options.markdown:
        raise ConfigError(f"{options.source} is a distributed checkpoint; consolidate it first")
    keep = match_globs(options.only, options.skip)
    summary = distributed.inspect(options.source)
    check_globs([t.name for t in summary.tensors], options.only + options.skip)
    return Summary([t for t in summary.tensors if keep(t.name)], summary.files)


def _page(options: argparse.Namespace) -> int:
    """Write the report page."""
    console.refuse_existing(options.html, options.source, options.against, force=options.force)
    write_page(_report(options), options.html)
    print(f"{options.html}: open it in a browser")
    return 0


def _report(options: argparse.Namespace) -> Report:
    source = options.source
    recipe = _recipe(source)
    if not (is_report(source) or is_run(source) or recipe):
        return _collect(options)
    if options.only or options.skip or options.against:
        raise ConfigError(f"{source}: --only, --skip and --against apply to models only")
    if recipe:
        return replace(new_report(Path(source).resolve().parent.name, []), recipe=recipe)
    return (
        read_report(source) if is_report(source) else collect_run(source, threads=options.threads)
    )


def _recipe(source: str) -> Json | None:
    """Return the recipe report if `source` is such a file (not a folder that contains one)."""
    return read_recipe(source) if Path(source).is_file() else None


def _collect(options: argparse.Namespace) -> Report:
    with Archive(state_file(options.source)) as archive:
        check_globs(archive, options.only + options.skip)
        stored = sum(map(archive.stored_bytes, archive))
    with console.progress(2 * stored, "inspect") as bar:
        return collect(
            options.source,
            against=options.against,
            keep=match_globs(options.only, options.skip),
            threads=options.threads,
            progress=bar,
        )


def _bounds(archive: Archive, threads: int | None) -> Summary:
    stored = sum(map(archive.stored_bytes, archive))
    with console.progress(stored, "inspect") as bar:
        return archive.bounds(threads=threads, progress=bar)


def _rows(summary: Summary, *, with_parts: bool) -> Iterator[tuple[str, ...]]:
    for tensor in summary.tensors:
        yield _row(tensor)
        for part, size in tensor.parts.items() if with_parts else ():
            bits = f"{8 * size / tensor.items:.2f}" if tensor.items else ""
            yield (f"  {part}", "", "", "", format_bytes(size), "", bits, "")


def _run_folder(options: argparse.Namespace) -> int:
    """Print the checkpoints of a run and their bases."""
    if options.only or options.skip:
        raise ConfigError(f"{options.source} is a run; --only and --skip apply to one checkpoint")
    found = points(options.source)
    for name, problem in find_unreadable(options.source).items():
        print(f"slimtensors: {name}: unreadable: {problem}", file=sys.stderr)
    if options.json:
        console.print_json({"checkpoints": [_point_json(point) for point in found]})
        return 0
    for point in found:
        if not point.manifest.is_sealed:
            print(f"slimtensors: {point.name}: {UNSEALED}", file=sys.stderr)
    layout = format_markdown if options.markdown else format_table
    print(layout(_RUN_HEAD, [_point_row(point) for point in found], left=4))
    return 0


_RUN_HEAD = ("checkpoint", "kind", "profile", "base", "step", "stored", "age")


def _point_row(point: Point) -> tuple[str, ...]:
    manifest = point.manifest
    base = manifest.needed or "-"
    step = "-" if manifest.step is None else str(manifest.step)
    age = _age(datetime.now(UTC) - datetime.fromisoformat(manifest.created))
    return (
        point.name,
        manifest.kind,
        manifest.profile,
        base,
        step,
        format_bytes(manifest.bytes),
        age,
    )


def _point_json(point: Point) -> Json:
    manifest = point.manifest
    return {
        "name": point.name,
        "id": manifest.id,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "kind": manifest.kind,
        "profile": manifest.profile,
        "base": manifest.base.name if manifest.base else None,
        "pretrained": manifest.pretrained.name if manifest.pretrained else None,
        "bytes": manifest.bytes,
        "created": manifest.created,
        "metrics": dict(manifest.metrics),
        "sealed": manifest.is_sealed,
    }


def _age(elapsed: timedelta) -> str:
    seconds = elapsed.total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _row(tensor: TensorSummary) -> tuple[str, ...]:
    return (
        tensor.name,
        tensor.dtype,
        "x".join(map(str, tensor.shape)) or "scalar",
        tensor.note if tensor.codec == "tied" else tensor.codec,
        format_bytes(tensor.stored_bytes),
        format_bytes(tensor.dense_bytes),
        f"{tensor.bits_per_item:.2f}",
        "" if tensor.bound is None else f"{tensor.bound:.2f}",
    )


def _total(summary: Summary) -> tuple[str, ...]:
    sizes = format_bytes(summary.stored_bytes), format_bytes(summary.dense_bytes)
    tensors = [tensor for tensor in summary.tensors if tensor.codec != "tied"]
    items = sum(tensor.items for tensor in tensors) or 1
    bound = sum(tensor.items * (tensor.bound or 0) for tensor in tensors) / items
    bits = 8 * summary.stored_bytes / items
    return ("total", "", "", f"{summary.ratio:.2f}x", *sizes, f"{bits:.2f}", f"{bound:.2f}")
