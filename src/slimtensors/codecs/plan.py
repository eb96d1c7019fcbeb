"""Plans: a codec, and what to do next with each of its parts.

A plan is a tree. Encoding walks it down, decoding walks it up; the leaves are plain tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slimtensors import codecs
from slimtensors.errors import ConfigError, CorruptFileError, FormatError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import QUANTIZED_DTYPES, Json, Parts, Spec, relative_distance, view_as

_DEEPEST = 16
"""No real plan comes near; a hostile file would otherwise exhaust the stack."""


@dataclass(frozen=True)
class Plan:
    """Apply `codec`, then apply `then[part]` to each part named there."""

    codec: codecs.Codec
    then: Mapping[str, "Plan"] = field(default_factory=dict)

    def __str__(self) -> str:
        inner = ", ".join(f"{part}={plan}" for part, plan in self.then.items())
        return f"{self.codec.name}({inner})" if inner else self.codec.name

    @property
    def is_lossy(self) -> bool:
        """Whether decoding gives other numbers than were encoded."""
        lossy = getattr(self.codec, "lossy", False)
        return lossy or any(plan.is_lossy for plan in self.then.values())

    def to_json(self) -> Json:
        """Return the JSON form, which `from_json` reads back."""
        data: Json = {"codec": codecs.to_json(self.codec)}
        if self.then:
            data["then"] = {part: plan.to_json() for part, plan in self.then.items()}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """Parse the JSON form."""
        codec, then = data.get("codec"), data.get("then", {})
        if not isinstance(codec, dict) or not isinstance(then, dict):
            raise FormatError(f"not a plan: {str(data)[:80]}")
        return cls(codecs.from_json(codec), {k: cls.from_json(v) for k, v in then.items()})


@dataclass(frozen=True)
class Encoded:
    """A tensor in encoded form. Parts are plain tensors or encoded ones."""

    codec: codecs.Codec
    spec: Spec
    parts: Mapping[str, "Tensor | Encoded"]

    @property
    def plan(self) -> Plan:
        """The plan that made it."""
        inner = {k: part.plan for k, part in self.parts.items() if isinstance(part, Encoded)}
        return Plan(self.codec, inner)

    def leaves(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every plain tensor with its dotted path, in order."""
        for name, part in self.parts.items():
            if isinstance(part, Encoded):
                yield from ((f"{name}.{path}", leaf) for path, leaf in part.leaves())
            else:
                yield name, part


def chain(codec: codecs.Codec, /, **then: "Plan | codecs.Codec") -> Plan:
    """Build a plan: `chain(Bitmask(), values=Dense())`."""
    return Plan(codec, {k: v if isinstance(v, Plan) else Plan(v) for k, v in then.items()})


def encode(plan: Plan, x: Tensor, each: Each = serially) -> Encoded:
    """Encode `x`, a tensor in main memory, as `plan` says."""
    codec = plan.codec
    chunked = codecs.as_chunked(codec)
    parts = chunked.encode_each(x, each) if chunked else codec.encode(x)
    _check_parts(plan, parts)
    return Encoded(
        codec,
        Spec.of(x),
        {k: encode(plan.then[k], p, each) if k in plan.then else p for k, p in parts.items()},
    )


def _check_parts(plan: Plan, parts: Mapping[str, object]) -> None:
    for unknown in plan.then.keys() - parts.keys():
        raise ConfigError(
            f"codec {plan.codec.name!r} emits no part {unknown!r}, only {', '.join(parts)}"
        )


def decode(encoded: Encoded, each: Each = serially) -> Tensor:
    """Undo `encode`. Parts that do not fit each other raise `CorruptFileError`."""
    parts = plain_parts(encoded, each)
    codec = encoded.codec
    chunked = codecs.as_chunked(codec)
    try:
        if chunked:
            return chunked.decode_each(parts, encoded.spec, each)
        return codec.decode(parts, encoded.spec)
    except KeyError as error:
        raise CorruptFileError(f"codec {codec.name!r} lacks its part {error}") from error


def decode_into(encoded: Encoded, out: Tensor, each: Each = serially) -> Tensor:
    """Undo `encode`, into the memory of `out` if the codec can do that; return the tensor."""
    into = codecs.as_into(encoded.codec)
    if into is None:
        return decode(encoded, each)
    try:
        into.decode_into(plain_parts(encoded, each), out, each)
    except KeyError as error:
        raise CorruptFileError(f"codec {encoded.codec.name!r} lacks its part {error}") from error
    return out


def plain_parts(encoded: Encoded, each: Each = serially) -> Parts:
    """Return what the outermost codec emitted, its parts decoded."""
    parts = encoded.parts.items()
    return {name: decode(p, each) if isinstance(p, Encoded) else p for name, p in parts}


def encode_measured(plan: Plan, x: Tensor, each: Each = serially) -> tuple[Encoded, float | None]:
    """Encode `x`, and tell what that cost: RMS error relative to the RMS of `x`; none if lossless.

    The error is that of the lossy steps: what is lossless need not be undone to know it.
    """
    if not plan.is_lossy:
        return encode(plan, x, each), None
    rounded = encode(_lossy_steps(plan), x, each)
    error = _distance(rounded, x, each)
    return _completed(rounded, plan, each), error


