"""Sensitivity of the predictions of a model to errors of its weights.

An error `e` of a matrix raises the KL divergence from the original predictions by about
`½ Σᵢ Gᵢ eᵢ A eᵢᵀ` per prediction. `A` is the mean of `xᵀx` over the inputs, and `G` the mean
squared gradient of each output for labels that are drawn from the model itself: the Fisher
information, with inputs and gradients taken as independent.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from slimtensors.errors import ConfigError
from slimtensors.layerwise.divergence import call_model, extract_outputs
from slimtensors.layerwise.hessian import Hessian, MatrixKey
from slimtensors.layerwise.inputs import Batch, Layer, MatrixTable
from slimtensors.layerwise.passes import evaluation_mode
from slimtensors.layerwise.products import TRANSPARENT, find_address, is_convolution
from slimtensors.layerwise.statistics import GROUP_PREFIX, InputFactor, Statistics, factor_inputs

Objective = Callable[[nn.Module, Batch], tuple[Tensor, int]]
"""Runs a model on a batch; returns a score, and the number of predictions that it sums over.

The score of a prediction is the log-likelihood of a label drawn from the model, or any loss.
"""

Progress = Callable[[int, int], object]
"""Called with the number of finished batches and the total."""

_ROUNDING = 0.05
"""Largest relative error of sums of probabilities in 16-bit floats."""
_MEMORY_SHARE = 0.4
"""Share of the available memory for matrices `A`."""


def score_outputs(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Return the log-likelihood of labels that are drawn from the predictions, and their number.

    Outputs that are not logits are taken as directions with normal noise.
    """
    outputs, are_logits = extract_outputs(call_model(model, batch))
    rows = outputs.reshape(-1, outputs.shape[-1]).float()
    if are_logits and rows.shape[-1] > 1:
        probabilities = rows.detach().softmax(-1)
        if bool(probabilities.isnan().any()):
            raise ConfigError("outputs of the model are not finite; check the calibration data")
        labels = torch.multinomial(probabilities, 1)[:, 0]
        return -functional.cross_entropy(rows, labels, reduction="sum"), len(rows)
    if rows.shape[-1] > 1:
        rows = functional.normalize(rows, dim=-1)
    return (rows * torch.randn_like(rows)).sum(), len(rows)


def find_matrix_keys(layers: Iterable[Layer]) -> dict[str, str]:
    """Return the layer under whose name statistics of each layer are stored.

    Layers with tied weights have the same one.
    """
    layers = list(layers)
    owners = {layer.addresses[0]: layer.name for layer in layers}
    return {layer.name: owners[layer.addresses[0]] for layer in layers}


@dataclass(frozen=True)
class Sampling:
    """Amount of data for statistics."""

    gradient_batches: int
    """Batches for gradients, of which fewer are needed than for inputs."""
    seed: int = 0
    memory: int | None = None
    """Bytes for matrices of inputs at a time; None: a share of the available memory."""


def collect_statistics(
    model: nn.Module,
    layers: Mapping[str, Layer],
    batches: Sequence[Batch],
    objective: Objective,
    statistics: Statistics,
    *,
    sampling: Sampling,
    pooled: Collection[str] = (),
    progress: Progress | None = None,
) -> None:
    """Run a model and store what `statistics` lacks.

    If the matrices of inputs do not fit in memory at once, the model runs several times. The
    experts of layers in `pooled` are treated as one matrix.
    """
    frozen = {name: x.requires_grad for name, x in model.named_parameters()}
    report = progress or (lambda done, total: None)
    model.requires_grad_(False)
    try:
        with evaluation_mode(model), torch.random.fork_rng(devices=[]):
            groups = _find_groups(model, layers, batches, objective, pooled)
            due = [group for group in groups if not statistics.has_inputs(group.name)]
            passes = _divide(due, sampling.memory or _available_memory())
            if not passes and not statistics.has_gradients:
                passes = [[]]
            total = len(passes) * len(batches)
            for number, some in enumerate(passes):
                recorder = _Recorder(layers.values(), some)
                first = not statistics.has_gradients
                needs_gradients = first or any(group.has_lookups for group in some)
                for i, batch in enumerate(batches):
                    torch.manual_seed(sampling.seed + i)
                    with_gradients = needs_gradients and i < sampling.gradient_batches
                    _run(model, batch, objective, recorder, with_gradients=with_gradients)
                    report(number * len(batches) + i + 1, total)
                if first:
                    statistics.store_gradients(recorder.finish_gradients())
                for group in some:
                    statistics.store_inputs(group.name, group.readers, recorder.factor(group))
    finally:
        for name, x in model.named_parameters():
            x.requires_grad_(frozen[name])


def _run(
    model: nn.Module,
    batch: Batch,
    objective: Objective,
    recorder: "_Recorder",
    *,
    with_gradients: bool,
) -> None:
    recorder.with_gradients = with_gradients
    with torch.set_grad_enabled(with_gradients), recorder:
        score, count = objective(model, batch)
        if with_gradients:
            if not score.requires_grad:
                raise ConfigError("the loss does not depend on any observed layer")
            recorder.predictions += count
    if with_gradients:
        score.backward()  # type: ignore[no-untyped-call]


