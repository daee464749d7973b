# Set-up and checks. Needs make and a Python of 3.11 or newer; all else goes into .venv.

BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DELETE_ON_ERROR:
.PHONY: demo test lint types imports pytest soak bench clean

# Trains on two emulated slices of eight chips, and shows the job's log until it ends.
demo: .venv/.examples
	@pw job submit --name digits --compute-type v6e-8 --num-slices 2 --replace --follow -- python examples/train_digits.py

# All that CI runs, within ten minutes on two cores.
test: lint types imports pytest

lint: .venv/.dev
	ruff check .
	ruff format --check .

types: .venv/.dev
	mypy

imports: .venv/.dev
	lint-imports

# One process a core, of the two that CI has; each has an emulator of its own.
pytest: .venv/.dev
	pytest -q -n 2 --dist worksteal

# What takes longer than a change can wait for.
soak: .venv/.dev
	pytest -q -m soak

bench: .venv/.dev
	@for each in benchmarks/*.py; do echo "== $$each"; python "$$each" || exit 1; done

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# A stamp for each set of extras: pip runs again only when pyproject.toml has changed.
.venv/.%: pyproject.toml | .venv/.python
	python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

.venv/.python:
	@for python in python3.13 python3.12 python3.11 python3; do \
	  if $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    $$python -m venv .venv && touch $@ && exit 0; exit 1; \
	  fi; \
	done; \
	echo "error: no Python of 3.11 or newer with venv in PATH: want python3.13, python3.12, python3.11 or python3" >&2; \
	exit 1
