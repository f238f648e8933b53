# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTHON_FILES := src tests benchmarks docs/_hooks examples
# kronfluence would pull torchvision and another torch; it needs only these and works with ours.
NO_DEPS := kronfluence einconv einops opt-einsum

# Linux without an NVIDIA driver: 200 MB instead of 3 GB of CUDA libraries. Where pip has an index of its own, that one decides.
CPU_TORCH := $(shell [ "$$(uname)" != Linux ] || command -v nvidia-smi >/dev/null || [ -n "$$PIP_INDEX_URL" ] || $(PYTHON) -m pip config list 2>/dev/null | grep -q index-url || echo --timeout 20 --retries 1 --index-url https://download.pytorch.org/whl/cpu)

.PHONY: help demo test quick browser lint docs bench bench-check clean
help:
	@echo "make demo    create .venv, install, run the embedded demo"
	@echo "make test    create .venv, install everything, lint, type-check and run all tests"
	@echo "make quick   the tests that take seconds"
	@echo "make docs    build the documentation into build/site; a broken link fails"
	@echo "make bench   run every benchmark and rewrite docs/benchmarks.md"
	@echo "make bench-check   run the benchmarks of the engine and the loop, fail where a ratio misses its target"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

# Stamps, so that installing happens once per change of the files that say what to install.
$(VENV)/.core: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing torch$(if $(CPU_TORCH), (the CPU build: no NVIDIA driver here),)"
	$(if $(CPU_TORCH),$(BIN)/pip install --quiet -c constraints.txt $(CPU_TORCH) torch==2.13.0 ||) \
	  $(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e .
	@touch $@

$(VENV)/.full: $(VENV)/.core
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	$(BIN)/pip install --quiet -c constraints.txt --no-deps $(NO_DEPS)
	@touch $@

demo: $(VENV)/.core
	$(BIN)/gradtrace train

# Whole files side by side, one thread each. One more than there are cores, at most four: some tests wait.
WORKERS := $(shell $(PYTHON) -c "import os; print(min(4, (os.cpu_count() or 1) + 1))")
test: $(VENV)/.full lint docs browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 12

# The viewer's tests drive a real browser; without one, and without the means to get one, the others run.
browser: $(VENV)/.full
	@$(BIN)/python scripts/get_browser

quick: $(VENV)/.full
	$(BIN)/pytest -m "not slow"

lint: $(VENV)/.full
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	@if ! command -v npm >/dev/null; then echo "lint: npm is not installed, so the viewer's JavaScript was not checked"; \
	elif [ node_modules/.package-lock.json -nt package.json ] || npm install --no-package-lock --no-fund --no-audit --loglevel error; then npm run --silent check; \
	else echo "lint: npm could not install its checkers (see above), so the viewer's JavaScript was not checked"; fi

docs: $(VENV)/.full
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(VENV)/.full
	$(BIN)/python -m benchmarks

bench-check: $(VENV)/.full
	$(BIN)/python -m benchmarks --check solvers capture rollout trainer trace_overhead roofline \
	  peers.kronfluence_scores peers.bergson_scores

clean:
	rm -rf $(VENV) build dist src/*.egg-info
