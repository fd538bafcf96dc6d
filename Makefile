# Two commands: `make train` trains a model, `make test` proves the code. Each builds its own environment first.

VENV ?= .venv
RECIPE ?= lm-laptop
WORKDIR ?= runs/$(RECIPE)
# More words for the command: make train ARGS="--steps 100"
ARGS ?=
# Test processes at once, each with eight virtual CPU devices: one more than two cores, since some tests wait for other processes.
JOBS ?= 3
# A test whose process ends is run once more, and fails all the same.
PARALLEL = -n $(JOBS) --dist loadfile --max-worker-restart 1
# A folder of tests: make quick PKG=zoo, PKG=train/data; those of presets need no JAX.
PKG ?=

# Tests of the compiled step, of meshes, of bitwise resume and of a whole run: those that LLVM's optimizations can change.
USERS_XLA := tests/train/core tests/train/parallel tests/train/run/saves tests/zoo/layers tests/train/run/test_loop.py

# Tests start hundreds of processes; each would compile every module anew where bytecode is not kept.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INTERPRETERS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11)
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
LOCK := $(BIN)/uv pip compile pyproject.toml --quiet --universal --generate-hashes --python-version 3.11 \
	--fork-strategy requires-python --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"
# The other two requirement files list what they add to requirements.txt, which is installed with them. uv names what it leaves out
# in a comment at the end, which `lock` cuts off.
ADDED_ONLY = $$(sed -nE 's/^([A-Za-z0-9._-]+)==.*/--no-emit-package \1/p' requirements.txt | sort -u)

.PHONY: help train quick test check costs parity tpu gpu schedulers core figures site links report wheels release lock clean
.DEFAULT_GOAL := help

help: ## What can be made
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## (.*)/  make \1 : \2/' | column -t -s: \
		|| true
	@echo "Variables: VENV=$(VENV) PYTHON=(first of: $(INTERPRETERS)) RECIPE=$(RECIPE) WORKDIR=$(WORKDIR) JOBS=$(JOBS) ARGS=$(ARGS)"

