# Everything works in a fresh clone on a machine that has Python >= 3.11 and make, nothing else.
# Each target makes .venv by itself and installs only what it needs; pip runs again only when pyproject.toml changed.
#
#   make demo   [ARGS="--supercell 3 --plot dos.png"]   the main job, on real input
#   make test   [ARGS="tests/cases -k F4"]              the tests
#   make lint                                           ruff (style, format) and mypy --strict
#   make bench  [ARGS="unchanged_argument"]             the figures, beside raw costs and beside peers
#   make clean                                          removes .venv and caches

VENV := .venv
BIN := $(VENV)/bin
# The first interpreter that is new enough; `make PYTHON=...` overrides.
PYTHON ?= $(shell for p in python3 python python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-demo
	$(BIN)/onehop demo $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-test $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-demo $(VENV)/.tried-bench
	$(BIN)/python -m benchmarks $(ARGS)

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "onehop needs Python 3.11 or newer, and none was found; try: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-%: pyproject.toml | $(VENV)/.made
	$(PIP) -e '.[$*]'
	@touch $@

# The peers are only there to be compared with: without them the figures of onehop are still printed.
$(VENV)/.tried-bench: pyproject.toml | $(VENV)/.made
	$(PIP) -e '.[bench]' || echo "some peers could not be installed; their columns stay empty"
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
