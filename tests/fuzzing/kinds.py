"""Kinds of documents: each makes a valid one, mutates it, and uses a mutant as a user would."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from hashlib import sha256
from io import BytesIO
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any, ClassVar
from zoneinfo import ZoneInfo

import torch
from fuzzing.mutators import dump_json, mutate_bytes, mutate_json, seal_file
from omegaconf import OmegaConf
from reliability_tools import blob, blob_file, edit_manifest, split, split_blob
from safetensors.torch import save_file
from strategies import raw_bytes
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.nn import functional

import slimtensors
from slimtensors import _core
from slimtensors.archive.delta import open_restored
from slimtensors.archive.originals import find_originals, pack_text, unpack_text
from slimtensors.archive.write import as_source
from slimtensors.checkpoint import load_checkpoint, save_checkpoint
from slimtensors.checkpoint import run as runs
from slimtensors.checkpoint.distributed import StorageWriter, folders
from slimtensors.checkpoint.store import content_id
from slimtensors.codecs import (
    Bins,
    Bitmask,
    Bitmask24,
    Dense,
    Density,
    Gaps,
    Huffman,
    Int,
    IntBlocks,
)
from slimtensors.codecs.plan import Plan, chain
from slimtensors.errors import FormatError
from slimtensors.folder import config_json
from slimtensors.layerwise.resume import WorkFolder
from slimtensors.parallel import serially
from slimtensors.quantization import QuantizationArgs, QuantizationConfig, formats
from slimtensors.quantization.affine import find_params
from slimtensors.quantization.codec import Quantized
from slimtensors.recipe import Recipe
from slimtensors.report.collect import collect
from slimtensors.report.data import Report, read_report, write_report
from slimtensors.report.page import render_page
from slimtensors.runtime import (
    CompressedTensor,
    CsrTensor,
    SparseTensor,
    coded_weight,
    from_module,
    int4_weight_only,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
    rebuild,
    sparse_int8_weight,
)

Content = dict[str, bytes]
"""Files of a document by their relative path."""


@dataclass(frozen=True)
class Mutant:
    """A mutated document."""

    files: Content
    """Files that differ from the original."""
    is_sealed: bool
    """Whether checksums were computed again; otherwise it must be refused or mean the same."""
    options: Any = None


@dataclass
class Kind:
    """Documents of one kind, in a folder."""

    folder: Path
    originals: Content = field(default_factory=dict)

    is_named: ClassVar[bool] = True
    """Whether errors must name a file of the document."""

    @property
    def name_in_errors(self) -> str:
        """Text that every error must contain."""
        return str(self.folder) if self.is_named else ""

    def make(self) -> None:
        """Write the original document; `originals` are read afterwards."""

    def mutate(self, random: Random) -> Mutant:
        """Return a mutant."""
        raise NotImplementedError

    def use(self, mutant: Mutant, random: Random) -> str:
        """Read the document; return a digest of its content, or "" if it has none."""
        raise NotImplementedError

    def claim(self) -> int:
        """Return the bytes in memory that the document claims."""
        return 0

    def prepare(self) -> None:
        """Write the original and remember its files."""
        self.make()
        self.originals = {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }

    def write(self, files: Content) -> None:
        """Write files of the document."""
        for name, raw in files.items():
            (self.folder / name).write_bytes(raw)

    def restore(self, mutant: Mutant) -> None:
        """Write the original files again."""
        self.write({name: self.originals[name] for name in mutant.files})


def digest_values(value: Any) -> str:
    """Return a digest of tensors and other values, bit by bit."""
    found = sha256()

    def add(part: Any) -> None:
        if isinstance(part, CompressedTensor):
            add(part.dequantize())
        elif isinstance(part, Tensor) and part.is_quantized:
            found.update(f"{part.dtype} {tuple(part.shape)} {part.qscheme()}".encode())
            add(part.int_repr())
        elif isinstance(part, Tensor):
            found.update(f"{part.dtype} {tuple(part.shape)}".encode())
            found.update(raw_bytes(part))
        elif isinstance(part, dict):
            for key, inner in part.items():
                found.update(repr(key).encode())
                add(inner)
        elif isinstance(part, list | tuple):
            found.update(type(part).__name__.encode())
            for inner in part:
                add(inner)
        elif isinstance(part, Namespace):
            add(vars(part))
        elif isinstance(part, BytesIO):
            add((part.getvalue(), part.tell()))
        else:
            found.update(repr(part).encode(errors="backslashreplace"))

    add(value)
    return found.hexdigest()


def sample_tensor(*shape: int, keep: float = 0.4, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=random)
    return torch.where(torch.rand(*shape, generator=random) < keep, x, 0.0).to(dtype)


def check_claims(path: Path, loaded: dict[str, Any]) -> None:
    """Assert that tensors are what the headers describe."""
    with slimtensors.open(path) as archive:
        for name in archive:
            info, x = archive.info(name), loaded.get(name)
            if archive.tree is None:
                assert isinstance(x, Tensor), name
                assert info.shape == tuple(x.shape), name
                assert info.dtype == str(x.dtype).removeprefix("torch."), name


def use_archive(path: Path, random: Random) -> str:
    """Read an archive in one of several ways."""
    match random.randrange(8):
        case 0:
            summary = slimtensors.inspect(path)
            json.dumps(summary.to_json())
            str(summary)
        case 1:
            result = slimtensors.verify(path, threads=1)
            if not result:
                reason = next(iter({**result.damaged, **result.different}.values()))
                raise FormatError(reason)
        case 2 | 3:
            loaded = slimtensors.load(path, threads=1, run_compressed=True)
            for x in loaded.values():
                if isinstance(x, CompressedTensor) and x.dim() == 2 and x.numel() < 1 << 20:
                    functional.linear(torch.ones(1, x.shape[1], dtype=x.dtype), x)
        case _:
            loaded = slimtensors.load(path, threads=1)
            check_claims(path, loaded)
            return digest_values(loaded)
    return ""


def claim_archive(path: Path) -> int:
    """Return the bytes that an archive claims."""
    with suppress(FormatError):
        return slimtensors.inspect(path).dense_bytes
    return 0


def plans() -> Iterator[tuple[Plan, Tensor]]:
    """Yield small tensors with plans for every codec."""
    x, half = sample_tensor(24, 32), sample_tensor(24, 32, dtype=torch.bfloat16)
    pairs = sample_tensor(16, 32, keep=1.0)
    pairs.view(-1, 4)[:, 1::2] = 0
    bits = x.view(torch.uint8)
    yield chain(Bitmask()), x
    yield chain(Bitmask(), mask=Gaps(), values=Huffman()), x
    yield chain(Bitmask(), mask=chain(Gaps(), tokens=Huffman()), values=Bins()), half
    yield chain(Bitmask(), mask=Density()), half
    yield chain(Bitmask24(), codes=Huffman()), pairs
    yield chain(Dense()), x.to(torch.complex128)
    yield chain(Huffman()), half
    yield chain(Huffman(), data=Huffman(), chunks=Bins()), bits
    yield chain(Bins()), x.double()
    yield chain(Bins()), (x * 9).to(torch.int16)
    yield chain(Int(8)), x
    yield chain(Int(4, per_row=True), q=chain(Bitmask(), mask=Density(), values=Huffman())), half
    yield chain(IntBlocks(), q=Huffman(), scale=Huffman()), x
    for args in (
        QuantizationArgs(4, group_size=16),
        QuantizationArgs(4, group_size=16, symmetric=False),
        QuantizationArgs(8, "float"),
        QuantizationArgs(4, "float", group_size=16, strategy="group", scale_dtype=torch.uint8),
    ):
        yield chain(Quantized(args)), half
        yield chain(Quantized.in_whole_bytes(args), q=Huffman()), x


class Blobs(Kind):
    """Archives of the dialect `slim` with one blob each."""

    def make(self) -> None:
        self.path = self.folder / "x.safetensors"
        self.variants = []
        for plan, x in plans():
            slimtensors.save({"x": x}, self.path, preset=plan, threads=1)
            self.variants.append(self.path.read_bytes())
        quantized = torch._make_per_tensor_quantized_tensor(torch.ones(4, 4).char(), 0.5, 3)
        channels = torch._make_per_channel_quantized_tensor(
            torch.ones(4, 4).char(), torch.ones(4).double(), torch.zeros(4).long(), 0
        )
        for x in (quantized, channels, int8_dynamic_activation_int8_weight()(torch.ones(8, 16))):
            slimtensors.save({"x": x}, self.path, threads=1)
            self.variants.append(self.path.read_bytes())
        self.digests: dict[bytes, str] = {}

    def mutate(self, random: Random) -> Mutant:
        raw = random.choice(self.variants)
        if random.random() < 0.2:
            return Mutant({self.path.name: mutate_bytes(random, raw)}, is_sealed=False, options=raw)
        header, data = split(raw)
        inner, payload = split_blob(data)
        text: object = inner
        match random.randrange(4):
            case 0:
                payload = mutate_bytes(random, payload)
            case 1:
                payload = mutate_bytes(random, payload)
                text = mutate_json(random, inner)
            case _:
                text = mutate_json(random, inner)
        if isinstance(text, dict):
            text["crc32c"] = _core.crc32c(payload)
        raw_blob = blob(dump_json(text), payload)
        if random.random() < 0.5:
            return Mutant({self.path.name: blob_file(raw_blob)}, is_sealed=True)
        entry = {"dtype": "U8", "shape": [len(raw_blob)], "data_offsets": [0, len(raw_blob)]}
        manifest = json.loads(header["__metadata__"]["slimtensors"])
        return Mutant({self.path.name: seal_file({"x": entry}, raw_blob, manifest)}, is_sealed=True)

    def use(self, mutant: Mutant, random: Random) -> str:
        return use_archive(self.path, random)

    def original_digest(self, mutant: Mutant) -> str:
        """Return the digest of the variant that was mutated."""
        if mutant.options not in self.digests:
            self.write({self.path.name: mutant.options})
            self.digests[mutant.options] = digest_values(slimtensors.load(self.path, threads=1))
        return self.digests[mutant.options]

    def claim(self) -> int:
        return claim_archive(self.path)


def state() -> dict[str, Any]:
    x = sample_tensor(6, 8)
    return {
        "model": {"w": x, "tied": x, "b": torch.arange(3)},
        "step": 7,
        "values": [1.5, float("inf"), "text", None, True, (1, 2), b"bytes", 3 + 4j],
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
        "array": x.numpy()[:2],
        "range": range(3),
        "times": [datetime(2020, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")), timedelta(1), UTC],
        "options": Namespace(path=PurePosixPath("x"), data=BytesIO(b"xyz"), table=bytearray(b"x")),
        "config": OmegaConf.create({"a": ["${b}"], "b": 1}),
        "numbers": {Decimal("0.1"): Fraction(1, 3)},
    }


class Manifests(Kind):
    """Manifests and headers of archives in both dialects, with a state tree and tied tensors."""

    dialects = ("slim", "compressed-tensors")

    def make(self) -> None:
        self.path = self.folder / "x.safetensors"
        self.variants = []
        for dialect in self.dialects:
            slimtensors.save(state(), self.path, preset="sparse", dialect=dialect, threads=1)
            self.variants.append(self.path.read_bytes())
        self.digest = digest_values(slimtensors.load(self.path, threads=1))

    def mutate(self, random: Random) -> Mutant:
        raw = random.choice(self.variants)
        name = self.path.name
        if random.random() < 0.2:
            return Mutant({name: mutate_bytes(random, raw)}, is_sealed=False)
        if random.random() < 0.7:
            header, data = split(raw)
            manifest = mutate_json(random, json.loads(header["__metadata__"]["slimtensors"]))
            if isinstance(manifest, dict):
                with suppress(RecursionError, UnicodeError):
                    changed = edit_manifest(raw, lambda old: (old.clear(), old.update(manifest)))
                    return Mutant({name: changed}, is_sealed=True)
        header, data = split(raw)
        manifest = json.loads(header.pop("__metadata__")["slimtensors"])
        if random.random() < 0.5:
            data = bytearray(mutate_bytes(random, data))[: len(data)].ljust(len(data), b"\1")
        else:
            header = mutate_json(random, header)
        with suppress(Exception):  # entries that cannot have a checksum
            return Mutant({name: seal_file(header, bytes(data), manifest)}, is_sealed=True)
        return self.mutate(random)

    def use(self, mutant: Mutant, random: Random) -> str:
        return use_archive(self.path, random)

    def original_digest(self, mutant: Mutant) -> str:
        return self.digest

    def claim(self) -> int:
        return claim_archive(self.path)


class Trees(Manifests):
    """Trees of states."""

    dialects = ("slim",)

    def mutate(self, random: Random) -> Mutant:
        def change(manifest: dict[str, Any]) -> None:
            manifest["tree"] = mutate_json(random, manifest["tree"])

        with suppress(RecursionError, UnicodeError):
            raw = edit_manifest(self.variants[0], change)
            return Mutant({self.path.name: raw}, is_sealed=True)
        return self.mutate(random)


class Sparse(Kind):
    """Sparse tensors of compressed-tensors: own files with a manifest, and foreign ones."""

    def make(self) -> None:
        self.path = self.folder / "x.safetensors"
        pairs = sample_tensor(4, 16, keep=1.0)
        pairs.view(-1, 4)[:, 1::2] = 0
        for preset, x in (("bitmask", sample_tensor(5, 9)), ("bitmask24", pairs)):
            slimtensors.save(
                {"m.weight": x}, self.path, preset=preset, dialect="compressed-tensors", threads=1
            )
            self.originals[preset] = self.path.read_bytes()
        self.variants = list(self.originals.values())

    def mutate(self, random: Random) -> Mutant:
        header, data = split(random.choice(self.variants))
        manifest = json.loads(header.pop("__metadata__")["slimtensors"])
        data = bytearray(data)
        if random.random() < 0.6:
            entry = header["m.weight.shape"]["data_offsets"]
            at = random.randrange(entry[0], entry[1], 8)
            number = random.choice((0, 1, 2**20, 2**40, 2**62, -1, random.randrange(64)))
            data[at : at + 8] = number.to_bytes(8, "little", signed=True)
        if random.random() < 0.5:
            data = bytearray(mutate_bytes(random, bytes(data))[: len(data)].ljust(len(data)))
        if random.random() < 0.4:
            entry = random.choice(list(header.values()))
            entry["shape"] = random.choice((entry["shape"][::-1], [*entry["shape"], 1], [1], []))
        if random.random() < 0.3:
            entry = random.choice(list(header.values()))
            entry["dtype"] = random.choice(("F32", "I32", "I64", "U8", "BOOL", "F16", "F8_E4M3"))
        if random.random() < 0.5:
            raw = plain_header(header, bytes(data))
        else:
            raw = seal_file(header, bytes(data), manifest)
        return Mutant({self.path.name: raw}, is_sealed=True)

    def use(self, mutant: Mutant, random: Random) -> str:
        return use_archive(self.path, random)

    def claim(self) -> int:
        return claim_archive(self.path)


def plain_header(header: dict[str, Any], data: bytes) -> bytes:
    text = dump_json(header)
    return len(text).to_bytes(8, "little") + text + data


class Deltas(Kind):
    """Deltas between two archives."""

    def make(self) -> None:
        self.base, self.path = self.folder / "base.safetensors", self.folder / "d.safetensors"
        x, y = sample_tensor(16, 16, keep=1.0), sample_tensor(4, 8, dtype=torch.bfloat16)
        old = {"w": x, "same": y, "i": torch.arange(40), "gone": y}
        new = {"w": x * 1.001, "same": y, "i": torch.arange(40) + 1, "new": y + 1, "tied": y}
        new["tied"] = new["new"]
        slimtensors.save(old, self.base, threads=1)
        slimtensors.save(new, self.folder / "n.safetensors", threads=1)
        slimtensors.diff(self.folder / "n.safetensors", self.base, self.path, threads=1)
        self.raw = self.path.read_bytes()
        self.digest = self.restore_delta()

    def restore_delta(self) -> str:
        with open_restored(self.path, self.base) as model:
            source = as_source(model)
            loaded = {}
            for item in source.items:
                x = item.read(serially)
                assert isinstance(x, Tensor), item.name
                assert (x.dtype, tuple(x.shape)) == (item.spec.dtype, item.spec.shape), item.name
                loaded[item.name] = x
            return digest_values([loaded, dict(source.tied), source.tree])

    def mutate(self, random: Random) -> Mutant:
        name = self.path.name
        if random.random() < 0.2:
            return Mutant({name: mutate_bytes(random, self.raw)}, is_sealed=False)
        with suppress(Exception):  # nested too deeply, or not text
            if random.random() < 0.7:

                def change(manifest: dict[str, Any]) -> None:
                    manifest["delta"] = mutate_json(random, manifest["delta"])

                return Mutant({name: edit_manifest(self.raw, change)}, is_sealed=True)
            return Mutant({name: mutate_blob(random, self.raw)}, is_sealed=True)
        return self.mutate(random)

    def use(self, mutant: Mutant, random: Random) -> str:
        return self.restore_delta()

    def original_digest(self, mutant: Mutant) -> str:
        return self.digest

    def claim(self) -> int:
        return claim_archive(self.path)


def mutate_blob(random: Random, raw: bytes) -> bytes:
    """Return a file in which the header or the payload of one blob has changed, sealed again."""
    header, data = split(raw)
    manifest = json.loads(header.pop("__metadata__")["slimtensors"])
    names = [n for n, crc in zip(header, manifest["checksums"], strict=True) if crc is None]
    name = random.choice(names)
    begin, end = header[name]["data_offsets"]
    inner, payload = split_blob(data[begin:end])
    if random.random() < 0.5:
        payload = mutate_bytes(random, payload)
    else:
        inner = mutate_json(random, inner)
    if isinstance(inner, dict):
        inner["crc32c"] = _core.crc32c(payload)
    changed = blob(dump_json(inner), payload)
    shift = len(changed) - (end - begin)
    for entry in header.values():
        low, high = entry["data_offsets"]
        if low == begin and high == end:
            entry["data_offsets"], entry["shape"] = [begin, end + shift], [len(changed)]
        elif low >= end:
            entry["data_offsets"] = [low + shift, high + shift]
    return seal_file(header, data[:begin] + changed + data[end:], manifest)


class Checkpoints(Kind):
    """`checkpoint.json` and the state of a full checkpoint and of a delta."""

    targets = ("1/checkpoint.json", "2/checkpoint.json")

    def make(self) -> None:
        first = {**state(), "optimizer": {"state": {0: {"exp_avg": sample_tensor(6, 8)}}}}
        second = {**state(), "step": 8, "metrics": {"loss": 0.5}}
        second["model"] = {"w": sample_tensor(6, 8) * 1.01, "b": torch.arange(3)}
        second["optimizer"] = {"state": {0: {"exp_avg": sample_tensor(6, 8) * 0.9}}}
        save_checkpoint(first, self.folder / "1", threads=1)
        save_checkpoint(second, self.folder / "2", base=self.folder / "1", threads=1)
        self.digest = digest_values(load_checkpoint(self.folder / "2", threads=1))

    def mutate(self, random: Random) -> Mutant:
        name = random.choice(self.targets)
        raw = self.originals[name]
        if random.random() < 0.2:
            return Mutant({name: mutate_bytes(random, raw)}, is_sealed=False)
        data = mutate_json(random, json.loads(raw))
        return Mutant({name: seal_checkpoint(data)}, is_sealed=True)

    def use(self, mutant: Mutant, random: Random) -> str:
        match random.randrange(4):
            case 0:
                for point in runs.list_checkpoints(self.folder):
                    str(point.manifest)
                runs.find_unreadable(self.folder)
            case 1:
                result = runs.verify_run(self.folder, threads=1)
                if not result:
                    raise FormatError(str([str(self.folder), result.damaged]))
            case _:
                return digest_values(load_checkpoint(self.folder / "2", threads=1))
        return ""

    def original_digest(self, mutant: Mutant) -> str:
        return self.digest

    def claim(self) -> int:
        return sum(claim_archive(self.folder / name / "state.safetensors") for name in "12")


def seal_checkpoint(data: object) -> bytes:
    """Return the text of a `checkpoint.json` with its checksum."""
    if not isinstance(data, dict):
        return dump_json(data)
    data.pop("crc32c", None)
    try:
        body = json.dumps(data, indent=2, ensure_ascii=False).removesuffix("\n}")
        seal = _core.crc32c(body.encode())
    except (RecursionError, UnicodeError):
        return dump_json(data)
    return f'{body},\n  "crc32c": {seal}\n}}\n'.encode()


class CheckpointStates(Checkpoints):
    """Tensor entries of checkpoints: the manifest of `state.safetensors`."""

    def mutate(self, random: Random) -> Mutant:
        folder = random.choice(("1", "2", "2", "2"))
        name = f"{folder}/state.safetensors"
        raw = self.originals[name]
        if random.random() < 0.1:
            return Mutant({name: mutate_bytes(random, raw)}, is_sealed=False)
        with suppress(Exception):  # nested too deeply, or not text
            if random.random() < 0.6:
                key = "delta" if folder == "2" and random.random() < 0.7 else "tree"

                def change(manifest: dict[str, Any]) -> None:
                    manifest[key] = mutate_json(random, manifest[key])

                changed = edit_manifest(raw, change)
            else:
                changed = mutate_blob(random, raw)
            self.write({name: changed})
            manifest = json.loads(self.originals[f"{folder}/checkpoint.json"])
            manifest["id"] = content_id(self.folder / name)
            manifest["bytes"] = len(changed)
            sealed = {f"{folder}/checkpoint.json": seal_checkpoint(manifest), name: changed}
            if folder == "1":
                later = json.loads(self.originals["2/checkpoint.json"])
                later["base"]["id"] = manifest["id"]
                sealed["2/checkpoint.json"] = seal_checkpoint(later)
            return Mutant(sealed, is_sealed=True)
        self.write({name: raw})
        return self.mutate(random)


class Distributed(Kind):
    """`distributed.json` and files of a distributed checkpoint."""

    def make(self) -> None:
        saved = {"model": {"w": sample_tensor(6, 8), "b": torch.arange(3)}, "step": 7, "o": (1, 2)}
        target = self.folder / "d"
        dcp.save(saved, storage_writer=StorageWriter(target))
        self.digest = self.read()

    def read(self) -> str:
        stored = folders.StoredShards(self.folder / "d")
        stored.check_files()
        loaded = {}
        for name, tensor in stored.manifest.tensors.items():
            box = folders.Box((0,) * len(tensor.spec.shape), tensor.spec.shape)
            loaded[name] = x = stored.load_region(name, box)
            assert (x.dtype, tuple(x.shape)) == (tensor.spec.dtype, tensor.spec.shape), name
        objects = {name: stored.load_object(name) for name in stored.manifest.objects}
        return digest_values([loaded, objects])

    def mutate(self, random: Random) -> Mutant:
        name = random.choice([n for n in self.originals if n.endswith(("json", "safetensors"))])
        raw = self.originals[name]
        if random.random() < 0.2:
            return Mutant({name: mutate_bytes(random, raw)}, is_sealed=False)
        with suppress(Exception):  # nested too deeply, or not text
            if name.endswith("json"):
                data = mutate_json(random, json.loads(raw))
                return Mutant({name: seal_distributed(data)}, is_sealed=True)

            def change(manifest: dict[str, Any]) -> None:
                manifest.update(mutate_json(random, manifest))

            return Mutant({name: edit_manifest(raw, change)}, is_sealed=True)
        return self.mutate(random)

    def use(self, mutant: Mutant, random: Random) -> str:
        match random.randrange(4):
            case 0:
                json.dumps(folders.inspect(self.folder / "d").to_json())
            case 1:
                result = folders.verify(self.folder / "d", threads=1)
                if not result:
                    raise FormatError(str([str(self.folder), result.damaged]))
            case _:
                return self.read()
        return ""

    def original_digest(self, mutant: Mutant) -> str:
        return self.digest


def seal_distributed(data: Any) -> bytes:
    """Return the text of a `distributed.json` with its checksum."""
    if not isinstance(data, dict):
        return dump_json(data)
    data.pop("crc32c", None)
    body = json.dumps(data, ensure_ascii=False)[:-1]
    return f'{body},\n"crc32c": {_core.crc32c(body.encode())}\n}}\n'.encode()


class Configs(Kind):
    """`config.json` of model folders."""

    @property
    def name_in_errors(self) -> str:
        return "config.json"

    def make(self) -> None:
        args = QuantizationConfig.preset("W4A16", ignore=["lm_head"]).to_dict()
        slim = {
            "quant_method": "slimtensors",
            "version": 1,
            "preset": "lossless",
            "dtype": "float32",
        }
        sparse = {"format": "sparse-bitmask", "sparsity_structure": "2:4", "global_sparsity": 0.5}
        static = QuantizationConfig.preset("W8A8").to_dict()
        head = {"model_type": "llama", "torch_dtype": "bfloat16"}
        self.variants = [
            dump_json(config)
            for config in (
                {**head, "quantization_config": args},
                {**head, "quantization_config": {**slim, "before": {"quantization_config": args}}},
                {**head, "compression_config": static, "sparsity_config": sparse},
                {**head, "quantization_config": {**slim, "codecs": {"huffman": 3}}},
            )
        ]
        text = json.dumps(head, indent=7).encode()  # not our own form, so that it is kept
        compressed = config_json.edit_config_text(
            text, lambda config: config_json.add_section(config, slim)
        )
        self.variants.append(compressed)
        self.path = self.folder / "config.json"
        self.path.write_bytes(self.variants[0])

    def mutate(self, random: Random) -> Mutant:
        raw = random.choice(self.variants)
        if random.random() < 0.2:
            return Mutant({"config.json": mutate_bytes(random, raw)}, is_sealed=True)
        return Mutant({"config.json": dump_json(mutate_json(random, json.loads(raw)))}, True)

    def use(self, mutant: Mutant, random: Random) -> str:
        match random.randrange(4):
            case 0:
                text = self.path.read_bytes()
                config_json.edit_config_text(text, config_json.remove_compression)
            case 2:
                QuantizationConfig.parse_file(self.path).to_dict()
            case 1:
                config_json.update_config(self.folder, config_json.remove_compression)
            case _:
                config = config_json.read_config(self.folder)
                config_json.read_dtype(config)
                config_json.is_sparse_only(config)
                config_json.parse_sparsity(config_json.read_sparsity_section(config)).to_dict()
                found = config_json.parse_quantization(config)
                if found is not None:
                    assert QuantizationConfig.from_dict(found.to_dict()) == found
        return ""


class Indexes(Kind):
    """`model.safetensors.index.json` of a sharded model."""

    def make(self) -> None:
        tensors = {f"{i}": sample_tensor(8, 8) + i for i in range(4)}
        slimtensors.save(tensors, self.folder, max_shard_size="600B", threads=1)
        self.name = "model.safetensors.index.json"
        loaded = slimtensors.load(self.folder, threads=1)
        self.digests = {name: digest_values(x) for name, x in loaded.items()}

    def mutate(self, random: Random) -> Mutant:
        raw = self.originals[self.name]
        if random.random() < 0.3:
            return Mutant({self.name: mutate_bytes(random, raw)}, is_sealed=True)
        return Mutant({self.name: dump_json(mutate_json(random, json.loads(raw)))}, True)

    def use(self, mutant: Mutant, random: Random) -> str:
        if random.random() < 0.3:
            json.dumps(slimtensors.inspect(self.folder).to_json())
            return ""
        loaded = slimtensors.load(self.folder, threads=1)
        for name, x in loaded.items():  # an index may lack shards, but contains no tensors
            assert digest_values(x) == self.digests[name]
        return ""


YAML_LINES = (
    b"x: &a [*a]",
    b"? {a: b}\n: c",
    b"? [1]\n: 2",
    b"x: !!python/name:os.system",
    b"*a",
    b"- 1",
    b"1: 2",
    b"x: " + b"9" * 5000,
    b"[" * 2000,
    b"x: 2001-01-01",
    b"x: 2001-99-99",
    b"x: !!float .inf",
    b"x: !!binary aGk=",
    b"x: !!int abc",
    b"<<: {a_modifiers: {}}",
    b"a: &a ["
    + b"1," * 9
    + b"1]\n"
    + b"\n".join(
        b"%c: &%c [%s]" % (c + 1, c + 1, b",".join([b"*%c" % c] * 9)) for c in b"abcdefgh"
    ),
)
"""Lines that are valid YAML, but not in a recipe."""


class Recipes(Kind):
    """Recipes: JSON is YAML, and text with aliases, tags and long numbers."""

    def make(self) -> None:
        recipe = Recipe.from_yaml(
            "a_stage:\n  run_type: oneshot\n  a_modifiers:\n"
            "    SparseGPT: {sparsity: 0.5, mask_structure: '2:4', targets: ['re:.*q_proj']}\n"
            "    GPTQ: {scheme: W4A16, ignore: [lm_head]}\n"
            "    SmoothQuant: {smoothing_strength: 0.5}\n"
            "b_stage:\n  b_modifiers:\n    GradualMagnitudePruning: {start: 0, end: 3}\n"
        )
        self.data = json.dumps(recipe.to_dict())
        self.path = self.folder / "recipe.yaml"
        self.path.write_text(recipe.to_yaml())
        self.text = self.path.read_bytes()

    def mutate(self, random: Random) -> Mutant:
        match random.randrange(4):
            case 0:
                raw = mutate_bytes(random, self.text)
            case 1:
                lines = self.text.split(b"\n")
                lines.insert(random.randrange(len(lines)), random.choice(YAML_LINES))
                raw = b"\n".join(lines)
            case _:
                raw = dump_json(mutate_json(random, json.loads(self.data)))
        return Mutant({self.path.name: raw}, is_sealed=True)

    def use(self, mutant: Mutant, random: Random) -> str:
        recipe = Recipe.load(self.path)
        assert Recipe.from_yaml(recipe.to_yaml()) == recipe
        return ""


class Weights(Kind):
    """Compressed tensors in files of `torch.save`: the arguments of `rebuild`."""

    is_named: ClassVar[bool] = False

    def make(self) -> None:
        x = sample_tensor(16, 32, dtype=torch.bfloat16)
        kinds: tuple[Callable[[Tensor], CompressedTensor], ...] = (
            CsrTensor.from_dense,
            SparseTensor.from_dense,
            int8_weight_only(),
            int4_weight_only(16),
            int8_dynamic_activation_int8_weight(),
            sparse_int8_weight(),
            coded_weight(),
            coded_weight("sparse"),
        )
        made = [kind(x) for kind in kinds]
        self.variants = [(json.dumps(w.form()), dict(w.leaves())) for w in made]

    def mutate(self, random: Random) -> Mutant:
        form, leaves = random.choice(self.variants)
        leaves = {**leaves}
        if random.random() < 0.6:
            form = dump_json(mutate_json(random, json.loads(form))).decode()
        if random.random() < 0.6:
            name = random.choice(list(leaves))
            leaves[name] = mutate_leaf(random, leaves[name])
        return Mutant({}, is_sealed=True, options=(form, leaves))

    def use(self, mutant: Mutant, random: Random) -> str:
        x = rebuild(*mutant.options)
        if x.numel() > 1 << 24:
            return ""
        dense = x.dequantize()
        assert (dense.dtype, dense.shape) == (x.dtype, x.shape)
        if x.dim() == 2 and x.is_floating_point():
            functional.linear(torch.ones(2, x.shape[1], dtype=x.dtype), x)
            functional.embedding(torch.zeros(1, dtype=torch.long), x) if len(x) else None
        return ""


def mutate_leaf(random: Random, x: Tensor) -> Any:
    """Return a tensor of another layout, dtype, shape or content."""
    if not x.numel():
        return torch.zeros(3, dtype=x.dtype)
    match random.randrange(9):
        case 0:
            return torch.zeros(1, dtype=x.dtype).as_strided(x.shape, [0] * x.dim())
        case 1:
            return x[:-1] if x.dim() else x
        case 2:
            return x.t() if x.dim() == 2 else x[-1:]
        case 3:
            raw = mutate_bytes(random, raw_bytes(x))[: x.nbytes].ljust(x.nbytes, b"\xff")
            return torch.frombuffer(bytearray(raw), dtype=x.dtype).view(x.shape)
        case 4:
            return (
                x.clone(memory_format=torch.contiguous_format).view(torch.uint8) if x.dim() else x
            )
        case 5:
            return torch.zeros(x.shape, dtype=random.choice((torch.int64, torch.bool, torch.half)))
        case 6:
            return x.repeat_interleave(2, 0)[::2] if x.dim() else x[None]
        case 7:
            return random.choice((None, 1, "x", [1], x[None], x.reshape(-1)))
    return torch.zeros_like(x) if x.dtype.itemsize == 1 else torch.full_like(x, 127)


class Modules(Kind):
    """Quantized weights of compressed-tensors: the tensors of one module."""

    is_named: ClassVar[bool] = False

    def make(self) -> None:
        x = sample_tensor(16, 32, keep=1.0, dtype=torch.bfloat16)
        self.variants = []
        for name, args in (
            ("pack-quantized", QuantizationArgs(4, group_size=16)),
            ("pack-quantized", QuantizationArgs(4, group_size=16, symmetric=False)),
            ("int-quantized", QuantizationArgs(8, group_size=-1)),
            ("float-quantized", QuantizationArgs(8, "float")),
            (
                "mxfp4-pack-quantized",
                QuantizationArgs(
                    4, "float", strategy="group", group_size=32, scale_dtype=torch.uint8
                ),
            ),
            (
                "nvfp4-pack-quantized",
                QuantizationArgs(
                    4,
                    "float",
                    strategy="tensor_group",
                    group_size=16,
                    scale_dtype=torch.float8_e4m3fn,
                ),
            ),
        ):
            parts = formats.find(name).compress(x, find_params(x, args), args)
            self.variants.append((name, args, parts))

    def mutate(self, random: Random) -> Mutant:
        name, args, parts = random.choice(self.variants)
        parts = {**parts}
        for _ in range(random.choice((1, 1, 2))):
            key = random.choice(list(parts))
            leaf = mutate_leaf(random, parts[key])
            if isinstance(leaf, Tensor):
                parts[key] = leaf.contiguous()
            else:
                del parts[key]
                break
        if "weight_shape" in parts and random.random() < 0.4:
            sizes = [random.choice((0, 1, 16, 32, 33, -1, 2**20, 2**40)) for _ in range(2)]
            parts["weight_shape"] = torch.tensor(sizes)
        return Mutant({}, is_sealed=True, options=(name, args, parts))

    def use(self, mutant: Mutant, random: Random) -> str:
        name, args, parts = mutant.options
        x = from_module(parts, name, args)
        assert x.dequantize().shape == x.shape
        functional.linear(torch.ones(2, x.shape[-1], dtype=x.dtype), x)
        return ""


class Sources(Kind):
    """Headers of the files that were compressed: the key `source` of manifests."""

    def make(self) -> None:
        self.path = self.folder / "x.safetensors"
        save_file({"a": sample_tensor(16, 16), "b": torch.zeros(9)}, self.folder / "plain")
        with slimtensors.open(self.folder / "plain") as archive:
            slimtensors.save(archive, self.path, threads=1)
        self.raw = self.path.read_bytes()
        self.digest = self.read()

    def read(self) -> str:
        with slimtensors.open(self.path) as archive:
            found = find_originals(archive)
            return digest_values([found and [dict(found.headers), found.index]])

    def mutate(self, random: Random) -> Mutant:
        def change(manifest: dict[str, Any]) -> None:
            if random.random() < 0.5:
                manifest["source"] = mutate_json(random, manifest["source"])
            else:
                files = manifest["source"]["files"]
                name = next(iter(files))
                header = unpack_text(files[name], 1 << 20)
                files[name] = pack_text(mutate_bytes(random, header))

        with suppress(RecursionError, UnicodeError):
            return Mutant({self.path.name: edit_manifest(self.raw, change)}, is_sealed=True)
        return self.mutate(random)

    def use(self, mutant: Mutant, random: Random) -> str:
        if random.random() < 0.5:
            return use_archive(self.path, random)
        return self.read()

    def claim(self) -> int:
        return claim_archive(self.path)


class Reports(Kind):
    """Data of HTML reports."""

    def make(self) -> None:
        slimtensors.save({"w": sample_tensor(16, 16)}, self.folder / "x", preset="extreme")
        self.path = self.folder / "report.json"
        write_report(collect(self.folder / "x", threads=1), self.path)

    def mutate(self, random: Random) -> Mutant:
        raw = self.originals[self.path.name]
        if random.random() < 0.2:
            return Mutant({self.path.name: mutate_bytes(random, raw)}, is_sealed=True)
        data = mutate_json(random, json.loads(raw))
        return Mutant({self.path.name: dump_json(data)}, is_sealed=True)

    def use(self, mutant: Mutant, random: Random) -> str:
        report = read_report(self.path)
        assert Report.from_json(report.to_json()).to_json() == report.to_json()
        if random.random() < 0.05:
            render_page(report)
        return ""


class WorkFolders(Kind):
    """Finished layers of a quantization that is resumed."""

    def make(self) -> None:
        folder = WorkFolder(self.folder, {"model": "1", "config": "2"})
        folder.store("a", {"w": sample_tensor(4, 4), "b": torch.arange(3)}, {"error": 0.5})
        folder.store("b", {"w": sample_tensor(2, 4)})

    def mutate(self, random: Random) -> Mutant:
        name = random.choice(list(self.originals))
        raw = self.originals[name]
        if not name.endswith(".json"):
            return Mutant({name: mutate_bytes(random, raw)}, is_sealed=True)
        return Mutant({name: dump_json(mutate_json(random, json.loads(raw)))}, is_sealed=True)

    def use(self, mutant: Mutant, random: Random) -> str:
        folder = WorkFolder(self.folder, {"model": "1", "config": "2"})
        for name in ("a", "b"):
            if folder.has(name):
                folder.load(name)
                json.dumps(folder.load_report(name))
        return ""


KINDS: dict[str, type[Kind]] = {
    "blobs": Blobs,
    "manifests": Manifests,
    "trees": Trees,
    "sparse": Sparse,
    "deltas": Deltas,
    "checkpoints": Checkpoints,
    "checkpoint states": CheckpointStates,
    "distributed": Distributed,
    "configs": Configs,
    "indexes": Indexes,
    "recipes": Recipes,
    "weights": Weights,
    "modules": Modules,
    "sources": Sources,
    "reports": Reports,
    "work folders": WorkFolders,
}
