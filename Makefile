# Two commands set up everything on a machine with Python 3.11 or newer: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXAMPLE := examples/swinv2_cifar10/model.safetensors
DEMO := build/demo/model.flashbias.safetensors

.PHONY: demo test lint types unit interpreter device abuse oldest-triton gpu clean help

help:
	@echo "make demo   convert a trained SwinV2 and compare it with the original"
	@echo "make test   lint, type check and run every test that needs no GPU"
	@echo "make abuse  damaged files, killed writers, random calls: minutes, with counts at the end"
	@echo "make oldest-triton  compile all kernels with the oldest Triton that is supported"
	@echo "make gpu    run the operator and device suites on this machine's card"
	@echo "make clean  remove the virtual environment and build outputs"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[plot]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed-demo
	@mkdir -p $(dir $(DEMO))
	$(BIN)/flashbias-convert $(EXAMPLE) --energy 0.99 --output $(DEMO) --force
	$(BIN)/python scripts/demo.py $(EXAMPLE) $(DEMO)

test: lint types unit interpreter device

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n auto

# the kernel itself, in Triton's interpreter
interpreter: $(VENV)/.installed-dev
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n auto tests/attention tests/launch_tuning \
		tests/abuse/test_operator.py tests/scripts/test_tune_parts.py tests/scripts/test_card_rates.py \
		tests/scripts/test_sanitize_kernel.py

# models on a device that is not the CPU: one that only pretends to be another
device: $(VENV)/.installed-dev
	FLASHBIAS_DEVICE=card $(BIN)/python -m pytest -q -n auto tests/device

# what `unit` and `interpreter` try a little of, in full; prints what was tried and how it ended
abuse: $(VENV)/.installed-dev
	FLASHBIAS_ABUSE=full $(BIN)/python -m pytest -q -n auto tests/abuse \
		tests/checkpoint/streaming/test_memory.py::test_memory_stays_below_the_largest_shard
	FLASHBIAS_ABUSE=full TRITON_INTERPRET=1 \
		$(BIN)/python -m pytest -q -n auto tests/abuse/test_operator.py

# every form of the kernels, compiled for a Hopper card; needs no card
OLDEST := build/triton-3.6.0
oldest-triton: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(OLDEST) triton==3.6.0
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -q -n auto tests/attention -k compile

gpu:
	python scripts/gpu_suite.py

clean:
	rm -rf $(VENV) build *.egg-info
