# Every target sets up what it needs in a virtual environment, and updates it when pyproject.toml changes. It is .venv for
# python3; for another Python, as in `make test PYTHON=python3.13` or with a path, it is .venv-3.13. Packages are installed
# by uv if it is found, and by pip otherwise.

# Let Python cache compiled modules even if this is turned off: all workers and notebooks import the same ones.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d%s" % (*sys.version_info[:2], sys.abiflags))' 2>/dev/null)
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(VERSION))
RUN := $(VENV)/bin/python
# From jax 0.11.1 on, XLA takes twice as long to compile a small program for a CPU, and the tests compile thousands.
# `make test-versions` runs the tests that depend on the version with the newest jax.
JAX := 'jax<0.11.1; python_version < "3.15"'
# This takes a while, so progress is shown. Python compiles modules on import; compiling all of them would take longer
# than everything else.
PIP := $(RUN) -m pip --disable-pip-version-check install --no-compile $(JAX)
INSTALL := $(if $(shell command -v uv),uv pip install --python $(RUN) $(JAX),$(PIP))

.PHONY: tables demo test test-thorough test-avx2 test-costs test-peers test-versions bench bench-device evidence example example-experts example-speech docs notebooks dist lint format clean

demo: $(VENV)/demo.stamp
	@$(RUN) -m reparax.demo

# Comparisons with torch are a separate target: importing torch takes longer than all other imports. The tests of evidence
# and examples are all thorough, so the quick tests do not import what those need.
QUICK := -m "not thorough" --ignore=tests/peers --ignore=tests/evidence --ignore=tests/examples
test: $(VENV)/test.stamp
	$(RUN) -m pytest -q -n auto --dist loadgroup $(QUICK)

# The tests that `make test` leaves out: grids over all stages, shapes and libraries.
test-thorough: $(VENV)/test.stamp
	$(RUN) -m pytest -q -n auto --dist loadgroup -m thorough --ignore=tests/peers

# The quick tests of sums, square roots and roundings, compiled for an older processor, where two programs may differ in the
# last bit. AVX2 is the oldest instruction set for which XLA compiles float16.
NUMERIC := $(addprefix stages/,adapters matrices noise norms numbers quantized) \
  $(addprefix numerics/test_,linalg.py select.py terms.py threefry.py) \
  $(addprefix transforms/test_,attacks.py contexts.py local.py) training/test_transfer.py
test-avx2: $(VENV)/test.stamp
	XLA_FLAGS="$(XLA_FLAGS) --xla_cpu_max_isa=AVX2" $(RUN) -m pytest -q -n auto --dist loadgroup -m "not thorough" \
	  $(NUMERIC:%=tests/%)

# The time that each test file takes.
test-costs: $(VENV)/test.stamp
	PYTHONPATH=tests $(RUN) -m pytest -q -p costs -n auto --dist loadgroup $(QUICK)

test-peers: $(VENV)/peers.stamp
	$(RUN) -m pytest -q -n auto --dist loadgroup tests/peers

# The tests that depend on JAX's version, with the oldest and the newest JAX, on each Python that is found.
test-versions:
	.ci/versions

bench: $(VENV)/bench.stamp
	$(RUN) benchmarks

# Only the benchmarks that depend on the device, for a machine that is available for minutes.
bench-device: $(VENV)/bench.stamp
	$(RUN) benchmarks memory draws peers overhead steps rnn_blocks noisy_product

# Results on file are not computed again: to do so, delete a file in benchmarks/evidence/results, or run the module with
# --again.
evidence: $(VENV)/evidence.stamp
	$(RUN) -m benchmarks.evidence

# Downloads a language model of 93 MB once, talks to it, fine-tunes it, and exports it.
example: $(VENV)/examples.stamp
	$(RUN) -m examples.smollm

# Trains a small mixture of experts, fine-tunes it, exports it, and rounds and prunes it.
example-experts: $(VENV)/examples.stamp
	$(RUN) -m examples.experts

# Synthesizes speech, and trains recognizers with and without noise in their weights.
example-speech: $(VENV)/speech.stamp
	$(RUN) -m examples.speech

docs: $(VENV)/docs.stamp
	$(RUN) -m sphinx -E -W --keep-going -j auto docs docs/_build/html
	$(RUN) -m pytest -q -rs -o addopts= -n auto --dist worksteal tests/site
	@echo 'The home page is docs/_build/html/index.html.'

# Writes the tables, the charts and the picture of Quickstart into the pages.
tables: $(VENV)/test.stamp
	$(RUN) -m cogapp -r -I docs -I . README.md docs/*.md docs/api/index.md
	PYTHONPATH=. $(RUN) docs/pictures/draw.py

# The script merges the streams of an output: if Sphinx did, a page would show an output in two parts twice.
notebooks: $(VENV)/docs.stamp
	$(RUN) -m sphinx -E -W --keep-going -j auto -b dummy -D nb_merge_streams=0 docs docs/_build/dummy
	$(RUN) notebooks

# Builds what could be published, and checks it; nothing is uploaded.
dist: $(VENV)/dist.stamp
	rm -rf dist
	$(RUN) -m build
	$(RUN) -m twine check --strict dist/*
	$(RUN) -m pytest -q -rs -o addopts= -n auto --dist worksteal tests/dist

lint: $(VENV)/lint.stamp
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m pyright --pythonpath $(RUN)
	$(RUN) -m mypy --python-executable $(RUN)

format: $(VENV)/lint.stamp
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

clean:
	rm -rf .venv .venv-*

$(RUN):
	@$(if $(VERSION),:,echo "There is no Python called '$(PYTHON)' here; name one with: make PYTHON=python3.12 ..."; exit 1)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "reparax needs Python 3.11 or newer, and '$(PYTHON)' is $(VERSION); name one with: make PYTHON=python3.12 ..."; \
	  exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON)' has no working venv; on Debian: apt-get install python$(VERSION)-venv"; exit 1; }

$(VENV)/%.stamp: pyproject.toml | $(RUN)
	@echo "Installing what 'make $*' needs, into $(VENV):"
	$(INSTALL) -e '.[$*]'
	@touch $@

# The demo is the first impression of reparax, so pip's output is shown only if it fails.
$(VENV)/demo.stamp: pyproject.toml | $(RUN)
	@echo "Installing what the demo needs, into $(VENV): JAX, optax, scikit-learn and matplotlib."
	@$(INSTALL) -e '.[demo]' > $(VENV)/demo.log 2>&1 || { cat $(VENV)/demo.log; exit 1; }
	@touch $@

# Type checking needs the packages that the demo and the tests import.
$(VENV)/lint.stamp: pyproject.toml | $(RUN)
	$(INSTALL) -e '.[lint,test]'
	@touch $@

# torch is installed by pip, the rest of the test suite as above.
$(VENV)/peers.stamp $(VENV)/bench.stamp: $(VENV)/%.stamp: pyproject.toml $(VENV)/test.stamp | $(RUN)
	$(PIP) -e '.[$*]'
	@touch $@