@dataclass
class _Group:
    """Matrices that read the same inputs."""

    name: str
    readers: list[MatrixKey]
    columns: int
    is_pooled: bool = False
    """Whether its matrices have inputs of their own, which are summed up."""
    has_lookups: bool = False
    """Whether rows are looked up, so that gradients take the place of inputs."""


def _find_groups(
    model: nn.Module,
    layers: Mapping[str, Layer],
    batches: Sequence[Batch],
    objective: Objective,
    pooled: Collection[str],
) -> list[_Group]:
    """Return the groups of matrices with the same inputs, found by a run of the model."""
    survey = _Survey(layers.values())
    torch.manual_seed(0)
    with torch.no_grad(), survey:
        objective(model, min(batches, key=_count_items))
    groups: dict[object, _Group] = {}
    for key, uses in survey.uses.items():
        identity = key[0] if key[0] in pooled else tuple(id(x) for x in uses)
        group = groups.setdefault(
            identity, _Group(f"{GROUP_PREFIX}{len(groups)}", [], uses[0].shape[-1])
        )
        group.readers.append(key)
        group.is_pooled = key[0] in pooled
        group.has_lookups |= key in survey.looked_up
    # Experts that this batch did not use have inputs of their own.
    seen = {name for name, _ in survey.uses}
    count = len(groups)
    for name in sorted(seen):
        layer = layers[name]
        for i in range(layer.count):
            if (name, i) in survey.uses:
                continue
            if name in pooled:
                groups[name].readers.append((name, i))
            else:
                groups[name, i] = _Group(
                    f"{GROUP_PREFIX}{count}", [(name, i)], layer.matrix_shape[1]
                )
                count += 1
    return list(groups.values())


def _count_items(batch: Batch) -> int:
    values = batch.values() if isinstance(batch, Mapping) else _as_list(batch)
    return sum(x.numel() for x in values if isinstance(x, Tensor))


def _as_list(batch: Batch) -> list[Any]:
    return list(batch) if isinstance(batch, Sequence) else [batch]


def _divide(groups: Sequence[_Group], memory: int) -> list[list[_Group]]:
    """Return groups whose matrices fit in memory together."""
    parts: list[list[_Group]] = []
    used = memory
    for group in groups:
        nbytes = 4 * group.columns**2
        if not parts or used + nbytes > memory:
            parts.append([])
            used = 0
        parts[-1].append(group)
        used += nbytes
    return parts


def _available_memory() -> int:
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        free = 8 << 30
    return max(int(_MEMORY_SHARE * free), 1 << 28)


class _Observer(TorchFunctionMode):
    """Sees the products of layers, and lookups in their weights."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        super().__init__()
        self._layers = list(layers)
        self._matrices = MatrixTable(self._layers)
        self._addresses = {
            address: (layer.name, i)
            for layer in self._layers
            for i, address in enumerate(layer.addresses)
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in TRANSPARENT:
            with self:
                return TRANSPARENT[func](*args, **kwargs)
        if func is functional.embedding:
            return self._see_lookup(func(*args, **kwargs), args, kwargs)
        products = self._matrices.find_products(func, args, kwargs)
        out = func(*args, **kwargs)
        if not products:
            return out
        return self.see_product(products, out, channels_first=is_convolution(func))

    def _see_lookup(self, out: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        ids = args[0] if args else kwargs["input"]
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        key = self._addresses.get(find_address(weight))
        return out if key is None else self.see_lookup(key, ids, out)

    def see_product(
        self, products: list[tuple[MatrixKey, Tensor]], out: Tensor, *, channels_first: bool
    ) -> Tensor:
        """Record a product; return its result."""
        raise NotImplementedError

    def see_lookup(self, key: MatrixKey, ids: Tensor, out: Tensor) -> Tensor:
        """Record a lookup of rows; return its result."""
        raise NotImplementedError


class _Survey(_Observer):
    """Lists the inputs of each matrix."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        super().__init__(layers)
        self.uses: dict[MatrixKey, list[Tensor]] = {}
        self.looked_up: set[MatrixKey] = set()

    def see_product(
        self, products: list[tuple[MatrixKey, Tensor]], out: Tensor, *, channels_first: bool
    ) -> Tensor:
        for key, x in products:
            self.uses.setdefault(key, []).append(x)
        return out

    def see_lookup(self, key: MatrixKey, ids: Tensor, out: Tensor) -> Tensor:
        self.looked_up.add(key)
        self.uses.setdefault(key, []).append(out)
        return out


