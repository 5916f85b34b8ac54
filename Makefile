# Two commands on a fresh clone: `make demo` and `make test`. Every target does its own set-up.
PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= dev,all,training
TORCH  ?= torch==2.13.0  # with a version, so that a folder of wheels for the processor alone is found
TESTS  ?= tests
# At both ends of the bounds: all but studies and pages, whose libraries the other tests call, and figures to the bit.
ENDS   ?= tests --ignore=tests/studies/test_registered_studies.py --ignore=tests/test_documentation.py --ignore=tests/study/test_recorded.py \
  --ignore=tests/recovery/queries/test_questions.py
BIN    := $(VENV)/bin
PIP     = $(BIN)/pip install --quiet --disable-pip-version-check
PINNED  = $(PIP) -c constraints.txt
SUITE   = $(BIN)/pytest -n 2 --dist worksteal $(TESTS)

.PHONY: demo test test-all test-light test-oldest test-newest docs gallery lint format acceptance bench clean

$(VENV)/.studies: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PINNED) -e '.[jax,store]'
	@touch $@
$(VENV)/.dev: $(VENV)/.studies
	$(PINNED) -e '.[dev]'
	@touch $@
$(VENV)/.docs: $(VENV)/.studies
	$(PINNED) -e '.[docs]'
	@touch $@
$(VENV)/.extras: $(VENV)/.dev
	$(PINNED) $(TORCH) -e '.[$(EXTRAS),gpu]'
	@touch $@

demo: $(VENV)/.studies  ## train a small transformer on real text and write a report
	$(BIN)/manyheads demo

test: $(VENV)/.dev  ## the suite on what is installed, without the slow tests; those of an absent extra are skipped by name
	$(SUITE) -m "not slow"

test-all: $(VENV)/.extras  ## the whole suite with every extra installed
	$(SUITE)

# The tools without JAX and zarr: a test that cannot be imported there is an error.
LIGHT := tests/test_light.py tests/test_packaging.py tests/test_reader.py \
  $(addprefix tests/attention/test_,namespaces.py conversion.py merged.py multihead.py) \
  tests/cli/test_extract.py tests/cli/test_probe.py \
  tests/curves tests/models tests/probe tests/statistics \
  $(addprefix tests/recovery/,fit/test_gauss_newton.py layers oracle planted queries result) \
  $(addprefix tests/scaling/,audit test_checks.py preflight/test_factors.py preflight/test_preflight.py) \
  $(addprefix tests/scaling/torch/test_,families.py multipliers.py gpt_transfer.py groups.py) \
  $(addprefix tests/scaling/parametrization/test_,parametrization.py muon.py) \
  $(addprefix tests/spectra/test_,bidiagonal.py coherences.py levels.py outliers.py ranks.py) tests/theory/bigram/test_lags.py
test-light: VENV := $(VENV)-light
test-light: BIN := $(VENV)/bin
test-light: TESTS := $(LIGHT)
test-light:  ## the tests of what needs neither JAX nor zarr, in an environment without them
	$(PYTHON) -m venv $(VENV)
	$(PINNED) $(TORCH) -e '.[dev,torch]'
	$(SUITE) -m "not slow"

# Both ends of what pyproject.toml admits, each in an environment of its own.
test-oldest: VENV := $(VENV)-oldest
test-oldest: BIN := $(VENV)/bin
test-oldest: TESTS := $(ENDS)
test-oldest:  ## the suite on the lower bounds
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints-oldest.txt $(TORCH) -e '.[$(EXTRAS)]'
	$(SUITE)

test-newest: VENV := $(VENV)-newest
test-newest: BIN := $(VENV)/bin
test-newest: TESTS := $(ENDS)
test-newest:  ## the suite on the newest versions that can be installed
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade --upgrade-strategy eager $(TORCH) -e '.[$(EXTRAS)]'
	$(SUITE)

docs: $(VENV)/.docs  ## the site, offline, in docs/_build/site; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/site

gallery: $(VENV)/.studies  ## data of the gallery from stored runs, missing ones at their smallest size: make gallery STORE=runs
	$(BIN)/python docs/_ext/collect_gallery.py $(or $(STORE),runs)

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
	rm -rf $(VENV) $(VENV)-light $(VENV)-oldest $(VENV)-newest .pytest_cache .mypy_cache .ruff_cache .hypothesis docs/_build docs/api docs/gallery/*.md docs/gallery/*.svg
