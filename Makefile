# `make ablation` and `make test` set up .venv by themselves, with the newest Python of these that is
# here: from 3.12 on, jax has the interpreter that the tests of the Hopper kernels need.
PYTHONS = python3.13 $(HOME)/.pyenv/versions/3.13.*/bin/python3 \
	python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python3 python3
ifeq ($(origin PYTHON), undefined)
PYTHON := $(shell for python in $(PYTHONS); do \
	$$python -c 'import venv, ensurepip' 2>/dev/null && echo $$python && break; done)
endif
ifeq ($(PYTHON),)
PYTHON := python3
endif
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PARITY := .venv-parity
WORKERS ?= 2
ARGS ?=
JAX ?= newest
WHEEL := .venv-wheel-$(JAX)
HOPPER := .venv-hopper-$(JAX)
HOPPER_TESTS ?= tests/kernels/test_mosaic_gpu.py tests/kernels/test_one_token.py tests/kernels/test_mosaic_gpu_compile.py
WHEEL_TESTS ?= tests/test_smoke.py tests/test_project.py tests/test_docstrings.py tests/ops

# $(call install,PYTHON,REQUIREMENTS)
install = if command -v uv >/dev/null 2>&1; then uv pip install --quiet --python $(1) $(2); \
	else $(1) -m pip install --quiet --disable-pip-version-check $(2); fi

JAX_PIN = $(if $(filter newest,$(JAX)),,'jax==$(JAX)' 'jaxlib==$(JAX)')

# A small BLAS pool: several test processes must not fight over the cores.
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: help ablation test test-slow check test-parity test-tpu-compile test-gpu-compile test-hopper test-wheel test-installed test-extras dist lint format docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(READY): pyproject.toml setup.cfg
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "deltanet_jax needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@if command -v uv >/dev/null 2>&1; then \
		uv venv --quiet --allow-existing --python $(PYTHON) $(VENV); \
	else \
		$(PYTHON) -m venv $(VENV); \
	fi
	@$(call install,$(BIN)/python,-e '.[dev]')
	@touch $@

ablation: $(READY)  ## the scan-versus-chunk ablation on this machine; options: ARGS="--help"
	$(BIN)/python -m experiments scan-vs-chunk $(ARGS)

test: $(READY)  ## all tests that this machine can run
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-slow: $(READY)  ## the long property tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(ARGS)

check: lint  ## lint, types, imports, smoke tests and the tests of what changed since main
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $$($(BIN)/python tests/reach.py) $(ARGS)

test-tpu-compile: $(READY)  ## the TPU kernels through the TPU's compiler, which needs no TPU
	@$(BIN)/python -c 'import libtpu' 2>/dev/null \
		|| { $(call install,$(BIN)/python,-e '.[tpu-test]'); }
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/kernels/test_mosaic_tpu_compile.py $(ARGS)

# The compiler for GPUs is in the plugin of jax's own version.
GPU_COMPILER = version=$$($(1)/bin/python -c 'import jax; print(jax.__version__)'); \
	$(call install,$(1)/bin/python,--no-deps "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version")

test-gpu-compile: $(READY)  ## the Hopper kernels through the GPU's compiler, which needs no GPU
	@$(BIN)/python -c 'import jax_cuda13_plugin' 2>/dev/null || { $(call GPU_COMPILER,$(VENV)); }
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/kernels/test_mosaic_gpu_compile.py $(ARGS)

test-hopper:  ## the Hopper kernels, interpreted and through the GPU's compiler, without a GPU; options: PYTHON=, JAX=0.11.2
	$(PYTHON) -m venv --clear $(HOPPER)
	@$(call install,$(HOPPER)/bin/python,-e '.[test]' $(JAX_PIN))
	@$(call GPU_COMPILER,$(HOPPER))
	JAX_PLATFORMS=cpu $(HOPPER)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(HOPPER_TESTS) $(ARGS)

# Pinned, because the tests reach into these packages. PyTorch's own files for a CPU need no CUDA.
$(PARITY)/.ready: pyproject.toml setup.cfg
	$(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0' 'triton==3.9.0' \
		'fla-core==0.6.0' 'flash-linear-attention==0.6.0' 'transformers==5.24.0' -e '.[test]'
	@touch $@

# Other libraries warn of what is theirs to mend.
test-parity: $(PARITY)/.ready  ## the tests against PyTorch references, in an environment of their own
	$(PARITY)/bin/python -m pytest -W default tests/parity $(ARGS)

dist: $(READY)  ## the source distribution, and the wheel built from it, in dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist . >dist.log 2>&1 || { cat dist.log; exit 1; }
	@rm dist.log && ls dist

# The source distribution holds the tests; without its package they find only the installed one.
# Their compiled programs are kept in this checkout, as those of the other tests.
test-wheel: dist  ## tests against the installed wheel, outside of the tree; options: PYTHON=, JAX=0.11.2
	$(PYTHON) -m venv --clear $(WHEEL)
	@$(call install,$(WHEEL)/bin/python,"$$(ls dist/*.whl)[dev]" $(JAX_PIN))
	$(WHEEL)/bin/python -m pip check
	$(MAKE) test-installed

test-installed:  ## the same tests again, with the wheel where `test-wheel` installed it
	python=$$(pwd)/$(WHEEL)/bin/python; tree=$$(mktemp -d); trap 'rm -rf "$$tree"' EXIT; \
	tar -xzf dist/*.tar.gz -C "$$tree" --strip-components=1 && rm -r "$$tree"/deltanet_jax* && cd "$$tree" && \
	export JAX_COMPILATION_CACHE_DIR="$${JAX_COMPILATION_CACHE_DIR:-$(CURDIR)/.cache/jax/wheel-$(JAX)}" && \
	$$python tests/installed.py $(if $(filter newest,$(JAX)),--types) && \
	$$python -m pytest -n $(WORKERS) --dist worksteal $(WHEEL_TESTS) $(ARGS)

test-extras: dist  ## each extra of the wheel in an empty environment of its own
	$(BIN)/python tests/extras.py dist/*.whl

lint: $(READY)  ## style, types and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

format: $(READY)  ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## the documentation site, in docs/_build/html
	@$(BIN)/python -c 'import sphinx, myst_nb, furo, ipykernel' 2>/dev/null \
		|| { $(call install,$(BIN)/python,-e '.[docs]'); }
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build/html

clean:  ## remove what was built, not what was measured
	rm -rf $(VENV) .cache $(PARITY) .venv-wheel-* .venv-hopper-* build dist docs/_build *.egg-info uv.lock \
		.pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
