"""`slimtensors demo`: train a small model, or take yours, and store it in every way."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from slimtensors.archive.summary import count_noun, format_bytes, table
from slimtensors.cli import console
from slimtensors.cli.demo.run import Options, Outcome, Watch, demonstrate
from slimtensors.cli.demo.store import needed
from slimtensors.cli.demo.training import Chain
from slimtensors.errors import ConfigError
from slimtensors.report import Variant

_HEAD = ("stored as", "size", "smaller", "bits/weight", "perplexity", "save", "load", "comes back")
_STEPS, _QUICK_STEPS = 600, 8
_ABOUT_CHECKPOINTS = """
A checkpoint is the whole state of the training: weights and the two moments of each, in float32,
as a difference from an earlier one where that is smaller. 'optimizer' rounds the moments."""


EXAMPLES = (
    "slimtensors demo -o demo-output",
    "slimtensors demo --model my-model -o my-model-demo",
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    verb.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("demo-output"),
        metavar="FOLDER",
        help="where everything goes (default: demo-output)",
    )
    verb.add_argument("-f", "--force", action="store_true", help="replace what is there")
    verb.add_argument("--model", type=Path, metavar="FOLDER", help="a model, instead of a new one")
    verb.add_argument("--steps", type=int, metavar="N", help=f"steps to train (default: {_STEPS})")
    verb.add_argument("--quick", action="store_true", help="a smaller model, hardly trained")


def run(options: argparse.Namespace) -> int:
    """Print the table, a sentence of two models, and where the page is."""
    console.refuse_existing(str(options.output), force=options.force)
    usual = _QUICK_STEPS if options.quick else _STEPS
    steps = usual if options.steps is None else options.steps
    if steps < 2 or (options.steps is not None and options.model is not None):
        raise ConfigError("--steps goes without --model, and is at least 2")
    chosen = Options(options.output, options.model, steps, options.quick, options.force)
    with _quiet(), _bars() as watch:
        outcome = demonstrate(chosen, watch)
    print(_table(outcome))
    if outcome.chains:
        print(_ABOUT_CHECKPOINTS)
    for name, why in outcome.skipped.items():
        print(f"{name}: left out: {why}")
    for name, sentence in outcome.sentences.items():
        print(f"\n{name} writes: {sentence}")
    if options.quick and options.model is None:
        print("\n--quick hardly trains the model: sizes tell something, perplexities do not.")
    print(f"\nLook at {options.output / 'report.html'} in a browser; the models are beside it.")
    is_exact = all(v.is_exact for v in outcome.report.variants if v.name in ("dense", "lossless"))
    return 0 if is_exact and all(chain.is_exact for chain in outcome.chains) else 1


def _table(outcome: Outcome) -> str:
    rows = [_row(variant) for variant in outcome.report.variants]
    rows += [_chain_row(chain) for chain in outcome.chains]
    return table(_HEAD, rows, left=1)


def _row(variant: Variant) -> tuple[str, ...]:
    seen = variant.measured
    back = "same bits" if variant.is_exact else f"error {variant.error:.2%}"
    return (
        variant.name,
        format_bytes(variant.stored_bytes),
        f"{variant.dense_bytes / variant.stored_bytes:.2f}x",
        f"{8 * variant.stored_bytes / variant.items:.2f}",
        f"{seen['perplexity']:.3f}" if "perplexity" in seen else "-",
        _time(seen["save_seconds"]),
        _time(seen["load_seconds"]),
        back,
    )


def _chain_row(chain: Chain) -> tuple[str, ...]:
    return (
        f"{count_noun(len(chain.links), 'checkpoint')}, {chain.profile}",
        format_bytes(chain.bytes),
        f"{chain.dense_bytes / chain.bytes:.2f}x",
        "-",
        "-",
        _time(chain.save_seconds),
        _time(chain.load_seconds),
        _back(chain),
    )


def _back(chain: Chain) -> str:
    if not chain.is_exact:
        return "DIFFERENT"
    error = chain.moment_error
    return f"same weights, moments {error:.2%}" if error else "same bits"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


@contextmanager
def _bars() -> Iterator[Watch]:
    """Show one bar for training and one for storing, if somebody is looking."""
    with _bar("train", "step") as training, _bar("store", "way") as storing:

        def on_step(step: int, steps: int, loss: float) -> None:
            training.total, training.n = steps, step
            training.set_postfix(loss=f"{loss:.3f}")

        def on_variant(name: str, number: int, count: int) -> None:
            storing.total, storing.n = count, number
            storing.set_description(f"store {name}")

        yield Watch(on_step, on_variant)


def _bar(what: str, unit: str) -> "tqdm[NoReturn]":
    return tqdm(desc=what, unit=unit, file=sys.stderr, disable=not sys.stderr.isatty(), leave=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from talking in between, and leave it as it was."""
    logging = needed().utils.logging
    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()
