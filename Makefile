# Every target makes the virtual environment when it is missing, and does everything else itself.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

.PHONY: help demo test test-all lint type docs tables results dist dist-check bench clean

help:
	@echo "make demo      see it work (CPU, under two minutes after the install)"
	@echo "make test      lint, types and tests"
	@echo "make test-all  the same, with the long tests"
	@echo "make docs      the documentation as a site, build/site/index.html"
	@echo "make tables    tables, pictures, commands and notebooks of the docs, from committed runs: seconds"
	@echo "make results   the same, with the tables and figures of all studies"
	@echo "make dist      sdist and wheel, in dist; make dist-check installs the wheel with [all] and tries it"
	@echo "make lint | make type | make bench | make clean"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/espalier demo $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP)
	$(BIN)/mypy

# Two workers on two cores: with torch's own threads on top they would wait for each other.
test test-all: export OMP_NUM_THREADS = 1

test: lint type
	$(BIN)/pytest -n 2 --dist worksteal -q $(ARGS)

test-all: lint type
	$(BIN)/pytest -n 2 --dist worksteal -q -m "long or not long" $(ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/search.py

docs: $(STAMP)
	$(BIN)/python docs/pages.py --gather build/docs
	$(BIN)/zensical build --clean --strict

tables: $(STAMP)
	$(BIN)/python benchmarks/results.py --tables

results: $(STAMP)
	$(BIN)/python benchmarks/results.py $(ARGS)

dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

dist-check: dist
	$(BIN)/python benchmarks/dist_check.py dist --log results/dist-check.txt

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
