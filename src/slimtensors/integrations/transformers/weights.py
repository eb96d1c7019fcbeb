"""The weights of a model as they go into a file: under the names of the hub, tied ones once."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from slimtensors.archive.state import Item
from slimtensors.archive.workers import Workers
from slimtensors.sparsity import Sparsity, combined, sparsity_of
from slimtensors.spec import Spec, as_bytes, check_storable, on_cpu
from slimtensors.tensors import CompressedTensor


def items(model: Any, given: dict[str, Tensor], *, save_original_format: bool) -> list[Item]:
    """Return what transformers would write dense, to be read when its turn comes.

    Weights that run compressed are read as they are.
    """
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        given.pop(name, None)
    homes = {id(x): name for name, x in given.items() if x.is_meta}
    # What runs compressed is never tied, and has no one place in memory to tell it by.
    held = {name: x for name, x in given.items() if isinstance(x, CompressedTensor)}
    plain = {name: x for name, x in given.items() if name not in held}
    tensors: dict[str, Tensor] = remove_tied_weights_from_state_dict(plain, model) | held
    if save_original_format:
        tensors = revert_weight_conversion(model, tensors)
        if any(x.is_meta and id(x) not in homes for x in tensors.values()):
            # Some weights are on the disk, and converting them takes their numbers.
            here = {name: _present(model, name, x) for name, x in given.items()}
            tensors, homes = revert_weight_conversion(model, here), {}

    def item(name: str, x: Tensor) -> Item:
        if id(x) in homes:
            return Item(name, Spec.of(x), lambda each: _present(model, homes[id(x)], x))
        if isinstance(x, CompressedTensor):
            return Item(name, Spec(x.dtype, tuple(x.shape)), lambda each: x)
        return Item(name, Spec.of(check_storable(name, x)), lambda each: on_cpu(x))

    # In the order in which safetensors itself lists them, so that equal models give equal files.
    ordered = sorted(tensors.items(), key=lambda pair: (-pair[1].element_size(), pair[0]))
    return [item(name, x) for name, x in ordered]


def measured(model: nn.Module) -> Sparsity:
    """Return how sparse all weights of a model are; tied ones count once."""
    with Workers() as workers:
        results = workers.in_order(
            lambda pair: sparsity_of(dense(_present(model, *pair))),
            list(_weights(model)),
            lambda pair: pair[1].nbytes,
        )
        return combined(results)


def same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two weights are the same bits, dense or in the form in which they run."""
    if isinstance(a, CompressedTensor) or isinstance(b, CompressedTensor):
        return type(a) is type(b) and torch.equal(a, b)
    return Spec.of(a) == Spec.of(b) and torch.equal(as_bytes(a), as_bytes(b))


def dense(x: Tensor) -> Tensor:
    """Return a weight as an ordinary tensor, also if it runs compressed."""
    return on_cpu(x.dequantize()) if isinstance(x, CompressedTensor) else x


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    saved = model.state_dict(keep_vars=True)
    yield from ((name, x) for name, x in model.named_buffers() if name in saved)


def _present(model: Any, name: str, x: Tensor) -> Tensor:
    """Return a weight in main memory, from the disk if accelerate has put it there."""
    return on_cpu(load_offloaded_parameter(model, name) if x.is_meta else x)
