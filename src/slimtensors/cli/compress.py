"""`slimtensors compress`: make a file or a model folder smaller."""

import argparse
from dataclasses import replace
from pathlib import Path

from slimtensors.archive import Archive, Progress, dialects, estimate, save
from slimtensors.archive.summary import Summary, count_noun, format_bytes
from slimtensors.cli import console
from slimtensors.cli.console import add_timeout, process_group, rank_progress
from slimtensors.codecs import presets
from slimtensors.errors import ConfigError
from slimtensors.folder.compress import (
    check_globs,
    compress_folder,
    is_model_folder,
    match_globs,
    restrict_to,
)
from slimtensors.folder.config_json import COMPRESSED_TENSORS
from slimtensors.folder.processes import ProcessGroup
from slimtensors.folder.quantize import quantize_folder
from slimtensors.folder.weights import FolderOptions
from slimtensors.quantization import QuantizationConfig
from slimtensors.recipe import Calibration, Recipe
from slimtensors.recipe.oneshot import needs_data
from slimtensors.recipe.recipe import modifier_name
from slimtensors.storage import parse_size


def add_quantize_options(verb: argparse.ArgumentParser) -> None:
    """Add the options of --quantize."""
    group = verb.add_argument_group("quantization of a model folder")
    group.add_argument(
        "--quantize", metavar="SCHEME", help="W4A16, FP8_DYNAMIC, ..., or a config file"
    )
    group.add_argument(
        "--group-size",
        metavar="N",
        help="weights that share a scale: a number, or 'channel' (default: as in the scheme, or"
        " less if that does not fit a layer)",
    )
    group.add_argument("--method", choices=("rtn", "gptq"), help="rounding method (default: rtn)")
    group.add_argument(
        "--calibration", metavar="FILE", help="calibration data: a txt, jsonl, csv or tsv file"
    )
    group.add_argument(
        "--work", metavar="FOLDER", help="store finished layers in FOLDER, to resume a killed run"
    )
    group.add_argument(
        "--ignore",
        action="append",
        metavar="LAYER",
        help="layer name or re:PATTERN not to quantize (default with --quantize: lm_head)",
    )


_OTHER_USES = {
    "calibration": ", --recipe or a budget (--target-size)",
    "work": ", --recipe or a budget (--target-size)",
    "ignore": " or a budget (--target-size)",
}
"""Options of --quantize that others take too."""


def check_quantize(options: argparse.Namespace) -> None:
    """Raise if the options of --quantize are incomplete or contradict each other."""
    dependent = ("group_size", "method", "calibration", "work", "ignore")
    if options.heal is not None:
        raise ConfigError("--heal requires a budget (--target-size)")
    if options.quantize is None:
        for name in dependent:
            if getattr(options, name) is not None:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} requires --quantize{_OTHER_USES.get(name, '')}")
        if getattr(options, "for"):
            raise ConfigError(
                "--for vllm requires --quantize; vLLM loads other folders as they are"
            )
        return
    if options.dry_run or options.only or options.skip:
        raise ConfigError("--quantize takes --ignore, not --dry-run, --only or --skip")
    if options.preset is not None:
        raise ConfigError("--quantize cannot be combined with --preset")
    if getattr(options, "for") and options.dialect not in (None, COMPRESSED_TENSORS):
        raise ConfigError(f"--for vllm requires the dialect {COMPRESSED_TENSORS}")
    if not is_model_folder(options.source):
        raise ConfigError(f"{options.source}: --quantize requires a model folder")
    if (options.method == "gptq" or options.work) and options.calibration is None:
        raise ConfigError("--method gptq and --work require --calibration FILE")


def run_quantize(
    options: argparse.Namespace, archive: Archive, bar: Progress, group: ProcessGroup
) -> Summary:
    """Quantize a folder, with calibration data if given."""
    config = _config(options)
    dialect = options.dialect or COMPRESSED_TENSORS
    dialects.find(dialect)  # raise for an unknown one before the model runs
    folder_options = FolderOptions(
        max_shard_size=options.max_shard_size,
        replace=options.force,
        threads=options.threads,
        progress=bar,
        ranks=group,
    )
    coded = getattr(options, "for") == "vllm"
    if options.calibration is None:
        return quantize_folder(
            archive, options.output, config, dialect=dialect, coded=coded, how=folder_options
        )
    from slimtensors.transformers.calibrate import calibrate_folder

    return calibrate_folder(
        options.source,
        options.output,
        config,
        options.calibration,
        method=options.method or "rtn",
        calibration=Calibration(work=options.work),
        dialect=dialect,
        coded=coded,
        how=folder_options,
    )


