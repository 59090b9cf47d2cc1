# Every target makes the virtual environment when it is missing, and does everything else itself.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

.PHONY: help demo test test-all lint type bench results clean

help:
	@echo "make demo      see it work (CPU, under two minutes after the install)"
	@echo "make test      lint, types and tests"
	@echo "make test-all  the same, with the long tests"
	@echo "make results   tables, figures and generated parts of the docs, from the committed runs"
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

results: $(STAMP)
	$(BIN)/python benchmarks/results.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
