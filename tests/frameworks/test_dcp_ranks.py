"""torch.distributed.checkpoint on two ranks, with our storage classes and with torch's."""

import json
from pathlib import Path

import pytest
from process_tools import torchrun

PROGRAM = Path(__file__).parent / "programs" / "dcp_ranks.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return the results of each rank, by pair of storage classes."""
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun(2, folder, script=PROGRAM)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(2)]


CASES = ["cache_plans", "save_in_the_background", "save_alone"]


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_the_result_of_torch(reports, case):
    for report in reports:
        assert report["ours"][case] == report["torch"][case]
        assert "false" not in json.dumps(report["ours"][case])


def test_cached_plans_are_reused_when_those_of_one_rank_change(reports):
    assert [report["ours"]["cache_plans"] for report in reports] == [[True] * 6] * 2


def test_async_saves_run_in_threads_and_processes_with_and_without_staging(reports):
    names = {"thread plain", "thread staged", "process plain", "process staged"}
    for report in reports:
        found = report["ours"]["save_in_the_background"]
        assert found.keys() == names
        assert all(is_right for is_right, *_ in found.values())


def test_several_ranks_cannot_save_without_collectives(reports):
    for report in reports:
        assert report["ours"]["save_without_collectives"].startswith(
            "use_collectives=False is not supported with several ranks"
        )


def test_settings_that_differ_are_an_error_with_cached_plans_too(reports):
    for report in reports:
        assert report["ours"]["save_to_two_paths"].startswith("rank 1 has target ")
