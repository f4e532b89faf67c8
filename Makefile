# `make demo` and `make test` need Python, pip and git, and fetch everything else into this folder.

VENV := $(or $(UV_PROJECT_ENVIRONMENT),.venv)
BIN := $(VENV)/bin
ARGS ?=

# Without bytecode every process would compile the thousands of files it imports: 15 s for one that trains.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test soak check bench clean dev
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: ## train a small model on this CPU and watch it learn (ARGS="--seed 1" passes settings on)
	@sh tools/install.sh demo
	$(BIN)/dockyard train configs/demo.toml --overwrite $(ARGS)

test: dev ## run the tests this machine can run (ONLY="unit torch" picks groups, INSTALL=1 allows system packages)
	@$(BIN)/python tools/run_tests.py

soak: dev ## the same claims over many more repetitions; takes half an hour
	@DOCKYARD_HISTORIES=50000 DOCKYARD_FUZZ=4000 $(BIN)/python tools/run_tests.py soak

check: dev ## lint, format, types and import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest --quiet tests/unit/test_imports.py

bench: dev ## run the benchmarks that need no GPU, no vLLM and no Docker; each prints one table
	@set -e; for bench in bench/engine.py bench/agents.py bench/gateway.py bench/convert.py; do echo "$$bench"; $(BIN)/python "$$bench" $(ARGS); done

clean: ## remove what was installed or built; runs stay
	@sh tools/install-docker.sh --stop
	rm -rf .venv .tools .cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +

dev:
	@sh tools/install.sh dev
