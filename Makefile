# `make demo` sets up and runs the main job; `make test` sets up and runs the whole suite. Nothing else is needed first.
export PYTHON
VENV := .venv
PY := $(VENV)/bin/python
OUT ?= out
CHECKPOINT ?= checkpoints/moe_10m

.PHONY: demo test test-fast lint mutants data bench clean help

help:
	@echo "make demo       install, then decode and score real text with the KV cache at 16, 4, 3 and 2 bits"
	@echo "make test       install, then lint, type check, tests, mutants"
	@echo "make test-fast  the tests alone, without the slow ones"
	@echo "make data       fetch the training texts and the SmolLM2 weights into data/raw, prepare data/prepared"
	@echo "make bench      CPU decode speed, see README"

$(VENV)/.installed: pyproject.toml constraints.txt launch/bootstrap.sh
	launch/bootstrap.sh $(VENV)

demo: $(VENV)/.installed
	$(PY) -m experiments.quality --gin_file=configs/runs/demo.gin --checkpoint=$(CHECKPOINT) --output_dir=$(OUT)/demo

test: lint $(VENV)/.installed
	$(PY) -m pytest -n 2 --dist loadfile --durations=20
	$(PY) -m tests.mutants

test-fast: $(VENV)/.installed
	$(PY) -m pytest -n 2 --dist loadfile -m "not slow"

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

mutants: $(VENV)/.installed
	$(PY) -m tests.mutants

data: $(VENV)/.installed
	$(PY) -m experiments.prepare_data

bench: $(VENV)/.installed
	$(PY) -m experiments.decode --gin_file=configs/runs/bench_cpu.gin

clean:
	rm -rf $(VENV) $(OUT) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