def _config(options: argparse.Namespace) -> QuantizationConfig:
    ignore = options.ignore if options.ignore is not None else ["lm_head"]
    if Path(options.quantize).is_file():
        if options.group_size is not None:
            raise ConfigError(f"--group-size applies to presets; set it in {options.quantize}")
        config = QuantizationConfig.parse_file(options.quantize)
        config.ignore += options.ignore or []
        return config
    group_size = _parse_group_size(options.group_size)
    return QuantizationConfig.preset(options.quantize, ignore=ignore, group_size=group_size)


def _parse_group_size(text: str | None) -> int | None:
    """Return a group size; -1 for `channel`."""
    if text is None or text in ("channel", "-1"):
        return None if text is None else -1
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"--group-size must be a positive number or 'channel', got {text!r}")
    return int(text)


_NOT_WITH_RECIPE = (
    "quantize",
    "group_size",
    "method",
    "ignore",
    "preset",
    "dialect",
    "for",
    "max_shard_size",
    "threads",
    "heal",
)


def add_recipe_option(verb: argparse.ArgumentParser) -> None:
    """Add --recipe."""
    group = verb.add_argument_group("pruning and quantization of a model folder")
    group.add_argument(
        "--recipe", metavar="FILE", help="YAML recipe to apply, with --calibration if it needs data"
    )


def check_recipe_options(options: argparse.Namespace) -> None:
    """Raise if an option cannot be combined with --recipe."""
    for name in _NOT_WITH_RECIPE:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} cannot be combined with --recipe")
    if options.dry_run or options.only or options.skip:
        raise ConfigError("--recipe cannot be combined with --dry-run, --only or --skip")
    if options.output is None:
        raise ConfigError("compress requires -o")
    if not is_model_folder(options.source):
        raise ConfigError(f"{options.source}: --recipe requires a model folder")


def run_recipe(options: argparse.Namespace) -> int:
    """Apply the recipe and print its report."""
    check_recipe_options(options)
    console.refuse_existing(options.output, options.source, options.base, force=options.force)
    recipe = Recipe.load(options.recipe)
    with_data = [modifier_name(modifier) for modifier in recipe.modifiers if needs_data(modifier)]
    if with_data and options.calibration is None:
        raise ConfigError(f"{with_data[0]} requires calibration data: --calibration FILE")
    from slimtensors.transformers.oneshot import oneshot

    with console.hide_transformers_progress():
        _, report = oneshot(
            options.source,
            recipe,
            options.calibration,
            output_dir=options.output,
            calibration=Calibration(work=options.work),
        )
    if options.json:
        console.print_json(report.to_json())
    elif not options.quiet:
        print(report)
    return 0


_BUDGETS = {"target_size": "size", "target_bits": "bits", "max_kl": "kl"}
"""Option -> field of `Budget`."""
_NOT_WITH_BUDGET = ("quantize", "recipe", "group_size", "method", "preset", "dialect", "for")


def add_budget_options(verb: argparse.ArgumentParser) -> None:
    """Add the options that fit a model to a budget."""
    group = verb.add_argument_group("fitting a model folder to a budget")
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--target-size", metavar="SIZE", help="bytes of all weight files, such as 60MB"
    )
    choice.add_argument(
        "--target-bits", type=float, metavar="BITS", help="bits per parameter of all weight files"
    )
    choice.add_argument(
        "--max-kl",
        type=float,
        metavar="NATS",
        help="divergence from the original model on held-out text, per token",
    )
    group.add_argument(
        "--heal",
        type=float,
        metavar="MINUTES",
        help="then tune norms, biases and row scales for this time",
    )


def find_budget(options: argparse.Namespace) -> str | None:
    """Return the name of the budget option that is given, or None."""
    return next((name for name in _BUDGETS if getattr(options, name) is not None), None)


def run_fit(options: argparse.Namespace, name: str) -> int:
    """Fit a model folder to a budget and print the report."""
    option = f"--{name.replace('_', '-')}"
    for other in _NOT_WITH_BUDGET:
        if getattr(options, other) is not None:
            raise ConfigError(f"--{other.replace('_', '-')} cannot be combined with {option}")
    if options.dry_run or options.only or options.skip:
        raise ConfigError(f"{option} takes --ignore, not --dry-run, --only or --skip")
    if options.output is None:
        raise ConfigError("compress requires -o")
    if not is_model_folder(options.source):
        raise ConfigError(f"{options.source}: {option} requires a model folder")
    from slimtensors.transformers.fit import CALIBRATION, Budget, fit

    budget = Budget(**{_BUDGETS[name]: getattr(options, name)})
    console.refuse_existing(options.output, options.source, force=options.force)
    with console.hide_transformers_progress():
        _, report = fit(
            options.source,
            budget,
            options.calibration,
            output_dir=options.output,
            calibration=replace(CALIBRATION, work=options.work),
            ignore=options.ignore or (),
            heal=options.heal,
            how=FolderOptions(
                max_shard_size=options.max_shard_size,
                replace=options.force,
                threads=options.threads,
            ),
        )
    if options.json:
        console.print_json(report.to_json())
    elif not options.quiet:
        print(report)
    return 0


