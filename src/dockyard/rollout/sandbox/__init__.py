"""The `sandbox` environment under Harbor. No daemon, no image, no root, up in milliseconds.

A task sees the tools of the host's /usr, read-only, and private folders; nothing else of the host and no network. There
are two mechanisms: `bwrap` with namespaces, and `confined` where a machine forbids those. `check` chooses, `client` is
the driver's side of a running sandbox, `server` and `file_ops` run inside. Import paths instead of classes, so that
importing this costs nothing of Harbor.
"""

ENVIRONMENT = "dockyard.rollout.sandbox.environment:SandboxEnvironment"
"""For Harbor's `environment.import_path`."""
