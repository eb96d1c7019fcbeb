"""Retention: which checkpoints of a run to keep."""

from collections.abc import Sequence
from dataclasses import dataclass

from slimtensors.checkpoint.run import Point, needed
from slimtensors.errors import ConfigError


@dataclass(frozen=True)
class Retention:
    """Keep the last ones, every n-th step and the best; without any of these, all."""

    last: int | None = None
    every: int | None = None
    best: str | None = None
    """The metric by which one is the best."""
    best_is: str = "min"

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.last), ("keep_every", self.every)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a number from 1, got {value!r}")
        if self.best_is not in ("min", "max"):
            raise ConfigError(f"best_is must be 'min' or 'max', got {self.best_is!r}")

    def kept(self, points: Sequence[Point]) -> set[str]:
        """Return the names to keep, those included that others need. The newest always stays."""
        if self.last is None and self.every is None and self.best is None:
            return {point.name for point in points}
        keep = [point.name for point in points[-(self.last or 1) :]]
        if self.every is not None:
            steps = ((point, point.manifest.step) for point in points)
            keep += [p.name for p, step in steps if step is not None and step % self.every == 0]
        if self.best is not None:
            keep += self._best(points, self.best)
        return needed(keep, points)

    def _best(self, points: Sequence[Point], metric: str) -> list[str]:
        sign = 1 if self.best_is == "min" else -1
        rated = [
            (sign * point.manifest.metrics[metric], point.name)
            for point in points
            if metric in point.manifest.metrics
        ]
        return [min(rated)[1]] if rated else []
