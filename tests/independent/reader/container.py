"""Files: safetensors, manifest and checksums, blobs, dialects (docs/format.md)."""

import base64
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from independent.reader import codecs
from independent.reader.crc32c import crc32c
from independent.reader.states import build_state
from independent.reader.tensor import SAFETENSORS, Tensor, check


@dataclass
class Archive:
    """The content of a file or of several shards."""

    stored: dict[str, Tensor] = field(default_factory=dict)
    """Tensors as the files contain them."""
    manifests: list[dict] = field(default_factory=list)

    @property
    def manifest(self):
        """The manifest of the first file; empty if there is none."""
        return self.manifests[0] if self.manifests else {}

    def tensors(self):
        """Return the decoded tensors by name, tied ones and copies included."""
        plans = {name: x for m in self.manifests for name, x in m.get("plans", {}).items()}
        found = decode_all(self.stored, self.manifest and {**self.manifest, "plans": plans})
        for manifest in self.manifests:
            for key in ("tied", "copies"):
                for name, home in manifest.get(key, {}).items():
                    found[name] = found[home]
        return found

    def state(self, tensors=None):
        """Return the state: the tree, or all tensors."""
        tensors = self.tensors() if tensors is None else tensors
        if "tree" not in self.manifest:
            return tensors
        return build_state(self.manifest["tree"], tensors)


def open_archive(path):
    """Read a file, or a folder of shards with an index."""
    path, archive = Path(path), Archive()
    files = [path]
    if path.is_dir():
        index = json.loads((path / "model.safetensors.index.json").read_bytes())
        files = [path / name for name in sorted(set(index["weight_map"].values()))]
    for file in files:
        stored, manifest = read_file(file.read_bytes())
        archive.stored |= stored
        archive.manifests += [manifest] if manifest else []
    if path.is_dir():
        check(archive.stored.keys() == index["weight_map"].keys(), "index and files differ")
    generations = {manifest.get("generation") for manifest in archive.manifests}
    check(len(generations) <= 1, "shards of different generations")
    return archive


