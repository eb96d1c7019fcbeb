"""Calibration data of all kinds as batches, with notes on what is missing."""

import json

import pytest
import torch
from torch.utils.data import DataLoader

from slimtensors.errors import ConfigError
from slimtensors.recipe import Calibration
from slimtensors.recipe.calibration import Data, extract_texts

TEXTS = [f"{'abcdefghij'[i] * 12} text number {i}" for i in range(10)]


def tokenizer(text, truncation, verbose):
    assert not truncation
    return {"input_ids": list(text.encode())}


def batches(dataset, **options):
    calibration = Calibration(**{"samples": 4, "length": 16, "batch_size": 3} | options)
    return Data.of(dataset).batches(calibration, tokenizer=tokenizer)


class Table:
    """A minimal stand-in for `datasets.Dataset`."""

    def __init__(self, rows):
        self.rows, self.column_names = rows, list(rows[0])

    def __iter__(self):
        return iter(self.rows)


def test_texts_are_packed_into_samples_of_equal_length():
    found, notes = batches(TEXTS)
    assert [batch["input_ids"].shape for batch in found] == [(3, 16), (1, 16)]
    assert notes == []
    again, _ = batches(TEXTS)
    assert all(
        torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(found, again, strict=True)
    )
    other, _ = batches(TEXTS, seed=1)
    assert not torch.equal(found[0]["input_ids"], other[0]["input_ids"])


def test_unpacked_texts_are_not_padded():
    found, notes = batches([*TEXTS, "short", "words"], pack=False, samples=12)
    assert sorted(tuple(batch["input_ids"].shape) for batch in found) == [
        (1, 16),
        (2, 5),
        (3, 16),
        (3, 16),
        (3, 16),
    ]
    assert notes == []


@pytest.mark.parametrize("suffix", ["txt", "md", "jsonl", "csv", "tsv"])
def test_local_files_are_read(tmp_path, suffix):
    path = tmp_path / f"data.{suffix}"
    match suffix:
        case "jsonl":
            path.write_text(
                "\n".join(json.dumps({"id": i, "text": x}) for i, x in enumerate(TEXTS))
            )
        case "csv" | "tsv":
            comma = "," if suffix == "csv" else "\t"
            path.write_text(
                "\n".join(f"{i}{comma}{x}" for i, x in [("id", "text"), *enumerate(TEXTS)])
            )
        case _:
            path.write_text("\n".join(TEXTS))
    found, notes = batches(path)
    assert sum(len(batch["input_ids"]) for batch in found) == 4
    assert notes == []
    assert batches(str(path))[0][0]["input_ids"].equal(found[0]["input_ids"])


def test_texts_or_tokens_of_tables_are_used():
    rows = [{"text": text, "label": i} for i, text in enumerate(TEXTS)]
    expected = batches(TEXTS)[0]
    for table in (rows, Table(rows), [{"words": text, "label": 1} for text in TEXTS]):
        found, _ = batches(table)
        assert found[0]["input_ids"].equal(expected[0]["input_ids"])
    tokens = [{"input_ids": list(range(i, i + 20))} for i in range(5)]
    found, _ = batches(Table(tokens))
    assert found[0]["input_ids"].tolist() == [list(range(i, i + 16)) for i in range(3)]
    tensors = [{"input_ids": torch.tensor(row["input_ids"])} for row in tokens]
    assert batches(tensors)[0][0]["input_ids"].equal(found[0]["input_ids"])


def test_plain_rows_of_tokens_are_samples():
    rows = [torch.arange(1, 21), torch.arange(5), torch.arange(20)]
    for dataset in (rows, [row.tolist() for row in rows], [{"input_ids": row} for row in rows]):
        found, notes = batches(dataset)
        assert [batch["input_ids"].shape for batch in found] == [(2, 16), (1, 5)]
        assert notes == [
            "the shortest sample has 5 tokens, not 16",
            "3 samples of calibration data, not 4",
        ]
    floats, _ = batches([torch.ones(3)])
    assert floats[0].shape == (3,)  # floats are an input of the model, not tokens


