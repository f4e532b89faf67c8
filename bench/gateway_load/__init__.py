"""The parts of `bench/gateway.py`: agents that imitate qwen-code, and the servers they call."""
