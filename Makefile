# The commands of the README. Each installs what it needs into .venv by itself (a second run finds it there at once).
# Another Python: make test PYTHON=python3.12. Options of the recipe: make quickstart ARGS="--seed 1 --run runs/second"

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
S3_SERVER := $(VENV)/s3/bin/moto_server
RAY := $(VENV)/ray/bin/ray
MKDOCS := $(VENV)/docs/bin/mkdocs
LLAMA := $(VENV)/llama/bin/python
# `make test-all` empties it. It leaves out the tests that are marked long (tests/conftest.py).
TEST_OPTIONS ?= --short
# Containers often set PYTHONDONTWRITEBYTECODE: each of hundreds of processes would compile ttrl again.
TEST_VARIABLES := PYTHONDONTWRITEBYTECODE= TTRL_TEST_MOTO_SERVER=$(abspath $(S3_SERVER))

.PHONY: help install quickstart quickstart-tiny test test-all test-quick test-e2e test-cluster bench lint types audit docs docs-serve clean

help:
	@echo "make quickstart   train a real chat model of 135M parameters to answer in JSON (6 to 12 minutes on 2 cores)"
	@echo "make quickstart-tiny  the same with a model of a million parameters, from nothing (about 5 minutes)"
	@echo "make test         the tests that a change has to pass (about 15 minutes on 2 cores)"
	@echo "make test-quick   those without servers and trainers (half of that time)"
	@echo "make test-all     every test that this machine can run (more than an hour)"
	@echo "make bench        the benchmarks in tools/"
	@echo "make lint         ruff, who may import whom, and limits of style"
	@echo "make types        mypy, strict, over ttrl/"
	@echo "make audit        known faults of the tested versions (asks pypi.org), and what bandit finds in the code"
	@echo "make docs         the documentation as a site, in build/site (open index.html; no network needed)"
	@echo "make docs-serve   the same at 127.0.0.1:8000, made again at each change"
	@echo "make install      only .venv; then: $(VENV)/bin/ttrl doctor"
	@echo "make clean        remove .venv and caches; run folders stay"

install:
	@$(PYTHON) tools/install.py $(VENV)

quickstart: install
	$(RUN) -m ttrl.cli quickstart $(ARGS)

quickstart-tiny: install
	$(RUN) -m ttrl.cli quickstart --tiny $(ARGS)

# Tests on a cluster mostly wait, so they run at the same time as those with servers.
test: test-quick
	@echo "Tests with servers and tests on a cluster run side by side; each prints at its end."
	@$(MAKE) --no-print-directory --jobs=2 --output-sync test-e2e test-cluster

# The site's tests search what mkdocs builds; those of exports ask a real llama.cpp.
test-all: $(MKDOCS) $(LLAMA)
	@$(MAKE) --no-print-directory test TEST_OPTIONS= TTRL_TEST_LLAMA_PYTHON=$(abspath $(LLAMA))

test-e2e: install $(S3_SERVER)
	$(TEST_VARIABLES) $(RUN) -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m e2e \
	  $(TEST_OPTIONS) $(E2E_OPTIONS) \
	  $$(grep --recursive --files-with-matches --include='test_*.py' mark.e2e tests | grep --invert-match tests/cluster)

test-cluster: $(RAY)
	$(TEST_VARIABLES) $(VENV)/ray/bin/python -m pytest tests/cluster $(TEST_OPTIONS) $(E2E_OPTIONS)

# Their models are so small that a second thread waits, in a loop, longer than it computes.
test-quick: install $(S3_SERVER)
	$(TEST_VARIABLES) OMP_NUM_THREADS=1 $(RUN) -m pytest -n 3 --dist worksteal -m "not e2e" $(TEST_OPTIONS)

# For the tests of cache and mirror; botocore and ttrl cannot share an environment (see tests/s3_server.txt).
$(S3_SERVER): tests/s3_server.txt | install
	$(PYTHON) -m venv $(VENV)/s3
	$(VENV)/s3/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# Over the other one, as Ray's command "tune" would replace torchtune's there.
$(RAY): tests/ray.txt | install
	$(PYTHON) -m venv $(VENV)/ray
	echo "import site; site.addsitedir('$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > "$$($(VENV)/ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ttrl.pth"
	$(VENV)/ray/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(LLAMA): tests/llama.txt
	$(PYTHON) -m venv $(VENV)/llama
	$(VENV)/llama/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch -h $@

bench: install
	@for script in $(wildcard tools/bench_*.py); do echo "== $$script"; $(RUN) "$$script" || exit 1; done

types: install
	$(RUN) -m mypy

lint: install
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(RUN) tools/check_style.py

audit: $(VENV)/audit/bin/pip-audit
	$(VENV)/audit/bin/bandit --quiet --configfile pyproject.toml --recursive ttrl recipes tools
	$(VENV)/audit/bin/pip-audit --disable-pip --no-deps --requirement ttrl/tested_versions.txt

$(VENV)/audit/bin/pip-audit:
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check bandit==1.9.4 pip-audit==2.10.1

# A warning is an error: a dead link, a missing anchor, a name without a docstring.
docs: $(MKDOCS)
	NO_MKDOCS_2_WARNING=1 $< build --strict

docs-serve: $(MKDOCS)
	$< serve --dev-addr 127.0.0.1:8000

# In an environment of its own: it needs nothing of ttrl's, as docstrings are read without an import.
$(MKDOCS): tools/site/packages.txt
	$(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