def relative_error(plan: Plan, x: Tensor) -> float | None:
    """Return the RMS error that `plan` makes, relative to the RMS of `x`; none if lossless."""
    if not plan.is_lossy:
        return None
    return _distance(encode(_lossy_steps(plan), x), x, serially)


def _distance(rounded: Encoded, x: Tensor, each: Each) -> float:
    if isinstance(rounded.codec, codecs.Measured):
        return rounded.codec.relative_error(plain_parts(rounded, each), x)
    return relative_distance(decode(rounded, each), x)


def _lossy_steps(plan: Plan) -> Plan:
    """Return a plan without the steps that lose nothing and after which nothing is lost."""
    lossy = {part: _lossy_steps(inner) for part, inner in plan.then.items() if inner.is_lossy}
    return Plan(plan.codec, lossy)


def _completed(encoded: Encoded, plan: Plan, each: Each) -> Encoded:
    """Take those steps of a plan that its lossy steps left out."""

    def completed(part: Tensor | Encoded, then: Plan) -> Encoded:
        if isinstance(part, Encoded):
            return _completed(part, then, each)
        return encode(then, part, each)

    _check_parts(plan, encoded.parts)
    return Encoded(
        encoded.codec,
        encoded.spec,
        {k: completed(p, plan.then[k]) if k in plan.then else p for k, p in encoded.parts.items()},
    )


def describe(encoded: Encoded, at: Mapping[str, tuple[int, int]], prefix: str = "") -> Json:
    """Return the JSON form of all but the data; `at` says where each leaf was put."""
    parts: Json = {}
    for name, part in encoded.parts.items():
        path = prefix + name
        if isinstance(part, Encoded):
            parts[name] = describe(part, at, path + ".")
        else:
            parts[name] = {**Spec.of(part).to_json(), "at": list(at[path])}
    return {**encoded.spec.to_json(), "codec": codecs.to_json(encoded.codec), "parts": parts}


def plan_of(data: Json, depth: int = 0) -> Plan:
    """Return the plan of what `describe` returned."""
    codec, parts = data.get("codec"), data.get("parts")
    if not isinstance(codec, dict) or not isinstance(parts, dict) or depth > _DEEPEST:
        raise CorruptFileError(f"not an encoded tensor: {str(data)[:80]}")
    inner = {k: v for k, v in parts.items() if isinstance(v, dict) and "codec" in v}
    return Plan(codecs.from_json(codec), {k: plan_of(v, depth + 1) for k, v in inner.items()})


def sizes_of(data: Json, prefix: str = "") -> dict[str, int]:
    """Return the bytes of each leaf of what `describe` returned, by its dotted path."""
    parts = data.get("parts")
    if not isinstance(parts, dict):
        raise CorruptFileError(f"not an encoded tensor: {str(data)[:80]}")
    sizes: dict[str, int] = {}
    for name, part in parts.items():
        match part:
            case {"codec": dict()}:
                sizes |= sizes_of(part, f"{prefix}{name}.")
            case {"at": [int(begin), int(end)]}:
                sizes[prefix + name] = end - begin
            case _:
                raise CorruptFileError(f"part {name!r} is not described")
    return sizes


def rebuild(data: Json, payload: memoryview) -> Encoded:
    """Join what `describe` returned with the bytes that hold the leaves, checking every bound."""
    return _Rebuilding(payload).node(data, 0)


class _Rebuilding:
    """Reads the leaves of a tree one after the other: none can lie where another one does."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._end = 0

    def node(self, data: Json, depth: int) -> Encoded:
        codec, described = data.get("codec"), data.get("parts")
        if not isinstance(codec, dict) or not isinstance(described, dict) or depth > _DEEPEST:
            raise CorruptFileError(f"not an encoded tensor: {str(data)[:80]}")
        spec = Spec.from_json(data)
        if spec.nbytes > max_decoded(len(self._payload)):
            raise CorruptFileError(f"{len(self._payload)} bytes cannot hold shape {spec.shape}")
        parts: dict[str, Tensor | Encoded] = {}
        for name, inner in described.items():
            if not isinstance(inner, dict):
                raise CorruptFileError(f"part {name!r} is not described")
            parts[name] = self.node(inner, depth + 1) if "codec" in inner else self._leaf(inner)
        step = codecs.from_json(codec)
        if spec.dtype in QUANTIZED_DTYPES and not isinstance(step, codecs.TorchQuantized):
            raise CorruptFileError(f"codec {step.name!r} makes no tensors of {spec.dtype}")
        return Encoded(step, spec, parts)

    def _leaf(self, data: Json) -> Tensor:
        spec, at = Spec.from_json(data), data.get("at")
        if not isinstance(at, list) or len(at) != 2 or not all(type(n) is int for n in at):
            raise CorruptFileError(f"a part lies from one byte to another, not at {str(at)[:80]}")
        begin, end = at
        if not self._end <= begin <= end <= len(self._payload):
            raise CorruptFileError(f"a part lies at {at}, outside of its tensor or in another part")
        if end - begin != spec.nbytes:
            raise CorruptFileError(
                f"a part of {end - begin} bytes, but its shape needs {spec.nbytes}"
            )
        self._end = end
        return view_as(self._payload[begin:end], spec)


def max_decoded(stored: int) -> int:
    """Return how many bytes a tensor stored in `stored` bytes may have at the most.

    No real tensor comes near; without a bound, a small file could make us fill all memory.
    """
    return stored << 16
