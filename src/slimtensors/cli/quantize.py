"""The options of `slimtensors compress` that quantize a model folder."""

import argparse
import tempfile
from pathlib import Path

from slimtensors import dialects
from slimtensors.archive import Archive, Progress
from slimtensors.calibration import Calibration
from slimtensors.errors import ConfigError
from slimtensors.folder import is_model
from slimtensors.quantization import QuantizationConfig
from slimtensors.quantized_folder import (
    Rewrite,
    calibrate_folder,
    convert_folder,
    quantize_folder,
)
from slimtensors.ranks import Ranks
from slimtensors.summary import Summary


def add_options(verb: argparse.ArgumentParser) -> None:
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


def check(options: argparse.Namespace) -> None:
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


def run(options: argparse.Namespace, archive: Archive, bar: Progress, ranks: Ranks) -> Summary:
    """Quantize a folder, with data if there is some."""
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
