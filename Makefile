# Two commands on a fresh machine: `make demo` and `make test`.
# PYTHON    interpreter that makes the virtual environment (3.11 or newer)
# PIP_ARGS  passed to every pip install, for example an index of your own
# DEMO_ARGS passed to `quantmla demo`
PYTHON ?= python3
PIP_ARGS ?=
DEMO_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.quantmla-installed
PIP := $(BIN)/python -m pip install $(PIP_ARGS)
CPU_TORCH := torch==2.13.0
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

.PHONY: demo results test test-all lint clean

demo: $(STAMP)
	$(BIN)/quantmla demo --resume $(DEMO_ARGS)

results: $(STAMP)
	$(BIN)/quantmla demo --full --resume $(DEMO_ARGS)

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q

test-all: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -m "slow or not slow"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first: whatever is installed later then keeps the build chosen here. Where the default
# index has only CUDA builds, PIP_ARGS can name one with CPU builds.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "quantmla needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade 'pip>=25.1'
ifneq ($(HAS_GPU),yes)
	$(PIP) $(CPU_TORCH)
endif
	$(PIP) --editable '.[demo]' --group dev
	@touch $@
