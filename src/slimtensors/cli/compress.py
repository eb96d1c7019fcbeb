"""`slimtensors compress`: make a file or a model folder smaller."""

import argparse
import tempfile
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
    is_model,
    match_globs,
    restrict_to,
)
from slimtensors.folder.convert import Rewrite, convert_folder
from slimtensors.folder.processes import ProcessGroup
from slimtensors.folder.quantize import quantize_folder
from slimtensors.quantization import QuantizationConfig
from slimtensors.recipe import Calibration, Recipe
from slimtensors.recipe.oneshot import needs_data
from slimtensors.recipe.recipe import modifier_name
from slimtensors.storage import parse_size


def add_quantize_options(verb: argparse.ArgumentParser) -> None:
    """Add them, in a group of their own."""
    group = verb.add_argument_group("to quantize a model folder")
    group.add_argument("--quantize", metavar="SCHEME", help="W4A16, FP8_DYNAMIC, ..., or a file")
    group.add_argument("--method", choices=("rtn", "gptq"), help="how to round (default: rtn)")
    group.add_argument(
        "--calibration", metavar="FILE", help="a text, jsonl, csv or tsv to run the model on"
    )
    group.add_argument("--work", metavar="FOLDER", help="where a killed run can go on from")
    group.add_argument(
        "--ignore",
        action="append",
        metavar="LAYER",
        help="a layer, or re:PATTERN, to leave as it is (default: lm_head)",
    )


def check_quantize(options: argparse.Namespace) -> None:
    """Raise if options do not go together."""
    needs = ("method", "calibration", "work", "ignore")
    if options.quantize is None:
        for name in needs:
            if getattr(options, name) is not None:
                also = " or --recipe" if name in ("calibration", "work") else ""
                raise ConfigError(f"--{name} goes with --quantize{also}")
        return
    if options.dry_run or options.only or options.skip:
        raise ConfigError("--quantize goes with --ignore, not with --dry-run, --only or --skip")
    if options.preset is not None:
        raise ConfigError("--quantize and --preset are two ways to store weights; choose one")
    if not is_model(options.source):
        raise ConfigError(f"{options.source}: only model folders can be quantized")
    if (options.method == "gptq" or options.work) and options.calibration is None:
        raise ConfigError("--method gptq and --work need --calibration FILE")


def run_quantize(
    options: argparse.Namespace, archive: Archive, bar: Progress, ranks: ProcessGroup
) -> Summary:
    """Quantize a folder, with data if there is some."""
    from slimtensors.transformers.calibrate import calibrate_folder

    config = _config(options)
    dialect = options.dialect or "compressed-tensors"
    dialects.find(dialect)  # raises if there is none, before the model runs
    how = Rewrite(options.max_shard_size, options.force, options.threads, bar, ranks=ranks)
    if options.calibration is None:
        return quantize_folder(options.source, options.output, config, dialect=dialect, how=how)
    text, method = options.calibration, options.method or "rtn"
    amount = Calibration(work=options.work)
    if dialect == "compressed-tensors":
        return calibrate_folder(
            options.source,
            options.output,
            config,
            text,
            method=method,
            calibration=amount,
            how=how,
        )
    beside = None
    if "://" not in options.output:
        beside = Path(options.output).absolute().parent
        beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=beside) as folder:
        first = Path(folder) / "quantized"
        calibrate_folder(options.source, first, config, text, method=method, calibration=amount)
        return convert_folder(first, options.output, to="slim", how=how)


def _config(options: argparse.Namespace) -> QuantizationConfig:
    ignore = options.ignore if options.ignore is not None else ["lm_head"]
    if Path(options.quantize).is_file():
        config = QuantizationConfig.parse_file(options.quantize)
        config.ignore += options.ignore or []
        return config
    return QuantizationConfig.preset(options.quantize, ignore=ignore)


_OTHERS = ("quantize", "method", "ignore", "preset", "dialect", "max_shard_size", "threads")


def add_recipe_option(verb: argparse.ArgumentParser) -> None:
    """Add it, in a group of its own."""
    group = verb.add_argument_group("to prune and quantize a model folder")
    group.add_argument(
        "--recipe", metavar="FILE", help="a YAML file, done with --calibration if it needs data"
    )


def check_recipe_options(options: argparse.Namespace) -> None:
    """Raise if options do not go with a recipe."""
    for name in _OTHERS:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --recipe")
    if options.dry_run or options.only or options.skip:
        raise ConfigError("--recipe does not go with --dry-run, --only or --skip")
    if options.output is None:
        raise ConfigError("compress needs -o")
    if not is_model(options.source):
        raise ConfigError(f"{options.source}: a recipe is for model folders")


