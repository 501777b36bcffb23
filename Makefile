# SGLang with the attention backend kdtree_mla. `make help` lists the targets; README.md says more.
PYTHON ?= python3
PORT ?= 30000
PROMPT ?= import os
SERVE_FLAGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
REQUIREMENTS := python/requirements-cpu.txt python/requirements-dev.txt
DISTRIBUTIONS := python sgl-kernel kdtree

.PHONY: help serve ask test test-long sanitize resources lint vendor kernels install wheel wheel-cuda bench clean-vendor clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

serve: install ## set up, then serve the tiny model on the CPU (PORT, SERVE_FLAGS)
	@$(PY) test/server.py serve --port $(PORT) $(SERVE_FLAGS)

ask: $(VENV)/.deps ## print a completion of the running server (PROMPT, PORT)
	@$(PY) test/server.py ask "$$PROMPT" --port $(PORT)
export PROMPT

test: install ## set up, then run the tests (under 30 minutes on two cores)
	@$(PY) -m pytest test -m "not long" $(TEST_FLAGS)

test-long: install ## the tests that take long
	@$(PY) -m pytest test -m long $(TEST_FLAGS)

sanitize: install ## on a GPU: compute-sanitizer over the verify kernel's reduced tests
	@for tool in memcheck racecheck; do compute-sanitizer --tool $$tool --error-exitcode 1 \
		$(PY) -m pytest test/sgl_kernel/test_mla_verify_cuda.py -q -m sanitize || exit 1; done

resources: kernels ## registers, spills and shared memory of the sm_120a kernels
	@$(PY) sgl-kernel/kernel_resources.py

lint: $(VENV)/.deps ## ruff, isort, codespell, clang-format
	@$(VENV)/bin/pre-commit run --all-files

vendor: $(VENV)/.deps ## lay out the locked upstream wheels
	@$(PY) python/vendor.py

kernels: vendor ## build the kernel library into the vendored sgl_kernel package (incremental)
	@$(PY) sgl-kernel/build_kernels.py

install: kernels $(VENV)/.installed ## install the fork into .venv, editable

wheel: kernels ## build the wheels into dist/
	@$(PY) python/build_wheels.py

wheel-cuda: kernels ## build the kernel wheel for GPUs into dist/cuda/
	@$(PY) python/build_wheels.py --cuda

bench: install ## the CPU benchmark of the verify attention
	@$(PY) benchmark/bench_verify_attention.py --device cpu

clean-vendor: ## remove the vendored trees
	@$(PYTHON) python/vendor.py --remove

clean: clean-vendor ## remove everything that was built
	@rm -rf $(VENV) dist sgl-kernel/build .cache

$(VENV)/.deps: $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.version_info[:2] in ((3, 11), (3, 12)) or sys.exit("setup: PYTHON must be CPython 3.11 or 3.12, is " + sys.version.split()[0])'
	@test -x $(PY) || { echo "setup: creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: installing $$(cat $(REQUIREMENTS) | grep -c ==) locked packages (torch alone is 6 GB unpacked; some minutes)"
	@$(PIP) install --quiet --no-deps $(addprefix -r ,$(REQUIREMENTS))
	@touch $@

$(VENV)/.installed: $(VENV)/.deps $(addsuffix /pyproject.toml,$(DISTRIBUTIONS))
	@echo "setup: installing the fork"
	@$(PIP) install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat $(addprefix -e ./,$(DISTRIBUTIONS))
	@touch $@
