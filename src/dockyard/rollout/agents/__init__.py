"""Harbor's agents: what each one needs, and how it is connected to the gateway."""
