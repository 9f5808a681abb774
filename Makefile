# The two that a newcomer needs: `make train`, `make test`. Nothing but make and Python 3.11 or newer is expected.
PYTHON ?= python3
VENV ?= .venv
# Overrides for the training command: make train ARGS="model=resnet56 trainer.max_epochs=5"
ARGS ?=
# One benchmark instead of all of them: make bench WORKLOAD=name runs benchmarks/name.py
WORKLOAD ?= *

BIN := $(VENV)/bin
PACKAGE_FILES := setup.cfg pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help train test test-slow test-oldest check bench docs notebooks clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

train: $(VENV)/installed-demo ## train a ResNet-20 on handwritten digits, freezing as it goes (ARGS="..." overrides)
	$(BIN)/egeria-train $(ARGS)

test: $(VENV)/installed-dev ## run the tests
	$(BIN)/python -m pytest

test-slow: $(VENV)/installed-dev ## run the tests that take longer
	$(BIN)/python -m pytest -m slow

test-oldest: ## run the tests with the oldest supported versions (its own environment)
	$(MAKE) test VENV=.venv-oldest PIP_CONSTRAINT=$(CURDIR)/constraints/oldest.txt

check: $(VENV)/installed-dev ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed-demo ## run the benchmarks (WORKLOAD=name for one of them)
	@scripts=$$(ls benchmarks/$(WORKLOAD).py 2>/dev/null) || { echo "no benchmark benchmarks/$(WORKLOAD).py" >&2; exit 2; }; \
	for script in $$scripts; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

docs: $(VENV)/installed-docs ## build the documentation in build/docs, warnings as errors
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet docs build/docs
	@echo "open build/docs/index.html"

notebooks: $(VENV)/installed-dev ## execute the notebooks
	$(BIN)/python -m pytest -m "slow or not slow" tests/test_notebooks.py

clean: ## remove the environments, builds and caches; keeps runs/
	rm -rf .venv .venv-oldest build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp makes an install happen once, and again when the requirements change.
$(VENV)/installed-%: $(PACKAGE_FILES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Use: make PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

.PRECIOUS: $(VENV)/installed-%
