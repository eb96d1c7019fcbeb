"""Look at distributed checkpoints: how each tensor is stored, and whether all of it is whole."""

from slimtensors.archive import Verification
from slimtensors.archive.workers import Workers
from slimtensors.container import StrPath, local
from slimtensors.distributed.boxes import Box
from slimtensors.distributed.share import PREFIX, piece_place
from slimtensors.distributed.stored import StoredShards
from slimtensors.errors import FormatError, MismatchError
from slimtensors.spec import Spec, dtype_name
from slimtensors.summary import Stored, Summary


def inspect(path: StrPath) -> Summary:
    """Return how every tensor is stored, all of its pieces together."""
    shards = StoredShards(local(path))
    shards.check_files()
    held: dict[str, list[Stored]] = {name: [] for name in shards.manifest.tensors}
    for piece in shards.summaries():
        if piece.name.startswith(PREFIX):
            held.setdefault(piece_place(piece.name)[0], []).append(piece)
    errors = shards.manifest.errors
    tensors = [
        _joined(name, tensor.spec, held[name], errors.get(name))
        for name, tensor in shards.manifest.tensors.items()
    ]
    return Summary(tensors, [str(shards.folder / name) for name in shards.manifest.files])


def verify(path: StrPath, *, threads: int | None = None) -> Verification:
    """Read everything, of bases too where that is needed, checking all checksums.

    Raise if a file is missing, or the base is not the one that it was.
    """
    shards = StoredShards(local(path))
    shards.check_files()
    tensors = shards.manifest.tensors
    jobs = [
        (name, piece, chunk.file)
        for name, tensor in tensors.items()
        for chunk in tensor.chunks
        for piece in shards.pieces(name, chunk.box, chunk.box)
    ]
    damaged: dict[str, str] = {}

    def size(job: tuple[str, Box, int]) -> int:
        return job[1].numel * tensors[job[0]].spec.dtype.itemsize

    with Workers(threads) as workers:

        def one(job: tuple[str, Box, int]) -> str:
            try:
                shards.piece(*job, workers.each)
            except (FormatError, MismatchError) as error:
                return str(error)
            return ""

        for (name, *_), told in zip(jobs, workers.in_order(one, jobs, size), strict=True):
            if told:
                damaged.setdefault(name, told)
    for name in shards.manifest.objects:
        try:
            shards.value(name)
        except (FormatError, MismatchError) as error:
            damaged[name] = str(error)
    return Verification(len(tensors), damaged)


def _joined(name: str, spec: Spec, pieces: list[Stored], error: float | None) -> Stored:
    """Return what the pieces of a tensor cost together."""
    parts: dict[str, int] = {}
    for piece in pieces:
        for part, nbytes in piece.parts.items():
            parts[part] = parts.get(part, 0) + nbytes
    codecs = dict.fromkeys(piece.codec for piece in pieces if piece.codec != "tied")
    return Stored(
        name,
        dtype_name(spec.dtype),
        spec.shape,
        " + ".join(codecs) or ("tied" if pieces else "plain"),
        spec.nbytes,
        sum(piece.stored_bytes for piece in pieces),
        ", ".join(dict.fromkeys(piece.file for piece in pieces)),
        pieces[0].note if pieces else "",
        error,
        parts,
    )
