"""How sparse weights are to be as training goes on."""

from dataclasses import dataclass

from slimtensors.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Sparsity that grows from step `start` to step `end` of the optimizer."""

    start: int
    end: int
    initial: float
    final: float
    every: int = 1
    """Steps from one change to the next; the last change is always at `end`."""
    power: int = 3
    """Of the curve: 1 is straight, 3 fast first, while much is left (Zhu and Gupta, 2017)."""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ConfigError(f"a schedule cannot go from step {self.start} to step {self.end}")
        if not 0 <= self.initial <= self.final < 1:
            raise ConfigError(
                f"sparsity must grow, from 0 to less than 1; got {self.initial} to {self.final}"
            )
        if self.every < 1:
            raise ConfigError(f"every: must be a number of steps from 1, got {self.every}")

    def at(self, step: int) -> float:
        """Return the share of weights that are zero after so many steps."""
        if step < self.start:
            return 0.0
        if step >= self.end:
            return self.final
        left = (self.end - step) / (self.end - self.start)
        return self.final + (self.initial - self.final) * left**self.power

    def is_due(self, step: int) -> bool:
        """Tell whether masks change after so many steps."""
        if step == self.end:
            return True
        return self.start <= step < self.end and (step - self.start) % self.every == 0
