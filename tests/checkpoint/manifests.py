"""Edit `checkpoint.json` for tests: with a valid checksum, or as format version 1."""

import json

from slimtensors import _core
from slimtensors.checkpoint.manifest import content_id


def edit_manifest(folder, edit):
    """Change the parsed JSON of a manifest in place, and seal it again."""
    path = folder / "checkpoint.json"
    data = json.loads(path.read_text())
    del data["crc32c"]
    path.write_text(seal_manifest(edit(data) or data))


def forge_id(folder):
    """Make a manifest match a changed `state.safetensors`."""
    file = folder / "state.safetensors"
    changes = {"id": content_id(file), "bytes": file.stat().st_size}
    edit_manifest(folder, lambda data: data.update(changes))


def seal_manifest(data):
    """Return the text of a manifest with a valid checksum."""
    body = json.dumps(data, indent=2).removesuffix("\n}")
    return f'{body},\n  "crc32c": {_core.crc32c(body.encode())}\n}}\n'


def unseal_manifest(folder, **changes):
    """Rewrite a manifest in format version 1."""
    path = folder / "checkpoint.json"
    data = json.loads(path.read_text())
    del data["crc32c"]
    path.write_text(json.dumps({**data, "version": 1, **changes}, indent=2) + "\n")
