#!/bin/sh
# Build the tests of the core, run them, and compare with the known answers: cpp/tests/run.sh [aarch64]
# For aarch64, with and without CRC instructions: apt-get install g++-aarch64-linux-gnu qemu-user cmake
set -eu
here=$(cd "$(dirname "$0")" && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

# run_tests NAME EMULATOR CMAKE_OPTION...
run_tests() {
    name=$1 emulator=$2
    shift 2
    cmake -S "$here" -B "$build/$name" "$@" >"$build/log" 2>&1 &&
        cmake --build "$build/$name" -j 2 >>"$build/log" 2>&1 || { cat "$build/log"; exit 2; }
    $emulator "$build/$name/test_core" >"$build/found.txt"
    diff "$here/answers.txt" "$build/found.txt"
    echo "$name: $(wc -l <"$build/found.txt") answers agree"
}

if [ "${1:-}" = aarch64 ]; then
    for arch in armv8-a armv8-a+crc; do
        run_tests "$arch" "qemu-aarch64 -L /usr/aarch64-linux-gnu" -DCMAKE_SYSTEM_NAME=Linux \
            -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
            -DCMAKE_CXX_FLAGS="-march=$arch"
    done
else
    run_tests native ""
fi
