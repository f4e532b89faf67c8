"""The `docker` environment: Harbor's own, with faster starts and stops, a seal, and complete removal."""
