"""Save and load with torch's storage classes and with ours: torchrun dcp_ranks.py FOLDER.

Each rank writes the results of all cases to FOLDER/report-RANK.json.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from slimtensors.distributed import StorageReader, StorageWriter
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

STAGING = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=True,
    use_async_staging=True,
    use_non_blocking_copy=False,
)


class CachingPlanner(DefaultSavePlanner):
    """A planner with a cache of its own for torch's classes."""

    def __init__(self):
        super().__init__(enable_plan_caching=True)


class OurCachingPlanner(CachingPlanner):
    """A planner with a cache of its own for our classes."""


class Cases:
    """The same calls with one pair of storage classes."""

    def __init__(self, folder, writer, reader, planner):
        self.folder, self._writer, self._reader, self._planner = folder, writer, reader, planner
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._rank = dist.get_rank()
        self.whole = torch.arange(35.0).view(7, 5)

    def make_state(self, step):
        rows = distribute_tensor(self.whole * step, self._mesh, [Shard(0)])
        return {"rows": rows, "copy": torch.full((3,), float(step)), "step": step}

    def is_loaded(self, name, step, **more):
        """Return True if a checkpoint contains the state of a step."""
        state = self.make_state(0) | {key: torch.zeros_like(x) for key, x in more.items()}
        dcp.load(state, storage_reader=self._reader(self.folder / name))
        is_right = torch.equal(state["rows"].full_tensor(), self.whole * step)
        is_right &= torch.equal(state["copy"], torch.full((3,), float(step)))
        is_right &= all(torch.equal(state[key], x) for key, x in more.items())
        return is_right and state["step"] == step

    def cache_plans(self):
        """Save with cached plans, of which those of all ranks or of one rank change."""
        more = {1: {}, 2: {}, 3: {"more": torch.ones(2)}, 4: {"more": torch.ones(2)}}
        more |= {5: more[4] | ({"mine": torch.ones(3)} if self._rank else {}), 6: more[4]}
        for step, others in more.items():
            writer = self._writer(self.folder / f"cached-{step}")
            state = self.make_state(step) | others
            dcp.save(state, storage_writer=writer, planner=self._planner())
        return [self.is_loaded(f"cached-{step}", step, **more[step]) for step in more]

    def save_in_the_background(self):
        """Save asynchronously in a thread and in a process, and change the state meanwhile."""
        found = {}
        for kind in AsyncCheckpointerType:
            for stager in (None, DefaultStager(STAGING)):
                name = f"{kind.value} {'staged' if stager else 'plain'}"
                state = self.make_state(3)
                saving = dcp.async_save(
                    state,
                    storage_writer=self._writer(self.folder / name),
                    async_checkpointer_type=kind,
                    async_stager=stager,
                )
                if stager:
                    saving.staging_completion.result()
                for x in (state["rows"].to_local(), state["copy"]):
                    x.zero_()
                done = getattr(saving, "upload_completion", saving).result()
                found[name] = [self.is_loaded(name, 3), done.version, type(done).__name__]
                if stager:
                    stager.close()
        return found

    def save_alone(self):
        """Save without other ranks, each to a folder of its own."""
        path, state = (
            self.folder / f"alone-{self._rank}",
            {"x": torch.full((2,), float(self._rank))},
        )
        dcp.save(state, storage_writer=self._writer(path), no_dist=True)
        loaded = {"x": torch.zeros(2)}
        dcp.load(loaded, storage_reader=self._reader(path), no_dist=True)
        return torch.equal(loaded["x"], state["x"])

    def save_without_collectives(self):
        """Save without exchanging plans; return the error, if any."""
        path = self.folder / "without"
        state = {f"x{self._rank}": torch.full((2,), float(self._rank))}
        try:
            dcp.save(state, storage_writer=self._writer(path), use_collectives=False)
        except Exception as error:
            return str(error)
        return ""

    def save_to_two_paths(self):
        """Save with cached plans to different paths on the ranks; return the error, if any."""
        writer = self._writer(self.folder / f"path-{self._rank}")
        try:
            dcp.save(self.make_state(1), storage_writer=writer, planner=self._planner())
        except CheckpointException as error:
            return str(error.failures[1][0])
        return ""

    def run(self):
        """Return the results of all cases."""
        cases = [self.cache_plans, self.save_in_the_background, self.save_alone]
        cases += [self.save_without_collectives, self.save_to_two_paths]
        return {case.__name__: case() for case in cases}


def main():
    """Run all cases with both pairs of classes."""
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    kinds = {
        "torch": (FileSystemWriter, FileSystemReader, CachingPlanner),
        "ours": (StorageWriter, StorageReader, OurCachingPlanner),
    }
    report = {name: Cases(folder / name, *classes).run() for name, classes in kinds.items()}
    (folder / f"report-{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":  # the checkpoint process imports this file again
    main()
