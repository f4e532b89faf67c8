"""Training: the loop, the policy's weights, and what a run leaves behind."""
