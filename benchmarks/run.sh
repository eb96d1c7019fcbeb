#!/usr/bin/env bash
# Make .venv-bench with the project and its peers, then run every benchmark. Options (--quick) go to each.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-bench
pip="$venv/bin/pip install --quiet --constraint constraints.txt"

if [ ! -e $venv/peers ]; then
    python3 -m venv $venv
    $pip --upgrade pip
    $pip torch safetensors numpy tqdm loguru psutil pydantic transformers
    # Its metadata asks for transformers < 5; the sparse formats run with 5 as well.
    $pip --no-deps compressed-tensors==0.14.0.1
    touch $venv/peers
fi
BENCH_COMMIT=$(git describe --always --dirty)
export BENCH_COMMIT
# A build folder of its own: `make test` may be using the other one.
$pip --no-deps --force-reinstall --config-settings=build-dir=$venv/build .

for name in bitmask_kernels load_file many_tensors peak_memory; do
    $venv/bin/python benchmarks/$name.py "$@"
done
