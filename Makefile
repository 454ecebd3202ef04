# Every target does all its own set-up: a virtual environment, made anew when pyproject.toml changes. It is .venv for
# python3, and for another Python, as in `make test PYTHON=python3.13` or a path, .venv-3.13 beside it. uv is used where it
# is found, pip otherwise.

# Python keeps what it compiles of modules, also where this is turned off: all workers and all notebooks import the same.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d%s" % (*sys.version_info[:2], sys.abiflags))' 2>/dev/null)
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(VERSION))
RUN := $(VENV)/bin/python
# XLA of jax 0.11.1 and newer takes twice as long to compile a small program for a CPU, and the tests compile thousands.
# `make test-versions` runs those that depend on the version on the newest.
JAX := 'jax<0.11.1; python_version < "3.15"'
# Progress is shown, as this takes a while. Python compiles what it imports; to compile all takes longer than the rest.
PIP := $(RUN) -m pip --disable-pip-version-check install --no-compile $(JAX)
INSTALL := $(if $(shell command -v uv),uv pip install --python $(RUN) $(JAX),$(PIP))

.PHONY: tables demo test test-thorough test-avx2 test-costs test-peers test-versions bench bench-device evidence example example-experts example-speech docs notebooks dist lint format clean

demo: $(VENV)/demo.stamp
	@$(RUN) -m reparax.demo

# Comparisons with torch have a part of their own: to import it takes longer than all else that is imported. Those of
# evidence and of examples are all thorough, so the quick ones need not import what they measure with and draw.
QUICK := -m "not thorough" --ignore=tests/peers --ignore=tests/evidence --ignore=tests/examples
test: $(VENV)/test.stamp
	$(RUN) -m pytest -q -n auto --dist loadgroup $(QUICK)

# What `make test` leaves out: grids over all stages, shapes and libraries.
test-thorough: $(VENV)/test.stamp
	$(RUN) -m pytest -q -n auto --dist loadgroup -m thorough --ignore=tests/peers

# The quick tests whose numbers come from sums, square roots and roundings, as another processor rounds them: two programs
# may differ in the last bit there. XLA compiles float16 from this instruction set on.
NUMERIC := $(addprefix stages/,adapters matrices noise norms numbers quantized) $(addprefix numerics/test_,select.py terms.py) \
  $(addprefix transforms/test_,attacks.py contexts.py local.py) training/test_transfer.py
test-avx2: $(VENV)/test.stamp
	XLA_FLAGS="$(XLA_FLAGS) --xla_cpu_max_isa=AVX2" $(RUN) -m pytest -q -n auto --dist loadgroup -m "not thorough" \
	  $(NUMERIC:%=tests/%)

# What each file costs.
test-costs: $(VENV)/test.stamp
	PYTHONPATH=tests $(RUN) -m pytest -q -p costs -n auto --dist loadgroup $(QUICK)

test-peers: $(VENV)/peers.stamp
	$(RUN) -m pytest -q -n auto --dist loadgroup tests/peers

# What depends on the version of JAX, on the oldest and on the newest, on the Pythons that are found.
test-versions:
	.ci/versions

bench: $(VENV)/bench.stamp
	$(RUN) benchmarks

# What depends on the device, for a machine that is lent for minutes.
bench-device: $(VENV)/bench.stamp
	$(RUN) benchmarks memory draws peers overhead steps rnn_blocks noisy_product

# What is on file is not run again: delete a file of benchmarks/evidence/results, or run the module with --again.
evidence: $(VENV)/evidence.stamp
	$(RUN) -m benchmarks.evidence

# A language model of 93 MB, which is downloaded once: spoken with, tuned, and written for other programs.
example: $(VENV)/examples.stamp
	$(RUN) -m examples.smollm

# A small mixture of experts, which is trained here: tuned, written for other programs, rounded and pruned.
example-experts: $(VENV)/examples.stamp
	$(RUN) -m examples.experts

# Speech that is made here, and recognizers of it, without noise in their weights and with it.
example-speech: $(VENV)/speech.stamp
	$(RUN) -m examples.speech

docs: $(VENV)/docs.stamp
	$(RUN) -m sphinx -E -W --keep-going -j auto docs docs/_build/html
	$(RUN) -m pytest -q -rs -o addopts= -n auto --dist worksteal tests/site
	@echo 'The home page is docs/_build/html/index.html.'

# The tables, charts and the picture of Quickstart that pages show.
tables: $(VENV)/test.stamp
	$(RUN) -m cogapp -r -I docs -I . README.md docs/*.md docs/api/index.md
	PYTHONPATH=. $(RUN) docs/pictures/draw.py

# Merging streams is left to the script: where a page is written too, it says twice what comes in two parts.
notebooks: $(VENV)/docs.stamp
	$(RUN) -m sphinx -E -W --keep-going -j auto -b dummy -D nb_merge_streams=0 docs docs/_build/dummy
	$(RUN) notebooks

# What could be published: nothing is sent anywhere.
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

# The demo is the first that one sees of reparax, so pip is heard only if it fails.
$(VENV)/demo.stamp: pyproject.toml | $(RUN)
	@echo "Installing what the demo needs, into $(VENV): JAX, optax, scikit-learn and matplotlib."
	@$(INSTALL) -e '.[demo]' > $(VENV)/demo.log 2>&1 || { cat $(VENV)/demo.log; exit 1; }
	@touch $@

# Type checking reads what the demo and the tests import.
$(VENV)/lint.stamp: pyproject.toml | $(RUN)
	$(INSTALL) -e '.[lint,test]'
	@touch $@

# torch comes by pip alone, the other tools of the test suite as above.
$(VENV)/peers.stamp $(VENV)/bench.stamp: $(VENV)/%.stamp: pyproject.toml $(VENV)/test.stamp | $(RUN)
	$(PIP) -e '.[$*]'
	@touch $@