def test_unused_columns_of_a_table_of_tokens_are_noted():
    row = {"input_ids": [*range(16)], "attention_mask": [1] * 16}
    more = {"token_type_ids": [0] * 16, "labels": 1}
    assert batches([row] * 4)[1] == []
    assert batches([row | more] * 4)[1] == [
        "only input_ids of the table is used, not labels, token_type_ids"
    ]


def test_padding_of_rows_is_removed():
    ids = [[5, 6, 7, 0, 0], [0, 0, 1, 2, 3]]
    rows = [{"input_ids": x, "attention_mask": [int(i > 0) for i in x]} for x in ids]
    found, notes = batches(Table(rows))
    assert [batch["input_ids"].tolist() for batch in found] == [[[5, 6, 7], [1, 2, 3]]]
    assert "samples of 3 tokens, not 16: not enough data" in notes


def test_batches_are_used_until_there_are_enough_samples():
    originals = [{"input_ids": torch.full((2, 7), i)} for i in range(5)]
    found, notes = batches(originals)
    assert found == originals[:2]
    assert notes == []
    loader = DataLoader(torch.arange(40).view(10, 4), batch_size=2)
    assert len(batches(loader)[0]) == 2
    assert batches(iter(originals), samples=100)[1] == ["10 samples of calibration data, not 100"]


def test_less_data_than_requested_is_noted():
    found, notes = batches(TEXTS, samples=1000)
    assert notes == [
        f"{sum(len(b['input_ids']) for b in found)} samples of calibration data, not 1000"
    ]
    found, notes = batches(["tiny"])
    assert found[0]["input_ids"].shape == (1, 4)
    assert "samples of 4 tokens, not 16" in notes[0]
    calibration = Calibration(samples=2, length=512)
    found, notes = Data.of(TEXTS).batches(calibration, tokenizer=tokenizer, longest=32)
    assert found[0]["input_ids"].shape == (2, 32)
    assert "samples of 32 tokens, not 512: the limit of the model" in notes[0]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "empty"),
        ([""], "no tokens"),
        (["  \n "], "no tokens"),
        (3, "not a dataset"),
        ("nowhere.txt", "file not found"),
        ([{"a": "x", "b": "y"}], "cannot choose a text column"),
        ([{"text": "x"}, {"text": 3}], "contains int"),
        ([{"label": 1}], "cannot choose a text column"),
        ({"input_ids": torch.ones(2, 3)}, "expected a list of batches, got one batch of input_ids"),
        ([{"input_ids": [[1, 2]]}], "a list of tokens"),
        ([torch.tensor(1)], "no tensor"),
        ([object()], "no tensor"),
    ],
)
def test_invalid_datasets_raise(dataset, message):
    with pytest.raises(ConfigError, match=message):
        batches(dataset)


def test_invalid_options_and_files_raise(tmp_path):
    with pytest.raises(ConfigError, match="samples must be a positive integer"):
        Calibration(samples=0)
    with pytest.raises(ConfigError, match="pass tokenizer"):
        Data.of(TEXTS).batches(Calibration())
    several = Table([{"text": "x"}])
    several.column_names = {"train": ["text"], "test": ["text"]}
    with pytest.raises(ConfigError, match="pass dataset\\['train'\\]"):
        Data.of(several)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "x"}\n{')
    with pytest.raises(ConfigError, match="line 2 is not valid JSON"):
        batches(bad)
    bad.write_text("7")
    with pytest.raises(ConfigError, match="must be a string or an object"):
        batches(bad)
    for name, data in (("a.json", b'[{"text": "x"}]'), ("a.parquet", b"PAR1\0\1")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=f"{name}.*expected"):
            batches(tmp_path / name)
    with pytest.raises(ConfigError, match="column 'body'"):
        list(extract_texts([{"text": "x"}], column="body"))