class _Recorder(_Observer):
    """Sums up inputs and gradients."""

    def __init__(self, layers: Iterable[Layer], groups: Sequence[_Group]) -> None:
        super().__init__(layers)
        self.with_gradients = False
        self.predictions = 0
        self._shapes = {
            (layer.name, i): layer.matrix_shape
            for layer in self._layers
            for i in range(layer.count)
        }
        self._leaders: dict[MatrixKey, Hessian] = {}
        for group in groups:
            keys = group.readers if group.is_pooled else group.readers[:1]
            self._leaders |= dict.fromkeys(keys, Hessian(group.columns))
        self._lookups: dict[MatrixKey, Hessian] = {}
        self._looked_up: dict[MatrixKey, Tensor] = {}
        self._squares: dict[MatrixKey, Tensor] = {}

    def see_product(
        self, products: list[tuple[MatrixKey, Tensor]], out: Tensor, *, channels_first: bool
    ) -> Tensor:
        for key, x in products:
            if (hessian := self._leaders.get(key)) is not None:
                try:
                    hessian.add(x)
                except ConfigError as error:
                    raise ConfigError(f"{key[0]}: {error}") from error
        if not self._needs_gradient(out):
            return out
        out = _track(out)
        keys = [key for key, _ in products]
        axis = 1 if channels_first else -1
        _watch(out, lambda gradient: self._add_squares(keys, gradient.movedim(axis, -1)))
        return out

    def see_lookup(self, key: MatrixKey, ids: Tensor, out: Tensor) -> Tensor:
        counts = self._looked_up.setdefault(key, torch.zeros(self._shapes[key][0]))
        counts += torch.bincount(ids.reshape(-1).cpu(), minlength=len(counts))
        if not self._needs_gradient(out):
            return out
        out = _track(out)
        if key in self._leaders:
            hessian = self._lookups.setdefault(key, Hessian(out.shape[-1]))
            _watch(out, hessian.add)
        return out

    def _needs_gradient(self, out: Tensor) -> bool:
        """Return True if a gradient can be recorded: models may disable them in some places."""
        return self.with_gradients and torch.is_grad_enabled() and out.is_floating_point()

    def _add_squares(self, keys: Sequence[MatrixKey], gradient: Tensor) -> None:
        rows = self._shapes[keys[0]][0]
        parts = [gradient]
        if len(keys) > 1:
            if gradient.dim() != 3 or len(gradient) != len(keys):
                return
            parts = list(gradient)
        for key, part in zip(keys, parts, strict=True):
            squares = _sum_squares(part, rows)
            if squares is not None:
                self._squares[key] = self._squares.get(key, 0) + squares

    def finish_gradients(self) -> dict[MatrixKey, Tensor]:
        """Return the sensitivity of each row of all matrices."""
        count = max(self.predictions, 1)
        found = {key: x / count for key, x in self._squares.items()}
        for key, counts in self._looked_up.items():
            if key not in found:  # not an output layer as well
                found[key] = counts / max(float(counts.sum()), 1)
        return found

    def factor(self, group: _Group) -> InputFactor:
        """Return the inputs of a group as needed for rounding."""
        leader = group.readers[0]
        hessian = self._leaders.pop(leader)
        mean, tokens = hessian.mean(), hessian.tokens
        if (lookups := self._lookups.pop(leader, None)) is not None:
            # Gradients are summed over all later predictions of a sequence.
            scale = lookups.tokens / max(self.predictions, 1)
            mean = mean + lookups.mean() * scale
            tokens = max(tokens, lookups.tokens)
        return factor_inputs(mean, tokens)


def _track(out: Tensor) -> Tensor:
    """Return a tensor that gradients are computed for, in memory that may be changed."""
    return out if out.requires_grad else out.detach().requires_grad_().clone()


def _watch(out: Tensor, callback: Callable[[Tensor], None]) -> None:
    out.register_hook(callback)  # type: ignore[no-untyped-call]


def _sum_squares(gradient: Tensor, rows: int) -> Tensor | None:
    """Return the sum of squared gradients of each output `[..., rows]`."""
    if gradient.dim() and gradient.shape[-1] == rows:
        return _expect_squares(gradient.reshape(-1, rows).float()).sum(0)
    if gradient.dim() == 2 and len(gradient) == rows:  # weight @ inputs
        return gradient.float().square().sum(1)
    return None


def _expect_squares(gradients: Tensor) -> Tensor:
    """Return squared gradients; those of logits as expected for all labels instead of one.

    The gradient of a label's log-likelihood is 1 - p for that label and -p for all others. Most
    labels are never drawn, so p (1 - p) is a much better estimate than the square.
    """
    largest, drawn = gradients.max(-1, keepdim=True)
    is_softmax = bool(
        ((gradients > 0).sum(-1, keepdim=True) <= 1).all()
        and (gradients.sum(-1, keepdim=True).abs() <= _ROUNDING * largest).all()
        and (largest <= 1).all()
    )
    p = (-gradients).scatter_add(-1, drawn, torch.ones_like(largest))
    return p * (1 - p) if is_softmax else gradients.square()


__all__ = [
    "Objective",
    "Sampling",
    "collect_statistics",
    "find_matrix_keys",
    "score_outputs",
]
