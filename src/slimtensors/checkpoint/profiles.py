"""Profiles: how much of a training state is kept, named for what they touch."""

from collections.abc import Mapping
from dataclasses import dataclass

from slimtensors.errors import ConfigError, nearest


@dataclass(frozen=True)
class Profile:
    """What may be rounded. Vectors, counters and random states never are.

    What a training goes on from is rounded at random, so that errors have no direction and do not
    add up: rounded to nearest, a weight that moves by less than half a step would never move. The
    random numbers have a seed, so that the same state gives the same bytes.
    """

    name: str
    weight_step: float | None = None
    """Weights move from the base in steps of this, times the RMS of how far they moved."""
    first_step: float | None = None
    """First moments are multiples of this, times the root of the second."""
    first_bits: int | None = None
    """Bits of the mantissa of first moments."""
    second_bits: int | None = None
    """Bits of the mantissa of second moments."""
    weight_bits: int | None = None
    """Bits of the mantissa of weights."""
    is_model_only: bool = False
    """Whether the optimizer and the rest are left out: good to look at, not to resume from."""

    @property
    def is_exact(self) -> bool:
        """Whether everything comes back bit for bit."""
        steps = (self.weight_step, self.first_step)
        return steps == (None, None) and not any(
            (self.first_bits, self.second_bits, self.weight_bits, self.is_model_only)
        )


PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("exact"),
        Profile("optimizer-bf16", first_bits=7, second_bits=7),
        Profile("optimizer", first_step=1 / 16, second_bits=5),
        Profile("all", weight_step=0.4, first_step=1 / 8, second_bits=3),
        Profile("history", weight_bits=7, is_model_only=True),
    )
}


def find_profile(profile: str | Profile) -> Profile:
    """Return the profile of this name."""
    if isinstance(profile, Profile):
        return profile
    if profile not in PROFILES:
        raise ConfigError(f"unknown profile {profile!r}; {nearest(profile, PROFILES)}")
    return PROFILES[profile]
