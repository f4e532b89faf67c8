"""The `sandbox` environment: bubblewrap under Harbor. No daemon, no image, no root, up in milliseconds.

A task sees the tools of the host's /usr, read-only, and private folders in memory; nothing else of the host and no
network. Import paths instead of classes, so that importing this costs nothing of Harbor.
"""

ENVIRONMENT = "dockyard.rollout.sandbox.environment:SandboxEnvironment"
"""For Harbor's `environment.import_path`."""