train: $(if $(filter gs://%,$(WORKDIR)),$(VENV)/.locked-dev,$(VENV)/.locked) ## Install, then train RECIPE; an interrupted run continues, in a bucket too (WORKDIR)
	$(BIN)/python -m train $(RECIPE) --workdir $(WORKDIR) --resume $(ARGS)

quick: $(VENV)/.locked-dev ## The near and cheap tests, in a minute; PKG=presets or another folder of tests: only its
	$(BIN)/python -m pytest -q $(if $(PKG),,$(PARALLEL)) -m quick tests/$(PKG) $(ARGS)

test: check ## Install, then check format, lint and types and run every test
	$(BIN)/python -m pytest $(PARALLEL) --no-loadscope-reorder -m "not parity and not tpu and not gpu and not schedulers and not release"

check: $(VENV)/.locked-dev ## Format, lint and types only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	PYRIGHT_PYTHON_GLOBAL_NODE=0 $(BIN)/pyright --pythonpath $(BIN)/python

costs: $(VENV)/.locked-dev ## Record the processor time of every test file, which orders them and says which are quick (ARGS=tests/zoo: of some)
	$(BIN)/python -m pytest $(PARALLEL) --no-loadscope-reorder -m "not parity and not tpu and not gpu and not schedulers and not release" --costs $(ARGS)

parity: $(VENV)/.locked-dev ## Logits and text against transformers, tasks of the lm-eval harness (Python 3.11; installs torch and it, in no lock file)
	$(PIP) install --quiet "torch==2.13.0" "transformers>=5,<6" "lm-eval>=0.4.9,<0.5"
	$(BIN)/python -m pytest -m parity tests/scripts/parity tests/scripts/test_verify_page.py tests/train/reuse/huggingface \
		tests/train/reuse/harness

tpu: $(VENV)/.locked-dev ## What the TPU compiler makes of the step, without a TPU (Linux x86-64; puts libtpu, which no lock file has, in .cache)
	$(PIP) install --quiet --upgrade --no-deps --target .cache/libtpu/$(notdir $(VENV)) \
		"$$($(BIN)/python -c 'from importlib.metadata import requires; print(*(r.split(";")[0] for r in requires("jax") if r.startswith("libtpu")))')"
	JAX_ENABLE_COMPILATION_CACHE=false PYTHONPATH=.cache/libtpu/$(notdir $(VENV)) $(BIN)/python -m pytest -m tpu $(ARGS)

gpu: $(VENV)/.locked-dev ## What the GPU compiler makes of the step, without a GPU (Linux x86-64; puts JAX's CUDA plugin, cuDNN and qwix, which no lock file has, in .cache)
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && $(PIP) install --quiet --upgrade --no-deps \
		--target .cache/cuda/$(notdir $(VENV)) jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version nvidia-cudnn-cu12 \
		"$$($(BIN)/python -c 'from importlib.metadata import requires; print(*(r.split(";")[0] for r in requires("mupax") if r.startswith("qwix")))')"
	JAX_ENABLE_COMPILATION_CACHE=false PYTHONPATH=.cache/cuda/$(notdir $(VENV)) $(BIN)/python -m pytest -m gpu $(ARGS)

schedulers: $(VENV)/.locked-dev ## Runs under a real SLURM, Open MPI and Ray; files for SkyPilot, JobSet and XPK by their parsers (tools into .cache)
	scripts/launch/install_schedulers.sh $(BIN)/python .cache/schedulers
	$(BIN)/python -m pytest -rs -m schedulers tests/scripts/launch

core: $(VENV)/.locked-dev ## The cheap tests that other Python and JAX versions must pass too, and those of the step and of meshes with XLA as users have it
	$(BIN)/python -m pytest $(PARALLEL) --no-loadscope-reorder -m versions $(addprefix --ignore=,$(USERS_XLA))
	XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=3" \
		$(BIN)/python -m pytest $(PARALLEL) --no-loadscope-reorder -m core $(USERS_XLA)

figures: $(VENV)/.locked ## Measure and draw the papers' figures that are not in docs/evidence/figures yet (ARGS=--again for all)
	$(BIN)/python -m scripts.figures $(ARGS)

site: $(VENV)/.locked-site ## Build the site of docs/ into build/site: notebooks are run, warnings and links that lead nowhere are errors
	rm -rf build/site
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -b html docs build/site $(ARGS)
	$(BIN)/python -m scripts.pages.links build/site

links: $(VENV)/.locked-site ## Ask the host of every address outside that the site links whether it is there (needs a network; no notebook is run)
	NOTEBOOKS=off $(BIN)/sphinx-build --quiet -b linkcheck docs build/links $(ARGS)

report: $(VENV)/.locked-site ## Set the report of what presets do and what transfers into build/report.pdf
	$(BIN)/python -m scripts.report $(ARGS)

wheels: $(VENV)/.locked-dev ## Build sdist, wheel and that of the presets alone into dist, check them by twine, use both wheels in empty environments, and run a notebook and two examples from one
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	cd packaging/presets && $(abspath $(BIN))/python -m hatchling build -t wheel -d $(CURDIR)/dist
	$(PIP) install --quiet "twine>=6,<8"
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m pytest -q tests/test_install.py $(ARGS)

release: $(VENV)/.locked-dev ## The wheels, once version and day are the same in mupax/__init__.py, CHANGELOG.md and CITATION.cff
	$(BIN)/python -m scripts.release
	$(MAKE) wheels

lock: $(BIN)/python ## Write the requirement files again (ARGS=--upgrade for newer versions)
	$(PIP) install --quiet "uv>=0.6,<0.14"
	$(LOCK) $(ARGS) --group build -o requirements.txt
	$(LOCK) $(ARGS) --group build --extra dev -c requirements.txt $(ADDED_ONLY) -o requirements-dev.txt
	$(LOCK) $(ARGS) --group build --extra site -c requirements.txt -c requirements-dev.txt $(ADDED_ONLY) -o requirements-site.txt
	for file in requirements-dev.txt requirements-site.txt; do \
		sed '/^# The following packages were excluded from the output:$$/,$$d' $$file >$$file.part && mv $$file.part $$file || exit 1; \
	done

clean: ## Remove the environment and caches; runs/ stays
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache build dist
	find presets zoo train tests scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	@for python in $(INTERPRETERS); do \
		if $$python -c '$(SUPPORTED)' 2>/dev/null; then echo "making $(VENV) with $$python"; exec $$python -m venv $(VENV); fi; \
	done; \
	echo "No Python 3.11, 3.12 or 3.13 among: $(INTERPRETERS)" >&2; \
	echo "Install one, or say where it is: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
	exit 2

$(VENV)/.locked: requirements.txt pyproject.toml | $(BIN)/python
	@echo "installing the locked packages into $(VENV), once"
	$(PIP) install --quiet --require-hashes -r requirements.txt
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.locked-dev: requirements.txt requirements-dev.txt pyproject.toml | $(BIN)/python
	@echo "installing the locked packages and tools into $(VENV), once"
	$(PIP) install --quiet --require-hashes -r requirements.txt -r requirements-dev.txt
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $(VENV)/.locked $@

$(VENV)/.locked-site: requirements.txt requirements-site.txt pyproject.toml | $(BIN)/python
	@echo "installing the locked packages and the site's tools into $(VENV), once"
	$(PIP) install --quiet --require-hashes -r requirements.txt -r requirements-site.txt
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $(VENV)/.locked $@
