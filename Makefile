# The two that a newcomer needs: `make train`, `make test`. Nothing but make and Python 3.11 or newer is expected.
PYTHON ?= python3
VENV ?= .venv
# For make test-versions.
PYTHONS ?= python3.11 python3.12 python3.13
# Overrides for the training command: make train ARGS="model=resnet56 trainer.max_epochs=5"
ARGS ?=
# Processes that run the tests, with one thread of torch each: one for each core, eight at most.
WORKERS ?= logical
# What make bench runs: a workload of the proof (benchmarks/proof/workloads.py), or the name of a script in benchmarks/.
WORKLOAD ?= *
# Folder with the data sets of the workloads, and their size: make bench WORKLOAD=cifar10_resnet20 DATA=PATH SIZE=full
DATA ?= data
SIZE ?= small

BIN := $(VENV)/bin
PACKAGE_FILES := setup.cfg setup.py pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help train test test-slow test-gpu test-faults test-soak test-oldest test-versions check bench bench-all figures docs notebooks clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

train: $(VENV)/installed-demo ## train a ResNet-20 on handwritten digits, freezing as it goes (ARGS="..." overrides)
	$(BIN)/egeria-train $(ARGS)

test: $(VENV)/installed-dev ## run the tests
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

test-slow: $(VENV)/installed-dev $(VENV)/installed-ray $(VENV)/installed-transformers ## run the tests that take longer (installs Ray and packages of Hugging Face: more than 600 MB)
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal -m slow

test-gpu: $(VENV)/installed-dev ## run the tests of single processes with a GPU
	PYTHONPATH=tests CUBLAS_WORKSPACE_CONFIG=:4096:8 $(BIN)/python -m pytest -p support.on_gpu -n $(WORKERS) --maxprocesses 8 --dist worksteal

test-faults: $(VENV)/installed-dev ## put every fault into a training job, over and over, and tabulate what held
	PYTHONPATH=tests $(BIN)/python -m faults.campaign $(ARGS)

test-soak: $(VENV)/installed-dev ## freeze and unfreeze for two hours and see that nothing grows (ARGS="--minutes 10")
	PYTHONPATH=tests $(BIN)/python -m faults.soak $(ARGS)

test-oldest: ## run the tests with the oldest supported versions (its own environment)
	$(MAKE) test VENV=.venv-oldest PIP_CONSTRAINT=$(CURDIR)/constraints/oldest.txt

test-versions: ## run the tests on each Python of PYTHONS, and with the oldest supported versions (environments of their own)
	@for python in $(PYTHONS); do $(MAKE) test PYTHON=$$python VENV=.venv-$${python##*/} || exit 1; done
	$(MAKE) test-oldest

check: $(VENV)/installed-dev ## lint, formatting, imports, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

bench: $(VENV)/installed-demo ## compare on WORKLOAD=name with the data in DATA=folder; without a name, run all scripts in benchmarks/
	@if [ '$(WORKLOAD)' != '*' ] && [ ! -f 'benchmarks/$(WORKLOAD).py' ]; then \
		$(BIN)/python -m benchmarks.proof.compare '$(WORKLOAD)' --data '$(DATA)' --size '$(SIZE)' $(ARGS); \
	else \
		for script in benchmarks/$(WORKLOAD).py; do echo "== $$script"; PYTHONPATH=. $(BIN)/python $$script $(ARGS) || exit 1; done; \
	fi

bench-all: $(VENV)/installed-demo ## compare on all workloads of the proof; what is done already is not repeated
	@for workload in $$($(BIN)/python -m benchmarks.proof.workloads); do \
		$(BIN)/python -m benchmarks.proof.compare $$workload --data '$(DATA)' --size '$(SIZE)' $(ARGS) || exit 1; done

figures: $(VENV)/installed-demo ## draw the tables and figures of the proof from the files of its runs
	$(BIN)/python -m benchmarks.proof.figures

docs: $(VENV)/installed-docs ## build the documentation in build/docs, warnings as errors
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet docs build/docs
	@echo "open build/docs/index.html"

notebooks: $(VENV)/installed-dev ## execute the notebooks and store their outputs
	$(BIN)/python -m notebooks.execute

clean: ## remove the environments, builds and caches; keeps runs/
	rm -rf .venv .venv-* build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp makes an install happen once, and again when the requirements change.
$(VENV)/installed-%: $(PACKAGE_FILES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Use: make PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

.PRECIOUS: $(VENV)/installed-%
