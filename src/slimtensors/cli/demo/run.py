"""The demo from its beginning to its end, inside of one folder."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from slimtensors.archive import Archive
from slimtensors.archive.summary import format_bytes
from slimtensors.cli.demo.store import WAYS, Subject, Way, needed
from slimtensors.cli.demo.training import (
    Chain,
    OnStep,
    Training,
    evaluation_text,
    excerpt,
    lesson,
    new_training,
    train,
    training_text,
    write_llama,
)
from slimtensors.errors import ConfigError, FormatError, SlimError
from slimtensors.folder.compress import decompress_folder
from slimtensors.report import (
    Report,
    Variant,
    collect_variant,
    new_report,
    write_page,
    write_report,
)
from slimtensors.storage import StrPath
from slimtensors.storage.atomic import create_folder

DENSE = "dense"
_TRAINED_BYTES = 440_000_000
"""What all folders of the model that is trained here take together."""
_TIMES = 6
"""How often the bytes of a model are written, in all ways together."""
_CHECKPOINTS = 100
"""Bytes of all checkpoints for each weight: eight exact states of 12 bytes, and eight rounded."""
_MOST_TRAINED = 200_000_000
"""Weights of the largest model that is trained here, for its checkpoints."""
_STEPS_OF_OWN = 8


@dataclass(frozen=True)
class Options:
    """What is to be shown."""

    output: Path
    model: Path | None = None
    steps: int = 600
    is_quick: bool = False
    """Whether a smaller model and less text will do."""
    replace: bool = False


@dataclass(frozen=True)
class Watch:
    """Whom to tell how far it is."""

    on_step: OnStep
    on_variant: Callable[[str, int, int], object]


@dataclass(frozen=True)
class Outcome:
    """What came out."""

    report: Report
    chains: list[Chain]
    skipped: Mapping[str, str]
    """What could not be shown, and why."""
    sentences: Mapping[str, str]
    """What the dense model writes, and the smallest."""


def demonstrate(options: Options, watch: Watch) -> Outcome:
    """Make everything in a folder that appears when all is done, or not at all."""
    needed()
    samples = 16 if options.is_quick else 128
    if options.model is not None:
        _check_model(options.model)
        subject = Subject.of(options.model, evaluation_text(), samples=samples)
    _check_space(options)
    sources = [options.model] if options.model else []
    # A small model gains less from a second thread than it loses by waiting for it.
    threads = torch.get_num_threads() if options.model else 1
    with (
        _threads(threads),
        create_folder(options.output, replace=options.replace, sources=sources) as folder,
    ):
        skipped: dict[str, str] = {}
        if options.model is None:
            took, chains = _trained(folder, options, watch)
            subject = Subject.of(folder / DENSE, evaluation_text(), samples=samples)
            title = "byte-level Llama"
        else:
            took = _timed(lambda: decompress_folder(options.model or "", folder / DENSE))
            chains = _tuned(subject, folder, watch, skipped)
            title = options.model.resolve().name
        made = _Making(folder, subject, watch, skipped)
        variants = [made.measured(_DENSE, took), *made.every()]
        report = replace(new_report(title, variants), checkpoints=chains[0].links if chains else [])
        write_report(report, folder / "report.json")
        write_page(report, folder / "report.html")
        sentences = made.sentences(variants) if subject.is_causal else {}
    return Outcome(report, chains, skipped, sentences)


_DENSE = Way("dense", DENSE, "As it is, in plain safetensors.", lambda *_: None)


def _trained(folder: Path, options: Options, watch: Watch) -> tuple[float, list[Chain]]:
    steps, seen = options.steps, training_text()
    training = new_training(steps, layers=2 if options.is_quick else 4)
    with _threads(_free_cores()):
        chains = train(training, folder, lambda step: lesson(seen, step), steps, watch.on_step)
    return _timed(lambda: write_llama(training.model, folder / DENSE)), chains


def _tuned(subject: Subject, folder: Path, watch: Watch, skipped: dict[str, str]) -> list[Chain]:
    """Train a given model a little, for its checkpoints."""
    with Archive(folder / DENSE) as archive:
        weights = sum(archive.spec(name).numel for name in archive)
    if not subject.is_causal or weights > _MOST_TRAINED:
        why = "its class predicts no text" if not subject.is_causal else f"{weights:,} weights"
        skipped["checkpoints"] = f"it is not trained here: {why}"
        return []
    model = subject.load(folder / DENSE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    tokens = torch.split(subject.tokens, 2)
    return train(
        Training(model, optimizer, schedule),
        folder,
        lambda step: tokens[step % len(tokens)],
        _STEPS_OF_OWN,
        watch.on_step,
    )


@dataclass(frozen=True)
class _Making:
    """Folders under way."""

    folder: Path
    subject: Subject
    watch: Watch
    skipped: dict[str, str]

    def every(self) -> list[Variant]:
        """Store the model in every way that it allows."""
        seen = excerpt(training_text())
        found = []
        for number, way in enumerate(WAYS):
            self.watch.on_variant(way.name, number + 1, len(WAYS))
            target = self.folder / way.folder
            try:
                took = _timed(partial(way.make, self.folder / DENSE, target, seen))
            except FormatError:
                raise
            except SlimError as error:
                self.skipped[way.name] = str(error)
                continue
            found.append(self.measured(way, took))
        return found

    def measured(self, way: Way, save_seconds: float) -> Variant:
        """Load what was stored, and see how good it still is."""
        model, load_seconds = self.subject.timed(self.folder / way.folder)
        figures = {"save_seconds": save_seconds, "load_seconds": load_seconds}
        perplexity = self.subject.perplexity(model)
        if perplexity is not None:
            figures["perplexity"] = perplexity
        return collect_variant(
            self.folder / way.folder,
            way.name,
            about=way.about,
            measured=figures,
            against=self.folder / DENSE,
        )

    def sentences(self, variants: list[Variant]) -> dict[str, str]:
        """Let the dense model and the smallest write."""
        smallest = min(variants, key=lambda v: (v.stored_bytes, v.measured["perplexity"]))
        ways = {way.name: way for way in (_DENSE, *WAYS)}
        names = dict.fromkeys([_DENSE.name, smallest.name])
        return {
            name: self.subject.sentence(self.subject.load(self.folder / ways[name].folder))
            for name in names
        }


def _check_model(folder: StrPath) -> None:
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{folder}: is no model; it has no config.json")
    with Archive(folder) as archive:
        archive.check_whole()


def _check_space(options: Options) -> None:
    """Raise before anything is done if the disk is too full for all of it."""
    where = options.output.resolve()
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free
    need = _TRAINED_BYTES
    if options.model is not None:
        with Archive(options.model) as archive:
            specs = [archive.spec(name) for name in archive]
        weights = sum(spec.numel for spec in specs)
        need = _TIMES * sum(spec.nbytes for spec in specs)
        need += _CHECKPOINTS * weights if weights <= _MOST_TRAINED else 0
    if free < need:
        sizes = f"about {format_bytes(need)}, and {format_bytes(free)} are free"
        raise ConfigError(f"{options.output}: the demo needs {sizes}; choose another place with -o")


def _free_cores() -> int:
    """Return how many threads train fastest: on a busy machine, each waits for all the others."""
    cores = os.cpu_count() or 1
    return cores if os.getloadavg()[0] < cores / 2 else 1


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
