"""Write a model folder file by file, with one or several processes, resuming an interrupted run."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from slimtensors import _core
from slimtensors.archive import Archive
from slimtensors.archive.summary import Summary, joined
from slimtensors.errors import ConfigError, SlimError
from slimtensors.folder.config_json import (
    CONFIG,
    other_files,
    resolve_folder,
    to_json_text,
    updated_config,
)
from slimtensors.folder.processes import ProcessGroup, SingleProcess, Task, divide
from slimtensors.folder.site import LocalSite, RemoteSite, Site
from slimtensors.folder.weights import Part, Record, Weights
from slimtensors.storage import (
    INDEX,
    LocalLocation,
    Location,
    RemoteLocation,
    StrPath,
    locate,
    weight_files,
)
from slimtensors.tensor import Json


def job_of(archive: Archive, where: Location, options: dict[str, Any]) -> Json:
    """Describe a job by its options, and by what tells the source from another one."""
    folder = resolve_folder(where)
    weights = {
        file.key: [folder.child(file.key).stamp(), _core.crc32c(file.text)]
        for file in archive.files
    }
    return {**options, "version": version("slimtensors"), "weights": weights}


_LOG = logging.getLogger(__name__)

Edit = Callable[[Json, Summary], Json]
"""Returns what `config.json` is to say."""


def make_folder(
    weights: Weights,
    target: StrPath,
    edit: Edit,
    *,
    job: Json | None = None,
    replace: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Make a folder like that of `weights`: its config by `edit`, other files alike.

    The new folder appears when it is complete; an existing one is replaced only if `replace` is
    set, and never if it holds the source. A run that was stopped goes on where it was if it has
    the same `job`; without a job nothing is left of it. Ranks other than 0 return what they wrote.
    """
    ranks = weights.how.ranks
    if job is None and ranks.count > 1:
        raise ConfigError("several processes need a preset by its name, which all of them know")
    to = locate(target, storage_options=storage_options)
    making = _Making(weights, to, _site(to, [weights.archive.path], replace=replace))
    try:
        if ranks.rank == 0:
            making.site.begin(job)
        ranks.meet("begun")
        if ranks.rank != 0:
            making.site.attach(job)
        with making.tidied(keep=job is not None):
            return making.run(edit)
    finally:
        making.site.close()


