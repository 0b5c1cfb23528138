# Everything a fresh machine needs is made here: `make demo` and `make test` set up the virtual environment themselves.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
STAMP := .venv/.installed
CLUSTER_STAMP := .venv/.installed-for-clusters

.PHONY: install demo demo-processes demo-tools test test-all lint bench clean

install: $(STAMP)

# Torch comes first and alone, in the version the constraints were made with: resolved together with the rest, pip takes
# the newest one. Where your index has builds with and without CUDA, TORCH_INDEX=url chooses the index to take it from.
$(STAMP): pyproject.toml requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; call make PYTHON=/path/to/python"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) install -c requirements/constraints.txt -e '.[dev]'
	touch $@

# What the data planes of clusters need, for the tests with the real systems. Nothing that `install` has brought changes:
# the constraints hold for all of it.
$(CLUSTER_STAMP): $(STAMP)
	$(PIP) install -c requirements/constraints.txt -e '.[dev,transfer-queue,mooncake]'
	touch $@

# SET="key=value ..." changes settings of the demos.
demo: install
	$(PY) examples/demo/demo.py $(SET)

# The same run with two engines and the trainer in separate processes, and rows in memory that processes share.
PROCESSES := run_dir=runs/demo-processes rollout.engine.ranks=2 runtime.engine_process=true \
	runtime.trainer_process=true data_plane.adapter=shm

demo-processes: install
	$(PY) examples/demo/demo.py $(PROCESSES) $(SET)

demo-tools: install
	$(PY) examples/tools/demo.py $(SET)

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Two at a time, on two cores; whoever is through first takes over from the other.
test: lint
	$(PY) -m pytest tests -m "not long" -n 2 --dist worksteal

# Real processes that are killed again and again, and the like: seconds to minutes each. Triton, a gigabyte that builds of
# torch with CUDA bring along, is for the GPU kernels' tests under its interpreter. Mooncake needs native libraries, which
# only root can install.
test-all: install $(CLUSTER_STAMP)
	@packages="$$($(PY) -m penstock.data_plane.adapters.mooncake.libraries)"; \
	if [ -z "$$packages" ]; then exit 0; fi; \
	{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends $$packages >/dev/null; } || \
		echo "Mooncake's tests are skipped until somebody runs: apt-get install $$packages"
	@$(PY) -c 'import triton' 2>/dev/null || $(PIP) install --no-deps triton==3.9.0 || \
		echo "Triton cannot be had here: the kernels' tests under its interpreter are skipped"
	$(PY) -m pytest tests -m long -n 2 --dist worksteal

bench: install
	@for script in benchmarks/*.py; do echo "== $$script"; $(PY) $$script --quick || exit 1; done

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
