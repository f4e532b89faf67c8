"""Harbor's agents: what each needs, and how each reaches the gateway."""
