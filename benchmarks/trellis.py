"""The codec `trellis` on one thread, at about 3 bits per weight.

Claims, by CPU time: a matrix of bf16 is decoded at 0.5 GB/s or more into mapped memory; rounding
with error feedback and coding take 5 M weights/s or more. Headers, steps, classes and states of the
coder take at most 1 % of the matrices of one block of SmolLM2-135M, and of its embedding.
"""

import torch
from measure import Report, interleaved, options
from torch import Tensor

from slimtensors.codecs import Trellis
from slimtensors.codecs.plan import Encoded
from slimtensors.codecs.trellis import Rounded, Steps, round_matrix
from slimtensors.layerwise.fit import count_stored_bytes
from slimtensors.layerwise.statistics import InputFactor, factor_inputs
from slimtensors.parallel import serially
from slimtensors.tensor import Spec, allocate

BLOCK = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
EMBEDDING = (49152, 576)
STEP = 0.3
"""Step in units of the RMS of normal weights."""


def main() -> None:
    args = options(__doc__).parse_args()
    torch.set_num_threads(1)
    report = Report("trellis", quick=args.quick)
    compare_speed(report, 256 if args.quick else 2048, 2 if args.quick else 5)
    embedding = (EMBEDDING[0] // 64, EMBEDDING[1]) if args.quick else EMBEDDING
    for title, shapes in (("block", BLOCK), ("embedding", [embedding])):
        share = count_overhead(shapes)
        report.rows.append({"group": "overhead", "case": title, "share": share})
        report.at_most(f"overhead of the {title}", 100 * share, 1, "%")
    report.finish()


def compare_speed(report: Report, side: int, repeats: int) -> None:
    weights, steps = make_weights((side, side)), make_steps(side, side)
    rounded = round_matrix(weights, steps)
    like, codec = Spec(torch.bfloat16, (side, side)), Trellis()
    parts = rounded.encode()
    target = allocate(like)

    def encode() -> object:
        known = rounded.parameters
        return round_matrix(weights, steps, passes=1, parameters=known).encode()

    cases = {
        "decode into mapped memory": lambda: codec.decode_into(parts, target),
        "decode into fresh memory": lambda: codec.decode(parts, like),
        "round and encode": encode,
    }
    timings = interleaved(cases, repeats)
    report.table(f"{side} x {side} bf16", timings, size=like.nbytes)
    rate = like.nbytes / timings["decode into mapped memory"].busy / 1e9
    report.at_least("decode per core", rate, 0.5, "GB/s")
    rate = weights.numel() / timings["round and encode"].busy / 1e6
    report.at_least("round and encode per core", rate, 5, "M weights/s")


def count_overhead(shapes: list[tuple[int, int]]) -> float:
    """Return the share of the stored bytes that is not the coded integers."""
    stored, coded = 0, 0.0
    for rows, columns in shapes:
        rounded = round_matrix(make_weights((rows, columns)), make_steps(rows, columns))
        stored += count_blob(rounded, rows, columns)
        coded += rounded.bits / 8
    return 1 - coded / stored


def count_blob(rounded: Rounded, rows: int, columns: int) -> int:
    spec = Spec(torch.bfloat16, (rows, columns))
    name = "model.layers.0.mlp.down_proj.weight"
    return count_stored_bytes(name, Encoded(Trellis(), spec, rounded.encode()), serially)


def make_weights(shape: tuple[int, int]) -> Tensor:
    """Return normal weights of rows and columns of different scale."""
    random = torch.Generator().manual_seed(0)
    scales = [torch.randn(n, generator=random).mul(0.3).exp() for n in shape]
    x = torch.randn(shape, generator=random) * scales[0][:, None] * scales[1]
    return x.mul(0.02).bfloat16().float()


def make_steps(rows: int, columns: int) -> Steps:
    """Return steps as those of a fit, from inputs that correlate."""
    random = torch.Generator().manual_seed(1)
    factor = find_factor(columns, random)
    tolerance = factor.tolerance / factor.tolerance.mean()
    sensitivity = torch.randn(rows, generator=random).mul(0.3).exp()
    return Steps(0.02 * STEP * sensitivity, tolerance, factor=factor.factor, order=factor.order)


def find_factor(columns: int, random: torch.Generator) -> InputFactor:
    x = torch.randn(2 * columns, columns, generator=random)
    x = x + 0.5 * x.roll(1, 1) + torch.randn(len(x), 1, generator=random)
    return factor_inputs(x.T @ x / len(x), len(x))


if __name__ == "__main__":
    main()
