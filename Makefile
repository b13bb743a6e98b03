# `make ablation` and `make test` set up .venv by themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PARITY := .venv-parity
WORKERS ?= 2
ARGS ?=

# A small BLAS pool: several test processes must not fight over the cores.
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: help ablation test test-parity test-tpu-compile lint format docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(READY): pyproject.toml setup.cfg
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "deltanet_jax needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@if command -v uv >/dev/null 2>&1; then \
		uv venv --quiet --allow-existing --python $(PYTHON) $(VENV) && \
		uv pip install --quiet --python $(BIN)/python -e '.[dev]'; \
	else \
		$(PYTHON) -m venv $(VENV) && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'; \
	fi
	@touch $@

ablation: $(READY)  ## the scan-versus-chunk ablation on this machine; options: ARGS="--help"
	$(BIN)/python -m experiments scan-vs-chunk $(ARGS)

test: $(READY)  ## all tests that this machine can run
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-tpu-compile: $(READY)  ## the TPU kernels through the TPU's compiler, which needs no TPU
	@$(BIN)/python -c 'import libtpu' 2>/dev/null \
		|| if command -v uv >/dev/null 2>&1; then uv pip install --quiet --python $(BIN)/python -e '.[tpu-test]'; \
		else $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[tpu-test]'; fi
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/kernels/test_mosaic_tpu_compile.py $(ARGS)

# Pinned, because the tests reach into these packages. PyTorch's own files for a CPU need no CUDA.
$(PARITY)/.ready: pyproject.toml setup.cfg
	$(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0' 'triton==3.9.0' \
		'fla-core==0.6.0' 'flash-linear-attention==0.6.0' 'transformers==5.24.0' -e '.[test]'
	@touch $@

# Other libraries warn of what is theirs to mend.
test-parity: $(PARITY)/.ready  ## the tests against PyTorch references, in an environment of their own
	$(PARITY)/bin/python -m pytest -W default tests/parity $(ARGS)

lint: $(READY)  ## style, types and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

format: $(READY)  ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## the documentation site, in docs/_build/html
	@$(BIN)/python -c 'import sphinx, myst_parser, furo' 2>/dev/null \
		|| if command -v uv >/dev/null 2>&1; then uv pip install --quiet --python $(BIN)/python -e '.[docs]'; \
		else $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'; fi
	$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build/html

clean:  ## remove what was built, not what was measured
	rm -rf $(VENV) $(PARITY) .venv-newest build dist docs/_build *.egg-info uv.lock \
		.pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
