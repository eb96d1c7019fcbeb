"""Simulate power failures during operations: python power_loss.py FOLDER MOMENTS SUBSETS.

The system calls of each operation are logged. At MOMENTS moments, what was synced is kept; of the
rest, everything, nothing, or a random selection of writes and renames (SUBSETS times). Print the
number of different folders that were checked, by scenario, as JSON.
"""

import json
import random
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from control import Workspace, run_child
from scenarios import SCENARIOS

PAGE = 4096


@dataclass
class Node:
    """A file or folder, with everything that happened to it."""

    is_folder: bool
    content: bytes = b""
    """Content of a file before the operation."""
    entries: dict = field(default_factory=dict)
    """Entries of a folder before the operation."""

    def __hash__(self):
        return id(self)

    __eq__ = object.__eq__


@dataclass(frozen=True)
class Change:
    """A change of the content of a file, or of the entries of one or two folders."""

    time: int
    nodes: tuple
    """One of them must be synced after this change to make it durable."""
    apply: object
    """Function of the contents and entries by node."""


class History:
    """All changes of an operation in a folder, which is read before it."""

    def __init__(self, folder):
        self._folder, self._by_inode = folder, {}
        self.root = self._scan(folder)
        self._now = {}
        self._note_entries(self.root)
        self.changes, self.syncs, self.length = [], [], 0

    def add_log(self, log):
        """Add the logged system calls."""
        while log:
            line, _, log = log.partition(b"\n")
            kind, *words = line.decode().split("\t")
            data = b""
            if kind == "write":
                data, log = log[: int(words[2])], log[int(words[2]) :]
            self.length += 1
            getattr(self, f"_{kind}")(*words, *([data] if kind == "write" else []))

    def _scan(self, path):
        node = Node(path.is_dir())
        self._by_inode[path.stat().st_ino] = node
        if node.is_folder:
            node.entries = {child.name: self._scan(child) for child in path.iterdir()}
        else:
            node.content = path.read_bytes()
        return node

    def _note_entries(self, node):
        if node.is_folder:
            self._now[node] = dict(node.entries)
            for child in node.entries.values():
                self._note_entries(child)

    def _find(self, path):
        """Return the folder of a path, and its name there, after all changes so far."""
        *parents, name = Path(path).relative_to(self._folder).parts
        node = self.root
        for parent in parents:
            node = self._now[node][parent]
        return node, name

    def _change_entries(self, nodes, apply):
        apply(None, self._now)
        self.changes.append(Change(self.length, nodes, apply))

    def _add(self, path, inode, is_folder):
        (folder, name), node = self._find(path), Node(is_folder)
        self._by_inode[int(inode)] = node
        if is_folder:
            self._now[node] = {}
        self._change_entries((folder,), lambda _, entries: entries[folder].update({name: node}))

    def _create(self, path, inode):
        self._add(path, inode, False)

    def _mkdir(self, path, inode):
        self._add(path, inode, True)

    def _remove(self, path):
        folder, name = self._find(path)
        node = self._now[folder][name]

        def apply(_, entries):
            if entries[folder].get(name) is node:
                del entries[folder][name]

        self._change_entries((folder,), apply)

    def _rename(self, source, target):
        (old, old_name), (new, new_name) = self._find(source), self._find(target)
        node = self._now[old][old_name]

        def apply(_, entries):
            if entries[old].get(old_name) is node:
                del entries[old][old_name]
            entries[new][new_name] = node

        self._change_entries((old, new), apply)

    def _exchange(self, source, target):
        (old, old_name), (new, new_name) = self._find(source), self._find(target)
        a, b = self._now[old][old_name], self._now[new][new_name]

        def apply(_, entries):
            entries[old][old_name], entries[new][new_name] = b, a

        self._change_entries((old, new), apply)

    def _write(self, inode, offset, size, data):
        for start in range(0, len(data), PAGE):  # each page may be lost
            page = data[start : start + PAGE]
            self._write_page(self._by_inode[int(inode)], int(offset) + start, page)

    def _write_page(self, node, begin, data):
        def apply(contents, _):
            before = contents.get(node, node.content).ljust(begin, b"\0")
            contents[node] = before[:begin] + data + before[begin + len(data) :]

        self.changes.append(Change(self.length, (node,), apply))

    def _truncate(self, inode, size):
        node = self._by_inode[int(inode)]

        def apply(contents, _):
            contents[node] = contents.get(node, node.content)[: int(size)].ljust(int(size), b"\0")

        self.changes.append(Change(self.length, (node,), apply))

    def _fsync(self, inode):
        self.syncs.append((self.length, self._by_inode[int(inode)]))

    def fail_at(self, time, keep):
        """Return {path: content} after a failure; `keep` selects changes that were not synced."""
        last = {node: moment for moment, node in self.syncs if moment <= time}
        contents, entries = {}, {}
        for node in {*self._now, self.root}:
            entries[node] = dict(node.entries)
        for change in self.changes:
            is_durable = any(last.get(node, 0) > change.time for node in change.nodes)
            if change.time <= time and (is_durable or keep()):
                change.apply(contents, entries)
        found = {}

        def collect(node, path):
            if node.is_folder:
                found[path] = None
                for name, child in entries[node].items():
                    collect(child, f"{path}{name}/" if child.is_folder else f"{path}{name}")
            else:
                found[path] = contents.get(node, node.content)

        collect(self.root, "")
        return found


def write_files(folder, files):
    shutil.rmtree(folder, ignore_errors=True)
    for path, content in files.items():
        if content is None:
            (folder / path).mkdir(parents=True)
        else:
            (folder / path).write_bytes(content)


def check(name, root, moments, subsets):
    scenario, generator = SCENARIOS[name], random.Random(name)
    workspace = Workspace(root, scenario)
    history = History(workspace.folder)
    assert run_child(scenario.run, workspace.folder, log=root / "log") is not None
    history.add_log((root / "log").read_bytes())
    assert scenario.identify(workspace.folder) == "new"
    times = range(history.length + 1)
    chosen = times if moments >= len(times) else generator.sample(times, moments)
    policies = [lambda: True, lambda: False] + [lambda: generator.random() < 0.5] * subsets
    seen = set()
    for time in chosen:
        for number, keep in enumerate(policies):
            files = history.fail_at(time, keep)
            key = hash(tuple(sorted(files.items(), key=lambda item: item[0])))
            if key in seen:
                continue
            seen.add(key)
            write_files(root / "after", files)
            found = scenario.identify(root / "after")
            assert found in ("old", "new"), (name, time, number, found)
    return len(seen)


root, moments, subsets = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
results = {name: check(name, root / name.replace(" ", "-"), moments, subsets) for name in SCENARIOS}
print(json.dumps(results))
