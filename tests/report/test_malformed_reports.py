"""Report data that is not what `write_report` wrote."""

import json

import pytest
import torch

import slimtensors
from slimtensors.errors import FormatError
from slimtensors.report.collect import collect
from slimtensors.report.data import Report, read_report, write_report

pytestmark = pytest.mark.hostile


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    slimtensors.save({"w": torch.eye(64)}, folder / "x.safetensors")
    write_report(collect(folder / "x.safetensors"), folder / "report.json")
    return (folder / "report.json").read_text()


@pytest.mark.parametrize("value", [None, 7, "x", [1], {"x": 1}, 10**400], ids=repr)
def test_a_report_with_other_values_is_refused_or_shown(data, tmp_path, value):
    path = tmp_path / "report.json"
    for key in json.loads(data):
        path.write_text(json.dumps({**json.loads(data), key: value}))
        try:
            report = read_report(path)
        except FormatError as error:
            assert str(path) in str(error)  # noqa: PT017
        else:
            assert Report.from_json(report.to_json()).to_json() == report.to_json()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_a_report_that_is_not_json_is_refused(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"report\.json"):
        read_report(path)
