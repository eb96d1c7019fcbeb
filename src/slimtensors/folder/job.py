"""Write a model folder file by file, with one or several processes, resuming interrupted runs."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from slimtensors import _core
from slimtensors.archive import Archive
from slimtensors.archive.summary import Summary, merge_summaries
from slimtensors.errors import ConfigError, FormatError, SlimError
from slimtensors.folder.build import BuildFolder, Record, open_build_folder
from slimtensors.folder.config_json import (
    CONFIG,
    Edit,
    edit_config_text,
    find_other_files,
    resolve_folder,
    to_json_text,
)
from slimtensors.folder.processes import ProcessGroup, SingleProcess, Task, divide_work
from slimtensors.folder.weights import FolderOptions, Part, Weights
from slimtensors.storage import INDEX, Location, StrPath, locate, weight_files
from slimtensors.tensor import Json

_LOG = logging.getLogger(__name__)

DescribeWeights = Callable[[Json, Summary], Json]
"""Returns the new content of `config.json`, from the old one and the summary of the weights."""

ExtraFiles = Mapping[str, Json | None]
"""JSON files to write in addition, by name; None: not copied from the source."""


def describe_job(archive: Archive, settings: Json) -> Json:
    """Return JSON that identifies a job: its settings, our version, and the state of the source."""
    folder = resolve_folder(archive.location)
    weights = {
        file.key: [folder.child(file.key).stamp(), _core.crc32c(file.text)]
        for file in archive.files
    }
    return {**settings, "version": version("slimtensors"), "weights": weights}


def build_folder(
    weights: Weights,
    target: StrPath,
    describe: DescribeWeights,
    *,
    job: Json | None = None,
    files: ExtraFiles | None = None,
) -> Summary:
    """Write a copy of a model folder with new weights; `describe` edits its config.

    The target appears when it is complete. An existing one is replaced only if the options allow
    it, and never if it contains the source. An interrupted run resumes if it has the same `job`;
    without a job it leaves nothing. Ranks other than 0 return the summary of what they wrote.
    """
    group = weights.options.group
    if job is None and group.count > 1:
        raise ConfigError("several processes need a preset name instead of a function")
    to = locate(target, storage_options=weights.options.storage_options)
    sources = find_paths(weights.archive)
    folder = open_build_folder(to, sources, replace=weights.options.replace)
    build = _Build(weights, to, folder, files or {})
    try:
        if group.rank == 0:
            folder.begin(job)
        group.barrier("begun")
        if group.rank != 0:
            folder.attach(job)
        with build.cleanup(is_resumable=job is not None):
            return build.run(describe)
    finally:
        folder.close()


def find_paths(archive: Archive) -> list[str]:
    """Return all paths from which a folder is made: weights, and the folder with other files."""
    return [str(resolve_folder(archive.location)), *archive.paths()]


def replace_weights(
    original: Location,
    target: StrPath,
    write: Callable[[Path], Summary],
    describe: DescribeWeights,
    *,
    sources: Sequence[StrPath],
    options: FolderOptions,
    files: ExtraFiles | None = None,
) -> Summary:
    """Write a copy of a model folder; `write` writes the new weights into an empty folder."""

    def write_weights(folder: Path) -> Record:
        tensors = write(folder).tensors
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        # Indexes last: until then, loaders do not see the other files as a model.
        files.sort(key=lambda path: path.suffix == ".json")
        return Record(tensors, {}, {path.relative_to(folder).as_posix(): "" for path in files})

    to = locate(target, storage_options=options.storage_options)
    build = open_build_folder(to, sources, replace=options.replace)
    try:
        build.begin(None)
        try:
            record = build.put("files", "weights", write_weights)
            summary = record.summary()
            edit = _edit_with(describe, summary)
            _copy_other_files(
                build, original, edit, SingleProcess(), written=record.files, files=files or {}
            )
            build.commit()
        except BaseException:
            build.drop()
            raise
    finally:
        build.close()
    return summary


def _edit_with(describe: DescribeWeights, summary: Summary) -> Edit:
    return lambda config: describe(config, summary)


def _copy_other_files(
    build: BuildFolder,
    source: Location,
    edit: Edit,
    group: ProcessGroup,
    *,
    written: Collection[str],
    files: ExtraFiles,
) -> None:
    """Copy all files except weights; `config.json` last, edited. None may be `written` already."""
    others = {name: x for name, x in find_other_files(source).items() if name not in files}
    for name in others.keys() & set(written):
        raise FormatError(f"{source}: {name}: also the name of a weight file to be written")
    config = others.pop(CONFIG, None)
    for name, original in others.items():
        build.copy(name, original)
        group.heartbeat()
    for name, data in files.items():
        if data is not None:
            build.write(name, to_json_text(data))
    if config is not None:
        build.write(CONFIG, edit_config_text(config.read(), edit, str(config)))


@dataclass(frozen=True)
class _Build:
    """The work of one rank."""

    weights: Weights
    target: Location
    folder: BuildFolder
    files: ExtraFiles

    def run(self, describe: DescribeWeights) -> Summary:
        """Write the missing weight files; rank 0 then completes the folder."""
        options, files = self.weights.options, self.weights.file_sizes()
        group = options.group
        for file in files[group.rank :: group.count]:
            if self.folder.find("files", file.key):
                options.report_progress(file.nbytes)
        group.barrier("checked")
        missing = [file for file in files if not self.folder.is_finished("files", file.key)]
        group.barrier("counted")
        division = divide_work(missing, group.count, min_part_bytes=self.weights.min_part_bytes)
        records = [self._run_task(task) for task in division.tasks[group.rank]]
        group.barrier("made")
        for key, rank in division.joiners.items():
            if rank == group.rank:
                self._join(key, division.parts[key])
        group.barrier("joined")
        if group.rank == 0:
            summary = self._complete(describe)
        else:
            summary = merge_summaries([record.summary() for record in records])
        group.barrier("finished")
        return summary

    @contextmanager
    def cleanup(self, *, is_resumable: bool) -> Iterator[None]:
        """On failure, remove everything except finished files that a later run can use."""
        try:
            yield
        except BaseException as error:
            can_resume = is_resumable and not isinstance(error, SlimError)  # would occur again
            files = list(self.weights.sources)
            if self.weights.options.group.count > 1:
                pass  # other ranks may still be writing
            elif can_resume and len(files) > 1 and self._has_finished(files):
                _LOG.warning("%s: finished files are kept; run it again to resume", self.folder)
            else:
                self.folder.drop()
            raise

    def _has_finished(self, files: Sequence[str]) -> bool:
        return any(self.folder.is_finished("files", file) for file in files)

    def _run_task(self, task: Task) -> Record:
        if not task.names:
            return self.folder.put(
                "files", task.file, lambda folder: self.weights.write_file(task.file, folder)
            )
        if record := self.folder.find("parts", task.key):
            self.weights.options.report_progress(task.nbytes)
            return record
        return self.folder.put(
            "parts", task.key, lambda folder: self.weights.write_part(task, folder)
        )

    def _join(self, key: str, tasks: Sequence[Task]) -> None:
        parts = []
        for task in tasks:
            record = self.folder.find("parts", task.key)
            if record is None:
                raise ConfigError(f"{self.folder}: {task.key} was removed or changed")
            parts.append(Part(task, record, self.folder.location("parts", task.key)))
        self.folder.put("files", key, lambda folder: self.weights.join(key, parts, folder))

    def _complete(self, describe: DescribeWeights) -> Summary:
        """Add the other files and the index, and make the folder visible."""
        weights = self.weights
        records = [self.folder.load("files", key) for key in weights.sources]
        for record in records:
            weights.sparsity.update(record.sparsity)
        summary = merge_summaries([record.summary() for record in records])
        written = list(summary.files)
        index = weights.index
        if weights.originals is None and (name := self._index_name(summary)):
            index = name, to_json_text(_make_index(records, summary))
        if index is not None:
            written.append(index[0])
        edit = _edit_with(describe, summary)
        source, group = weights.archive.location, weights.options.group
        _copy_other_files(self.folder, source, edit, group, written=written, files=self.files)
        if index is not None:
            self.folder.write(*index)
        self.folder.stamp(summary.files)
        self.folder.commit()
        tensors = [replace(t, file=str(self.target.child(t.file))) for t in summary.tensors]
        return Summary(tensors, [str(self.target.child(file)) for file in summary.files])

    def _index_name(self, summary: Summary) -> str | None:
        if self.weights.options.max_shard_size is not None:
            return INDEX if len(summary.files) > 1 else None
        main, *shards = weight_files(self.weights.archive.location)
        return main if shards else None


def _make_index(records: Sequence[Record], summary: Summary) -> Json:
    weight_map: dict[str, str] = {}
    total = 0
    for record in records:
        for tensor in record.stored:
            pieces = record.pieces.get(tensor.name)
            if pieces is not None:
                weight_map |= dict.fromkeys(pieces.names, tensor.file)
                total += sum(pieces.nbytes)
    return {
        "metadata": {"total_parameters": summary.items, "total_size": total},
        "weight_map": weight_map,
    }
