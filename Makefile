PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test check format clean

# Recover four worlds and draw them: the quick preset of the two-d experiment, and its report.
run: $(VENV)/run.stamp
	$(BIN)/orthoworld run two-d --preset quick
	$(BIN)/orthoworld report runs/two-d

# Everything CI runs: style, types, and all tests with warnings as errors.
test: check
	$(BIN)/python -m pytest -n 2

check: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The pinned versions are the tested ones; on Linux pip takes the CUDA build of torch unless torch is already there.
$(VENV)/run.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[fast,report]'
	touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
