#!/bin/sh
# Build every fuzz target and run each for a while: cpp/fuzz/run.sh [seconds per target]
# Needs clang with its sanitizer runtimes and cmake. Stops at the first finding; its input is printed in base64.
set -eu
seconds=${1:-10}
here=$(cd "$(dirname "$0")" && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

cmake -S "$here" -B "$build" -DCMAKE_CXX_COMPILER=clang++ >"$build/log" 2>&1 &&
    cmake --build "$build" -j 2 >>"$build/log" 2>&1 || { cat "$build/log"; exit 2; }

for source in "$here"/fuzz_*.cpp; do
    target=$(basename "$source" .cpp)
    echo "== $target, $seconds s"
    mkdir "$build/corpus_$target"
    (cd "$build" && "./$target" -max_total_time="$seconds" -max_len=4096 -timeout=10 -verbosity=0 -print_funcs=0 \
        -print_final_stats=1 "corpus_$target")
done
