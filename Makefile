# `make serve` and `make test` work on a fresh clone with a bare Python 3.11 or 3.12 (3.10 and 3.13 are tried last).
SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= smollm2-135m-instruct
SPECULATION ?= auto
ARGS ?=
# One thread a worker: the models of the tests are tiny.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --maxprocesses=8

.PHONY: setup serve test test-all test-gpu lint bench clean

setup: $(VENV)/.ready

serve: setup  ## serve the default model with speculation
	$(PY) -m specdec.server --model $(MODEL) --host $(HOST) --port $(PORT) --speculation $(SPECULATION) $(ARGS)

test: $(VENV)/.test-ready lint  ## the suite without the slow tests
	$(PY) -m specdec.cli pull $(MODEL)
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-all: $(VENV)/.test-ready lint  ## slow tests too
	$(PY) -m specdec.cli pull $(MODEL)
	$(PYTEST) -m "not gpu" $(ARGS)

test-gpu: $(VENV)/.test-ready  ## the kernels and the engine on a CUDA device, all that a card can tell
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 8 -m "not slow and not compiles" tests/kernels tests/gpu --tb=line -q $(ARGS)

lint: $(VENV)/.test-ready
	$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy

bench: setup  ## acceptance and speed of the default model on this machine
	$(PY) -m bench.accept $(ARGS) && $(PY) -m bench.offline $(ARGS)

$(VENV)/.ready: pyproject.toml setup.py constraints.txt setup.sh $(wildcard csrc/cpu/* csrc/*.cpp)
	./setup.sh $(VENV)
	touch $@

$(VENV)/.test-ready: $(VENV)/.ready
	$(PY) -m pip install -q -c constraints.txt --no-build-isolation -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info specdec/_C*.so specdec/_cuda*.so