def remake(
    where: Location,
    target: StrPath,
    write: Callable[[Path], Summary],
    edit: Edit,
    *,
    sources: Sequence[StrPath],
    replace: bool,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Make a folder like `where`, its weights by `write`, which is given a folder to fill."""

    def fill(folder: Path) -> Record:
        tensors = write(folder).tensors
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        # Loaders look for JSON first: without it, what is there already is nothing to them.
        files.sort(key=lambda path: path.suffix == ".json")
        return Record(tensors, {}, {path.relative_to(folder).as_posix(): "" for path in files})

    site = _site(locate(target, storage_options=storage_options), sources, replace=replace)
    try:
        site.begin(None)
        try:
            summary = site.put("files", "weights", fill).summary()
            _add_others(site, where, lambda config: edit(config, summary), SingleProcess())
            site.commit()
        except BaseException:
            site.drop()
            raise
    finally:
        site.close()
    return summary


def _site(to: Location, sources: Sequence[StrPath], *, replace: bool) -> Site:
    if isinstance(to, RemoteLocation):
        return RemoteSite(to, sources, replace=replace)
    assert isinstance(to, LocalLocation)
    return LocalSite(to.path, sources, replace=replace)


def _add_others(
    site: Site, where: Location, edit: Callable[[Json], Json], ranks: ProcessGroup
) -> None:
    """Add what is not weights, `config.json` last."""
    others = other_files(where)
    config = others.pop(CONFIG, None)
    for name, original in others.items():
        site.copy(name, original)
        ranks.advance()
    if config is not None:
        site.write(CONFIG, updated_config(config.read(), edit))


@dataclass(frozen=True)
class _Making:
    """A folder that is being made, as one of the ranks sees it."""

    weights: Weights
    to: Location
    site: Site

    def run(self, edit: Edit) -> Summary:
        """Make the files that are not there yet, then everything else."""
        ranks, site, files = self.weights.how.ranks, self.site, self.weights.files()
        for file in files[ranks.rank :: ranks.count]:
            if site.find("files", file.key):
                self.weights.how.advance(file.nbytes)
        ranks.meet("checked")
        left = [file for file in files if not site.has("files", file.key)]
        ranks.meet("counted")
        division = divide(left, ranks.count, least=self.weights.how.least)
        made = [self._make(task) for task in division.tasks[ranks.rank]]
        ranks.meet("made")
        for key, rank in division.joins.items():
            if rank == ranks.rank:
                self._join(key, division.parts[key])
        ranks.meet("joined")
        done = joined([record.summary() for record in made])
        summary = self._finish(edit) if ranks.rank == 0 else done
        ranks.meet("finished")
        return summary

    @contextmanager
    def tidied(self, *, keep: bool) -> Iterator[None]:
        """After a failure, leave nothing but files that need not be made again."""
        try:
            yield
        except BaseException as error:
            can_go_on = keep and not isinstance(error, SlimError)  # which would come again
            files = list(self.weights.states)
            if self.weights.how.ranks.count > 1:
                pass  # the others may still write
            elif can_go_on and len(files) > 1 and any(self.site.has("files", f) for f in files):
                _LOG.warning("%s: finished files are kept; the same command goes on", self.site)
            else:
                self.site.drop()
            raise

    def _make(self, task: Task) -> Record:
        if not task.names:
            return self.site.put(
                "files", task.file, lambda folder: self.weights.write_file(task.file, folder)
            )
        if found := self.site.find("parts", task.key):
            self.weights.how.advance(task.nbytes)
            return found
        return self.site.put(
            "parts", task.key, lambda folder: self.weights.write_part(task, folder)
        )

    def _join(self, key: str, tasks: Sequence[Task]) -> None:
        parts = []
        for task in tasks:
            record = self.site.find("parts", task.key)
            if record is None:
                raise ConfigError(f"{self.site}: {task.key}: is not there any more, or was changed")
            parts.append(Part(task, record, self.site.place("parts", task.key)))
        self.site.put("files", key, lambda folder: self.weights.join(key, parts, folder))

    def _finish(self, edit: Edit) -> Summary:
        """Add what is not weights and what leads to them, and show the folder."""
        records = [self.site.load("files", key) for key in self.weights.states]
        for record in records:
            self.weights.how.found.update(record.sparsity)
        summary = joined([record.summary() for record in records])
        weights = self.weights
        _add_others(
            self.site, weights.where, lambda config: edit(config, summary), weights.how.ranks
        )
        if name := self._index_name(summary):
            self.site.write(name, to_json_text(_index(records, summary)))
        self.site.commit()
        tensors = [replace(t, file=str(self.to.child(t.file))) for t in summary.tensors]
        return Summary(tensors, [str(self.to.child(file)) for file in summary.files])

    def _index_name(self, summary: Summary) -> str | None:
        if self.weights.how.max_shard_size is not None:
            return INDEX if len(summary.files) > 1 else None
        main, *shards = weight_files(self.weights.where)
        return main if shards else None


def _index(records: Sequence[Record], summary: Summary) -> Json:
    homes: dict[str, str] = {}
    total = 0
    for record in records:
        for tensor in record.stored:
            pieces = record.pieces.get(tensor.name)
            if pieces is not None:
                homes |= dict.fromkeys(pieces.names, tensor.file)
                total += sum(pieces.nbytes)
    return {
        "metadata": {"total_parameters": summary.items, "total_size": total},
        "weight_map": homes,
    }
