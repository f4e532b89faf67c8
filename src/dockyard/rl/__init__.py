"""How rewards become a loss: pure functions, no I/O."""
