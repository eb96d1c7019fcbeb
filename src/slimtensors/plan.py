"""Plans: a codec, and what to do next with each of its parts.

A plan is a tree. Encoding walks it down, decoding walks it up; the leaves are plain tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slimtensors import codecs
from slimtensors.errors import ConfigError, CorruptFileError, FormatError
from slimtensors.spec import Each, Json, Parts, Spec, serially, view

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
    for unknown in plan.then.keys() - parts.keys():
        raise ConfigError(
            f"codec {codec.name!r} emits no part {unknown!r}, only {', '.join(parts)}"
        )
    return Encoded(
        codec,
        Spec.of(x),
        {k: encode(plan.then[k], p, each) if k in plan.then else p for k, p in parts.items()},
    )


def decode(encoded: Encoded, each: Each = serially) -> Tensor:
    """Undo `encode`. Parts that do not fit each other raise `CorruptFileError`."""
    parts: Parts = {}
    for name, part in encoded.parts.items():
        parts[name] = decode(part, each) if isinstance(part, Encoded) else part
    codec = encoded.codec
    chunked = codecs.as_chunked(codec)
    try:
        if chunked:
            return chunked.decode_each(parts, encoded.spec, each)
        return codec.decode(parts, encoded.spec)
    except KeyError as error:
        raise CorruptFileError(f"codec {codec.name!r} lacks its part {error}") from error


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


def rebuild(data: Json, payload: memoryview, depth: int = 0) -> Encoded:
    """Join what `describe` returned with the bytes that hold the leaves, checking every bound."""
    codec, described = data.get("codec"), data.get("parts")
    if not isinstance(codec, dict) or not isinstance(described, dict) or depth > _DEEPEST:
        raise CorruptFileError(f"not an encoded tensor: {str(data)[:80]}")
    parts: dict[str, Tensor | Encoded] = {}
    for name, inner in described.items():
        if not isinstance(inner, dict):
            raise CorruptFileError(f"part {name!r} is not described")
        parts[name] = (
            rebuild(inner, payload, depth + 1) if "codec" in inner else _leaf(inner, payload)
        )
    return Encoded(codecs.from_json(codec), Spec.from_json(data), parts)


def _leaf(data: Json, payload: memoryview) -> Tensor:
    spec = Spec.from_json(data)
    match data.get("at"):
        case [int(begin), int(end)] if 0 <= begin <= end <= len(payload):
            pass
        case other:
            raise CorruptFileError(f"a part lies at {str(other)[:80]}, outside of its tensor")
    if end - begin != spec.nbytes:
        raise CorruptFileError(f"a part of {end - begin} bytes, but its shape needs {spec.nbytes}")
    return view(payload[begin:end], spec)