def run_recipe(options: argparse.Namespace) -> int:
    """Do what the recipe says, and print what that did."""
    check_recipe_options(options)
    console.refuse_existing(options.output, force=options.force)
    recipe = Recipe.load(options.recipe)
    needing = [modifier_name(modifier) for modifier in recipe.modifiers if needs_data(modifier)]
    if needing and options.calibration is None:
        raise ConfigError(f"{needing[0]}: needs a text to run the model on: --calibration FILE")
    from slimtensors.transformers.oneshot import oneshot

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


def add_to(verbs: "console.Verbs") -> None:
    """Add the verb."""
    verb = console.new_verb(
        verbs,
        "compress",
        "compress a safetensors file or a model folder",
        "slimtensors compress my-model -o my-model-slim",
        "slimtensors compress my-model --dry-run --preset extreme",
        "slimtensors compress my-model --quantize W4A16 --ignore lm_head -o my-model-w4a16",
        "slimtensors compress my-model --quantize W4A16 --method gptq --calibration text.txt -o w4",
        "slimtensors compress s3://bucket/model.safetensors --skip '*.bias' -o small.safetensors",
    )
    console.add_source(verb)
    console.add_target(verb, required=False)
    verb.add_argument(
        "--preset", help=f"{', '.join(presets.PRESETS)} (default: lossless, exact and small)"
    )
    verb.add_argument(
        "--dialect", help=f"{', '.join(dialects.names())} (default: slim, or what --quantize needs)"
    )
    add_quantize_options(verb)
    add_recipe_option(verb)
    console.add_shard_size(verb)
    verb.add_argument("--dry-run", action="store_true", help="tell the sizes, write nothing")
    console.add_filters(verb, "compress")
    console.add_threads(verb)
    add_timeout(verb)
    console.add_json(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compress, then say how much smaller it is."""
    with process_group(options) as ranks:
        if options.recipe is not None:
            if ranks.count > 1:
                raise ConfigError("a recipe is done by one process: run it without torchrun")
            return run_recipe(options)
        total, summary = _run(options, ranks)
        if ranks.rank == 0:
            _report(options, total, summary)
    return 0


def _run(options: argparse.Namespace, ranks: ProcessGroup) -> tuple[int, Summary]:
    """Return how many bytes there were, and what they became."""
    check_quantize(options)
    if not options.dry_run and options.output is None:
        raise ConfigError("compress needs -o, or --dry-run")
    if ranks.count > 1 and (options.dry_run or options.calibration or not is_model(options.source)):
        raise ConfigError("many processes compress a model folder, without data and for real")
    if not options.dry_run and ranks.rank == 0:  # to the others, what rank 0 begins is there
        console.refuse_existing(options.output, force=options.force)
    with Archive(options.source) as archive:
        check_globs(archive, options.only + options.skip)
        parse_size(options.max_shard_size)
        total = console.dense_bytes(archive)
        with rank_progress(total, "compress", ranks) as bar:
            run = run_quantize if options.quantize else _compress
            return total, run(options, archive, bar, ranks)


def _report(options: argparse.Namespace, total: int, summary: Summary) -> None:
    if options.json:
        console.print_json(summary.to_json())
    elif not options.quiet:
        sizes = f"{format_bytes(total)} -> {format_bytes(summary.stored_bytes)}"
        print(summary if options.calibration is None else sizes)
        signed = [tensor.name for tensor in summary.tensors if "-0.0" in tensor.note]
        if signed:
            what = count_noun(len(signed), "tensor")
            print(f"{what} with -0.0 among the zeros, kept as values: {signed[0]} ...")


def _compress(
    options: argparse.Namespace, archive: Archive, bar: Progress, ranks: ProcessGroup
) -> Summary:
    dialect = options.dialect or "slim"
    keep = match_globs(options.only, options.skip)
    preset = options.preset or presets.default(dialect)
    choose = restrict_to(presets.find(preset), keep)
    if options.dry_run:
        return estimate(
            archive, preset=choose, dialect=dialect, threads=options.threads, progress=bar
        )
    if is_model(options.source):
        return compress_folder(
            options.source,
            options.output,
            preset=preset,
            dialect=dialect,
            keep=keep,
            max_shard_size=options.max_shard_size,
            replace=options.force,
            threads=options.threads,
            progress=bar,
            ranks=ranks,
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
