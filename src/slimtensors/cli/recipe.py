"""The option of `slimtensors compress` that makes a model sparse and quantized by a recipe."""

import argparse

from slimtensors.cli import console
from slimtensors.errors import ConfigError
from slimtensors.folder import is_model
from slimtensors.recipe import Calibration, Recipe
from slimtensors.recipe.modifiers import name_of
from slimtensors.recipe.oneshot.check import needs_data

_OTHERS = ("quantize", "method", "ignore", "preset", "dialect", "max_shard_size", "threads")


def add_option(verb: argparse.ArgumentParser) -> None:
    """Add it, in a group of its own."""
    group = verb.add_argument_group("to prune and quantize a model folder")
    group.add_argument(
        "--recipe", metavar="FILE", help="a YAML file, done with --calibration if it needs data"
    )


def check(options: argparse.Namespace) -> None:
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


def run(options: argparse.Namespace) -> int:
    """Do what the recipe says, and print what that did."""
    check(options)
    console.refuse_existing(options.output, force=options.force)
    recipe = Recipe.load(options.recipe)
    needing = [name_of(modifier) for modifier in recipe.modifiers if needs_data(modifier)]
    if needing and options.calibration is None:
        raise ConfigError(f"{needing[0]}: needs a text to run the model on: --calibration FILE")
    from slimtensors.integrations.transformers.oneshot import oneshot

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