EXAMPLES = (
    "slimtensors compress my-model -o my-model-slim",
    "slimtensors compress my-model --target-size 60MB --calibration text.txt -o my-model-60MB",
    "slimtensors compress my-model --dry-run --preset extreme",
    "slimtensors compress my-model --quantize W4A16 --ignore lm_head -o my-model-w4a16",
    "slimtensors compress my-model --quantize W4A16 --for vllm -o my-model-w4a16-slim",
    "slimtensors compress my-model --quantize W4A16 --method gptq --calibration text.txt -o w4",
    "slimtensors compress s3://bucket/model.safetensors --skip '*.bias' -o small.safetensors",
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    console.add_source(verb)
    console.add_target(verb, required=False)
    console.add_base(verb)
    verb.add_argument("--preset", help=f"{', '.join(presets.PRESETS)} (default: lossless)")
    verb.add_argument(
        "--dialect",
        help=f"{', '.join(dialects.names())} (default: slim; compressed-tensors with --quantize)",
    )
    verb.add_argument(
        "--for",
        choices=("vllm",),
        help="with --quantize: entropy-code what vLLM loads; it decodes with slimtensors installed",
    )
    add_quantize_options(verb)
    add_recipe_option(verb)
    add_budget_options(verb)
    console.add_shard_size(verb)
    verb.add_argument("--dry-run", action="store_true", help="print the sizes without writing")
    console.add_filters(verb, "compress")
    console.add_threads(verb)
    add_timeout(verb)
    console.add_json(verb)


def run(options: argparse.Namespace) -> int:
    """Compress, and print the sizes before and after."""
    with process_group(options) as group:
        console.require_models(options.source)
        if budget := find_budget(options):
            if group.count > 1:
                raise ConfigError("a budget needs one process; start it without torchrun")
            return run_fit(options, budget)
        if options.recipe is not None:
            if group.count > 1:
                raise ConfigError("--recipe runs in one process; start it without torchrun")
            return run_recipe(options)
        total, summary = _run(options, group)
        if group.rank == 0:
            _report(options, total, summary)
    return 0


def _run(options: argparse.Namespace, group: ProcessGroup) -> tuple[int, Summary]:
    """Return the size of the source and the summary of the result."""
    check_quantize(options)
    if not options.dry_run and options.output is None:
        raise ConfigError("compress requires -o or --dry-run")
    if group.count > 1 and (
        options.dry_run or options.calibration or not is_model_folder(options.source)
    ):
        raise ConfigError("torchrun supports model folders only, not --calibration or --dry-run")
    if not options.dry_run and group.rank == 0:  # rank 0 creates what the others would find
        console.refuse_existing(options.output, options.source, force=options.force)
    with console.open_model(options) as archive:
        check_globs(archive, options.only + options.skip)
        parse_size(options.max_shard_size)
        total = console.dense_bytes(archive)
        if options.calibration is not None:  # shows the progress of layers
            with console.hide_transformers_progress():
                return total, run_quantize(options, archive, lambda nbytes: None, group)
        with rank_progress(total, "compress", group) as bar:
            compress = run_quantize if options.quantize else _compress
            return total, compress(options, archive, bar, group)


def _report(options: argparse.Namespace, total: int, summary: Summary) -> None:
    if options.json:
        console.print_json(summary.to_json())
    elif not options.quiet:
        sizes = f"{format_bytes(total)} -> {format_bytes(summary.stored_bytes)}"
        print(summary if options.calibration is None else sizes)
        if summary.quantization is not None:
            print(summary.quantization)
        signed = [tensor.name for tensor in summary.tensors if "-0.0" in tensor.note]
        if signed:
            count = count_noun(len(signed), "tensor")
            print(f"{count} with -0.0, stored as nonzero values: {signed[0]} ...")


def _compress(
    options: argparse.Namespace, archive: Archive, bar: Progress, group: ProcessGroup
) -> Summary:
    dialect = options.dialect or "slim"
    keep = match_globs(options.only, options.skip)
    if is_model_folder(options.source) and not options.dry_run:
        return compress_folder(
            archive,
            options.output,
            preset=options.preset,
            dialect=dialect,
            keep=keep,
            max_shard_size=options.max_shard_size,
            replace=options.force,
            threads=options.threads,
            progress=bar,
            ranks=group,
        )
    choose = restrict_to(presets.find(options.preset or presets.default(dialect)), keep)
    if options.dry_run:
        return estimate(
            archive, preset=choose, dialect=dialect, threads=options.threads, progress=bar
        )
    return save(
        archive,
        options.output,
        preset=choose,
        dialect=dialect,
        max_shard_size=options.max_shard_size,
        threads=options.threads,
        progress=bar,
    )
