"""What `bench/gateway.py` runs: agents in the manner of qwen-code, and the servers they talk to."""
