# make         set up and run the whole pipeline on the example
# make test    install what tests and docs need, lint, check types, run the tests
# make quick   the tests that start no process, in less than a minute
# make docs    build the documentation as a site, in build/site
# make BACKEND=cuda13 (or cuda12)   the same on a machine with an NVIDIA GPU

.DELETE_ON_ERROR:
.PHONY: run test quick lint docs bench setup clean

BACKENDS := cpu cuda12 cuda13 metal
# The backend that is installed already, else the one for this system.
BACKEND ?= $(or $(patsubst .venv/.installed-%,%,$(firstword $(wildcard .venv/.installed-*))),$\
                $(if $(filter Linux,$(shell uname -s)),cpu,metal))
ifeq (,$(filter $(BACKEND),$(BACKENDS)))
$(error BACKEND is one of $(BACKENDS), not '$(BACKEND)')
endif
CALLERS := $(VIRTUAL_ENV)
BIN     := $(CURDIR)/.venv/bin
STAMP   := .venv/.installed-$(BACKEND)
DEV     := .venv/.dev
# A stamp holds the folder that the environment was made in: moved elsewhere, or without its Python, nothing starts.
ifneq ($(CURDIR),$(shell .venv/bin/python -c '' 2>/dev/null && cat $(STAMP) 2>/dev/null))
.PHONY: $(STAMP) $(DEV)
endif
# For what the tools start themselves. The recipes name their tools by path: make 3.81, which macOS has, looks a simple
# line's program up in the PATH that it was started with.
export PATH := $(BIN):$(PATH)
export VIRTUAL_ENV := $(CURDIR)/.venv
unexport PYTHONPATH PYTHONHOME

run: $(STAMP)
	@$(if $(CALLERS),,env -u VIRTUAL_ENV) "$(BIN)/safetrain" run

test: lint
	@"$(BIN)/python" -m pytest

quick: $(DEV)
	@"$(BIN)/python" -m pytest --quick

lint: docs
	@"$(BIN)/ruff" check
	@"$(BIN)/ruff" format --check
	@"$(BIN)/mypy" --platform linux --cache-dir .mypy_cache/linux
	@"$(BIN)/mypy" --platform darwin --cache-dir .mypy_cache/darwin

docs: $(DEV)
	@"$(BIN)/python" -m tools.docs_site

bench: $(DEV)
	@for file in benchmarks/bench_*.py; do "$(BIN)/python" -m benchmarks.$$(basename $$file .py) || exit 1; done

setup: $(STAMP)

clean:
	rm -rf .venv build .cache .pytest_cache .ruff_cache .mypy_cache

$(STAMP): pyproject.toml constraints.txt tools/setup.sh | .git
	@sh tools/setup.sh $(BACKEND)

$(DEV): $(STAMP)
	@sh tools/setup.sh $(BACKEND) dev

.git:
	@echo "This folder is not a Git repository (a downloaded ZIP?), and DVC needs one. Run:" >&2
	@echo "  git init && git add -A && git -c user.name=me -c user.email=me@localhost commit -qm start" >&2
	@exit 1
