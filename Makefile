# `make demo` sets up and runs the main job; `make test` sets up and runs the whole suite. Nothing else is needed first.
export PYTHON
VENV := .venv
PY := $(VENV)/bin/python
AOT_VENV := .venv-aot
AOT_TPU_VENV := .venv-aot-tpu
OUT ?= out
CHECKPOINT ?= checkpoints/moe_10m

.PHONY: demo test test-fast lint mutants aot aot-tpu test-aot data bench clean help

help:
	@echo "make demo       install, then decode and score real text with the KV cache at 16, 4, 3 and 2 bits"
	@echo "make test       install, then lint, type check, tests, mutants, kernels compiled for an H200 and for TPUs"
	@echo "make aot        compile the Hopper kernels for an H200, without a GPU (part of make test)"
	@echo "make aot-tpu    compile one TPU kernel of each kind for each chip, without one (part of make test)"
	@echo "make test-aot   compile every advertised point of the Hopper and of the TPU kernels"
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
	$(MAKE) aot aot-tpu

test-fast: $(VENV)/.installed
	$(PY) -m pytest -n 2 --dist loadfile -m "not slow"

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

$(AOT_VENV)/.installed: requirements-aot.txt launch/bootstrap.sh
	launch/bootstrap.sh $(AOT_VENV) requirements-aot.txt

aot: $(AOT_VENV)/.installed
	$(AOT_VENV)/bin/python -m tests.aot_hopper

$(AOT_TPU_VENV)/.installed: requirements-aot-tpu.txt launch/bootstrap.sh
	launch/bootstrap.sh $(AOT_TPU_VENV) requirements-aot-tpu.txt

aot-tpu: $(AOT_TPU_VENV)/.installed
	$(AOT_TPU_VENV)/bin/python -m tests.aot_tpu

test-aot: aot $(AOT_TPU_VENV)/.installed
	$(AOT_TPU_VENV)/bin/python -m tests.aot_tpu --all

mutants: $(VENV)/.installed
	$(PY) -m tests.mutants

data: $(VENV)/.installed
	$(PY) -m experiments.prepare_data

bench: $(VENV)/.installed
	$(PY) -m experiments.decode --gin_file=configs/runs/bench_cpu.gin

clean:
	rm -rf $(VENV) $(AOT_VENV) $(AOT_TPU_VENV) $(OUT) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
