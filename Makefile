# Two commands on a fresh clone: `make demo` and `make test`. Every target does its own set-up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-torch lint format acceptance bench clean

$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@
$(VENV)/.dev: $(VENV)/.core
	$(PIP) -e '.[dev]'
	@touch $@
$(VENV)/.extras: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PIP) -e '.[dev,fast,torch,cluster]'
	@touch $@

demo: $(VENV)/.core  ## train a small transformer on real text and write a report
	$(BIN)/manyheads demo

test: $(VENV)/.dev  ## the suite on what is installed; tests of an absent extra are skipped by name
	$(BIN)/pytest -n 2 --dist worksteal

test-torch: $(VENV)/.extras  ## the whole suite with every extra installed
	$(BIN)/pytest -n 2 --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

acceptance: $(VENV)/.extras  ## the specification's full figures, resumable: make acceptance WING=attention
	$(BIN)/python -m tests.acceptance $(WING)

bench: $(VENV)/.extras  ## one performance claim, ours beside its peer: make bench NAME=entropy
	$(BIN)/python benchmarks/$(NAME).py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
