"""Calibration data of all kinds as batches, with notes on what is missing."""

import json

import pytest
import torch
from tiny_models import llama, t5
from torch.utils.data import DataLoader
from transformers import T5Model

from slimtensors.errors import ConfigError
from slimtensors.recipe import Calibration
from slimtensors.recipe.calibration import Data, batches_for, extract_texts
from slimtensors.transformers.data import Examples, calibration_batches

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


def test_a_decoder_runs_on_the_labels_of_a_table():
    rows = [{"input_ids": [5, 6, 7], "labels": [8] * n, "id": n} for n in (1, 2, 2)]
    settings = Calibration(samples=3)
    found, notes = batches_for(t5(), rows, settings, tokenizer=None)
    assert [{k: x.tolist() for k, x in batch.items()} for batch in found] == [
        {"input_ids": [[5, 6, 7]], "labels": [[8]]},
        {"input_ids": [[5, 6, 7]] * 2, "labels": [[8, 8]] * 2},
    ]
    assert "only input_ids and labels of the table are used, not id" in notes
    found, notes = batches_for(llama(), rows, settings, tokenizer=None)
    assert [[*batch] for batch in found] == [["input_ids"]]
    assert "only input_ids of the table is used, not id, labels" in notes
    examples = Examples([{"input_ids": [5, 6], "labels": [8]}] * 2)
    assert calibration_batches(examples, t5(), None)[0]["labels"].tolist() == [[8], [8]]
    assert [*calibration_batches(examples, llama(), None)[0]] == ["input_ids"]


def test_a_decoder_without_data_runs_on_the_text_of_the_encoder():
    model = t5()
    model.config.decoder_start_token_id = 3
    note = "no labels or decoder_input_ids: the decoder runs on the input_ids of the encoder"
    ready = [{"input_ids": torch.tensor([[5, 6, 7], [8, 9, 10]])}]
    for dataset in (ready, [[5, 6, 7], [8, 9, 10]]):
        (found,), notes = batches_for(model, dataset, Calibration(samples=2), tokenizer=None)
        assert found["labels"].tolist() == found["input_ids"].tolist() == [[5, 6, 7], [8, 9, 10]]
        assert note in notes
        base = T5Model(model.config)
        (found,), notes = batches_for(base, dataset, Calibration(samples=2), tokenizer=None)
        assert found["decoder_input_ids"].tolist() == [[3, 5, 6], [3, 8, 9]]
        assert note in notes
    complete = [ready[0] | {"labels": torch.tensor([[1], [2]])}]
    assert batches_for(model, complete, Calibration(samples=2), tokenizer=None) == (complete, [])


def test_images_and_sounds_of_a_table_are_stacked():
    image = torch.arange(3 * 2 * 2).view(3, 2, 2).float()
    for value in (image, image.numpy(), image.tolist()):
        found, notes = batches([{"pixel_values": value, "label": 1}] * 4)
        assert [batch["pixel_values"].shape for batch in found] == [(3, 3, 2, 2), (1, 3, 2, 2)]
        assert found[1]["pixel_values"][0].equal(image)
        assert notes == ["only pixel_values of the table is used, not label"]
    sound = {"input_values": torch.ones(9), "input_ids": [4, 5, 0], "attention_mask": [1, 1, 0]}
    found, notes = batches([sound] * 2, pack=False)
    assert {name: x.shape for name, x in found[0].items()} == {
        "input_ids": (2, 2),
        "input_values": (2, 9),
    }
    loader = [{"pixel_values": image[None]}] * 4
    assert batches(loader) == (loader, [])


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
        ([{"input_ids": "abc"}], "input_ids of a row must be numbers"),
        ([{"input_ids": [1, 2]}, {"labels": [1]}], "a row has no input_ids"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], r"a row has 2 .* of shape \[1\]"),
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