def read_file(raw):
    """Return the stored tensors of a safetensors file, and its manifest or None."""
    size = int.from_bytes(raw[:8], "little")
    text, data = raw[8 : 8 + size], raw[8 + size :]
    header = json.loads(text)
    metadata = header.pop("__metadata__", {})
    stored, end = {}, 0
    for name, entry in header.items():
        begin, stop = entry["data_offsets"]
        dtype, shape = SAFETENSORS[entry["dtype"]], tuple(entry["shape"])
        if entry["dtype"] == "F4":  # two numbers per byte
            shape = (*shape[:-1], shape[-1] // 2)
        stored[name] = Tensor(dtype, shape, data[begin:stop])
        end = max(end, stop)
    check(end == len(data), "bytes after the last tensor")
    if "slimtensors" not in metadata:
        return stored, None
    manifest = read_manifest(metadata["slimtensors"])
    check_file(text, stored, manifest)
    return stored, manifest


def read_manifest(text):
    """Parse a manifest and check its own checksum."""
    manifest = json.loads(text)
    check(manifest["version"] in (1, 2, 3, 4), "unknown version")
    before, _, _ = text.rpartition(',"crc32c":')
    check(crc32c(before.encode()) == manifest["crc32c"], "manifest checksum")
    return manifest


def check_file(text, stored, manifest):
    """Check the list of tensors and their bytes."""
    table = text.rstrip(b" ")
    size, checksum = manifest["table"]
    check(crc32c(table[len(table) - size :]) == checksum, "checksum of the list of tensors")
    check(len(manifest["checksums"]) == len(stored), "wrong number of checksums")
    for (name, tensor), checksum in zip(stored.items(), manifest["checksums"], strict=True):
        if checksum is None:
            check(is_blob(tensor), f"{name} is not a blob")
        else:
            check(crc32c(tensor.data) == checksum, f"checksum of {name}")


def decode_all(stored, manifest):
    """Return the tensors that the stored ones stand for."""
    found = {}
    if manifest.get("dialect") == "compressed-tensors":
        names = {name: name for name in manifest.get("plans", {})}
    else:
        names = find_sparse(stored) if not manifest else {}
    parts = {f"{prefix}.{part}" for prefix in names for part in SPARSE_PARTS}
    for name, tensor in stored.items():
        prefix = name.rpartition(".")[0]
        if name in parts and prefix in names:
            found[names[prefix]] = decode_sparse(stored, prefix)
        elif is_blob(tensor) and manifest.get("dialect") != "compressed-tensors":
            found[name] = decode_blob(tensor.data)
        else:
            found[name] = tensor
    return found


SPARSE_PARTS = ("shape", "row_offsets", "compressed", "bitmask")


def find_sparse(stored):
    """Return the tensors stored in parts by a file without a manifest: prefix to name."""
    prefixes = [
        name.removesuffix(".bitmask")
        for name in stored
        if name.endswith(".bitmask")
        and all(f"{name[:-8]}.{part}" in stored for part in ("shape", "compressed"))
    ]
    is_old = any(prefix.endswith((".weight", ".bias")) for prefix in prefixes)
    return {prefix: prefix if is_old else f"{prefix}.weight" for prefix in prefixes}


def decode_sparse(stored, name):
    """Return a tensor of the dialect `compressed-tensors`: every row of the mask fills bytes."""
    shape = tuple(stored[f"{name}.shape"].numbers().tolist())
    values, mask = stored[f"{name}.compressed"], stored[f"{name}.bitmask"]
    rows = np.unpackbits(mask.words().reshape(-1, mask.shape[-1]), axis=1, bitorder="little")
    bits = rows[:, : shape[-1]].reshape(-1).astype(bool)
    return codecs.scatter(bits, values, values.dtype, shape)


def is_blob(tensor):
    """Return True for a one-dimensional `U8` tensor that begins like a blob."""
    if tensor.dtype != "uint8" or len(tensor.shape) != 1 or tensor.data[:4] != b"SLIM":
        return False
    size = int.from_bytes(tensor.data[8:12], "little")
    checksum = int.from_bytes(tensor.data[12:16], "little")
    header = tensor.data[16 : 16 + size]
    return len(header) == size and crc32c(tensor.data[:12], header) == checksum


def decode_blob(raw):
    """Return the tensor of a blob."""
    version, size = (int.from_bytes(raw[i : i + 4], "little") for i in (4, 8))
    check(version == 1 and size % 16 == 0, "unknown version")
    root, payload = json.loads(raw[16 : 16 + size]), raw[16 + size :]
    check(crc32c(payload) == root["crc32c"], "checksum of the payload")
    return decode_node(root, payload)


def decode_node(node, payload):
    """Return the tensor of a node or leaf of the JSON header."""
    dtype, shape = node["dtype"], tuple(node["shape"])
    if "at" in node:
        begin, end = node["at"]
        return Tensor(dtype, shape, payload[begin:end])
    parts = {name: decode_node(part, payload) for name, part in node["parts"].items()}
    return codecs.decode(node["codec"], parts, dtype, shape)


def restore_originals(archive, tensors):
    """Return the files from which a model was compressed, byte for byte: name to bytes."""
    found = {}
    for manifest in archive.manifests:
        source = manifest.get("source", {})
        for name, text in source.get("files", {}).items():
            head = unpack_text(text)
            header = json.loads(head[8:])
            header.pop("__metadata__", None)
            spans = {name: entry["data_offsets"] for name, entry in header.items()}
            data = bytearray(max((end for _, end in spans.values()), default=0))
            for tensor, (begin, end) in spans.items():
                data[begin:end] = tensors[tensor].data
            found[name] = head + bytes(data)
        found |= {name: unpack_text(text) for name, text in source.get("index", {}).items()}
    return found


def restore_config(text):
    """Return the previous text of a `config.json`, where it was not formatted like ours."""
    return unpack_text(json.loads(text)["quantization_config"]["original"])


def unpack_text(text):
    """Return the bytes of base64 of a zlib stream."""
    return zlib.decompress(base64.b64decode(text, validate=True))
