"""Compressed weights in several processes."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slimtensors.errors import UnsupportedOperationError
from slimtensors.spec import as_bytes
from slimtensors.tensors.compressed import CompressedTensor
from slimtensors.tensors.quantized import QuantizedTensor


def broadcast_(model: nn.Module, *, src: int = 0, group: "dist.ProcessGroup | None" = None) -> None:
    """Give every process the quantized weights of process `src`, before it makes a DDP of a model.

    DDP would flatten them into one dense vector, so it is told to leave them alone; having no
    gradients, they stay equal. What is held without zeros or coded differs in size and is refused.
    """
    names = []
    for name, weight in model.named_parameters(remove_duplicate=False):
        if not isinstance(weight, CompressedTensor):
            continue
        names.append(name)
        if not isinstance(weight, QuantizedTensor) or isinstance(weight.codes, CompressedTensor):
            raise UnsupportedOperationError(
                f"{name}: a tensor that is {weight.describe()} has another size in each process;"
                " load it from a file in every one, or dequantize() it"
            )
        for _, leaf in weight.leaves():
            dist.broadcast(as_bytes(leaf), src, group)
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, names)
