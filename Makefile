# `make demo` and `make test` set everything up from nothing; `make help` lists the rest.
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= $(shell nproc)
PYTEST_ARGS ?= -n auto
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
  $$p -c 'import sys, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)

# Tests run the CUDA backend where there is a GPU to run it on, and compile for that GPU alone.
ifneq ($(shell nvidia-smi -L 2>/dev/null),)
  EAGLEX_CUDA ?= AUTO
  EAGLEX_CUDA_ARCHS ?= native
else
  EAGLEX_CUDA ?= OFF
endif
EAGLEX_TESTS ?= ON
EAGLEX_EMULATOR ?= ON
EAGLEX_WERROR ?= $(if $(CI),ON,OFF)
MAX_JOBS ?= $(JOBS)
export EAGLEX_CUDA EAGLEX_CUDA_ARCHS EAGLEX_TESTS EAGLEX_EMULATOR EAGLEX_WERROR MAX_JOBS
export PATH := $(abspath $(VENV))/bin:$(PATH)

PY := $(VENV)/bin/python
BUILD = build/$(shell $(PY) -c 'import sys; print(sys.implementation.cache_tag)')
CXX_FILES = $(sort $(foreach e,h cpp cu cuh,$(shell find csrc bench tests/cpp tests/emulator -name '*.$(e)' 2>/dev/null)))
INSTALLED := $(VENV)/.installed

.PHONY: help test demo build lint format tidy ctest pytest cuda sanitize stubs clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 10

test: build lint ctest pytest  ## set up, build, lint, C++ tests, Python tests

demo: EAGLEX_TESTS = OFF
demo: EAGLEX_EMULATOR = OFF
demo: build  ## set up, build, and speculate on a text with the repository's pair of models
	$(PY) -m eaglex generate --check --dtype float32 </dev/null  # exact on any device; bfloat16 may swap near ties

$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo "eaglex: Python 3.11 or 3.12 with the venv module is needed; set PYTHON=..."; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -qq "$(TORCH)" "setuptools>=77" wheel pybind11==3.1.0 "cmake>=3.22" ninja
	$(PY) -m pip install -qq --no-build-isolation --editable ".[dev]"
	touch $@

build: $(INSTALLED)  ## build the extension in place
	$(PY) setup.py --quiet build_ext --inplace

lint: $(INSTALLED)  ## ruff, mypy, codespell
	ruff check .
	mypy
	codespell
	$(if $(CXX_FILES),clang-format --dry-run -Werror $(CXX_FILES))

format: $(INSTALLED)  ## clang-format the C++ sources, sort imports and fix what ruff can
	ruff check --fix .
	$(if $(CXX_FILES),clang-format -i $(CXX_FILES))

tidy: build  ## clang-tidy over the C++ sources (minutes)
	clang-tidy --quiet -p $(BUILD) $(filter csrc/%.cpp,$(CXX_FILES))

ctest: build  ## the C++ tests
	ctest --test-dir $(BUILD) --output-on-failure --no-tests=error --parallel $(JOBS)

pytest: build  ## the Python tests
	@$(PY) tests/hosts/fetch_wheels.py >/dev/null $(if $(CI),,|| echo "eaglex: no SGLang sources, so their contract is not tested")
	EAGLEX_REQUIRE_SGLANG=$(if $(CI),1,0) $(PY) -m pytest $(PYTEST_ARGS)

cuda: $(INSTALLED)  ## compile the CUDA sources and benchmarks (EAGLEX_CUDA_ARCHS=90 for one architecture)
	$(PY) -m pip install -qq --no-deps nvidia-cutlass==4.2.0.0
	cmake -S . -B build-cuda -G Ninja -DPython_EXECUTABLE=$(abspath $(PY)) -DEAGLEX_CUDA=ON \
	  "-DEAGLEX_CUDA_ARCHS=$(EAGLEX_CUDA_ARCHS)" -DEAGLEX_WERROR=$(EAGLEX_WERROR) -DEAGLEX_BENCH=ON \
	  -DEAGLEX_OUTPUT_DIR=$(CURDIR)/build-cuda/module
	cmake --build build-cuda --parallel $(MAX_JOBS)
	cd build-cuda/module && $(abspath $(PY)) -c "import _C"  # it must load where there is no driver

SANITIZE = timeout 300 compute-sanitizer --error-exitcode 1 --print-limit 20
sanitize: cuda  ## compute-sanitizer over whole cycles of small drafts (on a GPU, about a minute)
	for tool in memcheck racecheck synccheck initcheck; do \
	  for draft in bf16 fp8 int4 plain; do echo $$tool $$draft; done; \
	done | xargs -P 8 -L 1 sh -c 'out=build-cuda/$$0-$$1.txt; \
	  $(SANITIZE) --tool $$0 build-cuda/bench_small_cycles $$1 > $$out 2>&1; code=$$?; \
	  echo "$$0 $$1: $$(tail -n 1 $$out)"; exit $$code'

stubs: build  ## regenerate eaglex/_C.pyi
	$(PY) tools/stubs.py

clean:  ## remove what was built; the virtual environment stays
	rm -rf build build-* eaglex/_C*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
