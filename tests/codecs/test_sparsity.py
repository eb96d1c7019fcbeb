"""Sparsity of tensors and models, and its patterns."""

import pytest
import torch

from slimtensors.codecs.statistics import merge, sparsity_of
from slimtensors.folder.config_json import (
    BitmaskConfig,
    Sparse24BitmaskConfig,
    SparsityConfig,
    parse_sparsity,
)


def keeping(kept, group, *, rows=64, columns=256, dtype=torch.bfloat16, seed=0):
    """Return a matrix with exactly `kept` nonzero items in every group of `group`."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(rows * columns // group, group, generator=g) + 1
    order = torch.rand(x.shape, generator=g).argsort(1)
    return x.masked_fill(order >= kept, 0).view(rows, columns).to(dtype)


def randomly(density, *, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.where(torch.rand(256, 256, generator=g) < density, 1.5, 0.0)


@pytest.mark.parametrize(
    ("kept", "group"), [(2, 4), (1, 4), (4, 8), (8, 16), (3, 8), (6, 8), (16, 32), (5, 32)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_a_pattern_is_found_with_its_smallest_group_size(kept, group, dtype):
    found = sparsity_of(keeping(kept, group, dtype=dtype))
    assert found.structure == f"{kept}:{group}"
    assert found.share == 1 - kept / group


@pytest.mark.parametrize("density", [0.02, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_random_zeros_are_unstructured(density):
    assert sparsity_of(randomly(density)).structure == "unstructured"


def test_weights_that_were_multiplied_by_a_mask_have_their_structure():
    x = keeping(2, 4)
    assert sparsity_of(-x).structure == "2:4"  # all zeros are -0.0
    assert sparsity_of(-x).share == 0.5


def test_rows_that_are_not_whole_groups_have_no_structure():
    assert (
        sparsity_of(keeping(2, 4, columns=256).view(-1, 128)[:, :126]).structure == "unstructured"
    )
    vector = keeping(2, 4).flatten()
    assert sparsity_of(vector).structure == "unstructured"


@pytest.mark.parametrize("x", [torch.ones(8, 8), torch.zeros(0, 8), torch.tensor(3.0)])
def test_dense_and_empty_tensors_have_no_pattern(x):
    assert (sparsity_of(x).share, sparsity_of(x).structure) == (0.0, "unstructured")


def test_a_model_has_the_structure_that_all_its_sparse_matrices_share():
    dense = sparsity_of(torch.ones(64, 64))
    two, four = sparsity_of(keeping(2, 4)), sparsity_of(keeping(4, 8, seed=1))
    assert merge([dense, two, two]).structure == "2:4"
    assert merge([two, four]).structure == "4:8"
    assert merge([two, sparsity_of(randomly(0.5))]).structure == "unstructured"
    assert merge([]).share == 0.0
    both = merge([dense, two])
    assert both.zero == two.zero
    assert both.items == two.items + 64 * 64


@pytest.mark.parametrize(
    ("form", "kind", "parsed"),
    [
        ("sparse-bitmask", BitmaskConfig, "sparse-bitmask"),
        ("sparse_bitmask", BitmaskConfig, "sparse-bitmask"),
        ("sparse-24-bitmask", Sparse24BitmaskConfig, "sparse-24-bitmask"),
        ("sparse_24_bitmask", Sparse24BitmaskConfig, "sparse-24-bitmask"),
        ("dense_sparsity", SparsityConfig, "dense_sparsity"),
        ("dense", SparsityConfig, "dense"),
    ],
)
def test_sparsity_config_sections_of_other_libraries_are_read(form, kind, parsed):
    section = {"format": form, "global_sparsity": "0.5", "targets": ["Linear"], "ignore": None}
    config = parse_sparsity(section)
    assert (type(config), config.format, config.global_sparsity) == (kind, parsed, 0.5)
