"""Plans: trees of codecs. Each part of a codec may be encoded by another plan.

Encoding walks the tree down, decoding walks it up; the leaves are plain tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slimtensors import codecs
from slimtensors.codecs.protocol import check_part_names, has_random_access, takes_each
from slimtensors.errors import ConfigError, CorruptFileError, FormatError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import (
    QUANTIZED_DTYPES,
    Json,
    Parts,
    Spec,
    ceil_div,
    relative_distance,
    view_as,
)

MAX_DEPTH = 16
"""Far above any real plan; protects the stack from malicious files."""

_MAX_RATIO = 1 << 16
"""Bytes of a tensor per stored byte."""
_MAX_INNER_RATIO = 1 << 6
"""Bytes of all encoded parts per stored byte, beyond twice the tensor and `_MIN_INNER`."""
_MIN_INNER = 1 << 20


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
        """Whether decoding may return other numbers than were encoded."""
        lossy = getattr(self.codec, "lossy", False)
        return lossy or any(plan.is_lossy for plan in self.then.values())

    def to_json(self) -> Json:
        """Return the JSON form, the input of `from_json`."""
        data: Json = {"codec": codecs.to_json(self.codec)}
        if self.then:
            data["then"] = {part: plan.to_json() for part, plan in self.then.items()}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """Parse the JSON form."""
        codec, then = data.get("codec"), data.get("then", {})
        if not isinstance(codec, dict) or not isinstance(then, dict):
            raise FormatError(f"invalid plan: {str(data)[:80]}")
        return cls(codecs.from_json(codec), {k: cls.from_json(v) for k, v in then.items()})


@dataclass(frozen=True)
class Encoded:
    """A tensor in encoded form. Parts are plain tensors or encoded ones."""

    codec: codecs.Codec
    spec: Spec
    parts: Mapping[str, "Tensor | Encoded"]

    @property
    def plan(self) -> Plan:
        """The plan that produced it."""
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
    """Encode `x`, a tensor in main memory, with `plan`."""
    codec = plan.codec
    parts = codec.encode(x, each) if takes_each(type(codec)) else codec.encode(x)
    _check_parts(plan, parts)
    return Encoded(
        codec,
        Spec.of(x),
        {k: encode(plan.then[k], p, each) if k in plan.then else p for k, p in parts.items()},
    )


def _check_parts(plan: Plan, parts: Mapping[str, object]) -> None:
    for unknown in plan.then.keys() - parts.keys():
        raise ConfigError(
            f"codec {plan.codec.name!r} has no part {unknown!r}, only {', '.join(parts)}"
        )


def decode(encoded: Encoded, each: Each = serially) -> Tensor:
    """Decode a tensor; raise `CorruptFileError` if its parts do not fit each other."""
    parts = decode_parts(encoded, each)
    codec = encoded.codec
    try:
        if takes_each(type(codec)):
            return codec.decode(parts, encoded.spec, each)
        return codec.decode(parts, encoded.spec)
    except KeyError as error:
        raise CorruptFileError(f"codec {codec.name!r}: part {error} is missing") from error


def decode_into(encoded: Encoded, out: Tensor, each: Each = serially) -> Tensor:
    """Decode into the memory of `out` if the codec supports it; return the decoded tensor."""
    codec = encoded.codec
    if not has_random_access(codec):
        return decode(encoded, each)
    try:
        codec.decode_into(decode_parts(encoded, each), out, each)
    except KeyError as error:
        raise CorruptFileError(f"codec {encoded.codec.name!r}: part {error} is missing") from error
    return out


def decode_parts(encoded: Encoded, each: Each = serially) -> Parts:
    """Return the parts of the outermost codec as plain tensors."""
    parts = encoded.parts.items()
    return {name: decode(p, each) if isinstance(p, Encoded) else p for name, p in parts}


def encode_measured(plan: Plan, x: Tensor, each: Each = serially) -> tuple[Encoded, float | None]:
    """Encode `x`; return also the RMS error relative to the RMS of `x`, or None if lossless.

    Only the lossy steps are decoded to measure the error.
    """
    if not plan.is_lossy:
        return encode(plan, x, each), None
    rounded = encode(_lossy_steps(plan), x, each)
    error = _measure(rounded, x, each)
    return _encode_rest(rounded, plan, each), error


def relative_error(plan: Plan, x: Tensor) -> float | None:
    """Return the RMS error of `plan`, relative to the RMS of `x`, or None if it is lossless."""
    if not plan.is_lossy:
        return None
    return _measure(encode(_lossy_steps(plan), x), x, serially)


def _measure(rounded: Encoded, x: Tensor, each: Each) -> float:
    if isinstance(rounded.codec, codecs.Measured):
        return rounded.codec.relative_error(decode_parts(rounded, each), x)
    return relative_distance(decode(rounded, each), x)


def _lossy_steps(plan: Plan) -> Plan:
    """Return a plan without the lossless steps that no lossy step follows."""
    lossy = {part: _lossy_steps(inner) for part, inner in plan.then.items() if inner.is_lossy}
    return Plan(plan.codec, lossy)


def _encode_rest(encoded: Encoded, plan: Plan, each: Each) -> Encoded:
    """Apply the steps of `plan` that `_lossy_steps` left out."""

    def encode_part(part: Tensor | Encoded, then: Plan) -> Encoded:
        if isinstance(part, Encoded):
            return _encode_rest(part, then, each)
        return encode(then, part, each)

    _check_parts(plan, encoded.parts)
    return Encoded(
        encoded.codec,
        encoded.spec,
        {
            k: encode_part(p, plan.then[k]) if k in plan.then else p
            for k, p in encoded.parts.items()
        },
    )


def describe(encoded: Encoded, at: Mapping[str, tuple[int, int]], prefix: str = "") -> Json:
    """Return the JSON form without the data; `at` contains the byte range of each leaf."""
    parts: Json = {}
    for name, part in encoded.parts.items():
        path = prefix + name
        if isinstance(part, Encoded):
            parts[name] = describe(part, at, path + ".")
        else:
            parts[name] = {**Spec.of(part).to_json(), "at": list(at[path])}
    return {**encoded.spec.to_json(), "codec": codecs.to_json(encoded.codec), "parts": parts}


def parse_plan(data: Json, depth: int = 0) -> Plan:
    """Return the plan of an encoded tensor from the output of `describe`."""
    codec, parts = data.get("codec"), data.get("parts")
    if not isinstance(codec, dict) or not isinstance(parts, dict) or depth > MAX_DEPTH:
        raise CorruptFileError(f"invalid description of a tensor: {str(data)[:80]}")
    inner = {k: v for k, v in parts.items() if isinstance(v, dict) and "codec" in v}
    step = codecs.from_json(codec)
    check_part_names(step, parts)
    return Plan(step, {k: parse_plan(v, depth + 1) for k, v in inner.items()})


def parse_sizes(data: Json, prefix: str = "") -> dict[str, int]:
    """Return the bytes of each leaf by its dotted path, from the output of `describe`."""
    parts = data.get("parts")
    if not isinstance(parts, dict):
        raise CorruptFileError(f"invalid description of a tensor: {str(data)[:80]}")
    sizes: dict[str, int] = {}
    for name, part in parts.items():
        match part:
            case {"codec": dict()}:
                sizes |= parse_sizes(part, f"{prefix}{name}.")
            case {"at": [int(begin), int(end)]}:
                sizes[prefix + name] = end - begin
            case _:
                raise CorruptFileError(f"part {name!r}: invalid description")
    return sizes


def rebuild(data: Json, payload: memoryview) -> Encoded:
    """Build an encoded tensor from the output of `describe` and the bytes of its leaves.

    Every bound is checked.
    """
    encoded = _Builder(payload).build_node(data, 0)
    check_expansion(encoded, len(payload))
    return encoded


class _Builder:
    """Builds the leaves of a tree in order, so that their byte ranges cannot overlap."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._end = 0

    def build_node(self, data: Json, depth: int) -> Encoded:
        codec, described = data.get("codec"), data.get("parts")
        if not isinstance(codec, dict) or not isinstance(described, dict) or depth > MAX_DEPTH:
            raise CorruptFileError(f"invalid description of a tensor: {str(data)[:80]}")
        spec, step = Spec.from_json(data), codecs.from_json(codec)
        check_part_names(step, described)
        parts: dict[str, Tensor | Encoded] = {}
        for name, inner in described.items():
            if not isinstance(inner, dict):
                raise CorruptFileError(f"part {name!r}: invalid description")
            is_node = "codec" in inner
            parts[name] = self.build_node(inner, depth + 1) if is_node else self._build_leaf(inner)
        if spec.dtype in QUANTIZED_DTYPES and not isinstance(step, codecs.TorchQuantized):
            raise CorruptFileError(f"codec {step.name!r} does not support {spec.dtype}")
        return Encoded(step, spec, parts)

    def _build_leaf(self, data: Json) -> Tensor:
        spec, at = Spec.from_json(data), data.get("at")
        if not isinstance(at, list) or len(at) != 2 or not all(type(n) is int for n in at):
            raise CorruptFileError(f"invalid byte range of a part: {str(at)[:80]}")
        begin, end = at
        if not self._end <= begin <= end <= len(self._payload):
            raise CorruptFileError(
                f"byte range {at} of a part is out of bounds or overlaps another part"
            )
        if end - begin != spec.nbytes:
            raise CorruptFileError(
                f"a part has {end - begin} bytes, but its shape needs {spec.nbytes}"
            )
        self._end = end
        return view_as(self._payload[begin:end], spec)


def check_expansion(encoded: Encoded, stored: int) -> None:
    """Raise `CorruptFileError` if `stored` bytes would decode to more than `least_stored` allows.

    One limit for the whole tree: a small file with many nodes must not exhaust the memory.
    """
    least = least_stored(encoded)
    if stored < least:
        raise CorruptFileError(
            f"{stored} bytes are too few for a tensor of {encoded.spec} and its parts, which need"
            f" at least {least}"
        )


def least_stored(encoded: Encoded) -> int:
    """Return the number of bytes in which an encoded tensor must be stored at least.

    The ratios are far above any real ones. A reader allocates no more than they allow; a writer
    adds zeros to a tensor that would be smaller.
    """
    nbytes = encoded.spec.nbytes
    inner = _count_inner_bytes(encoded) - 2 * nbytes - _MIN_INNER
    return max(ceil_div(nbytes, _MAX_RATIO), ceil_div(inner, _MAX_INNER_RATIO), 0)


def _count_inner_bytes(encoded: Encoded) -> int:
    """Return the decoded bytes of all parts that are encoded, at any depth."""
    inner = [part for part in encoded.parts.values() if isinstance(part, Encoded)]
    return sum(part.spec.nbytes + _count_inner_bytes(part) for part in inner)
