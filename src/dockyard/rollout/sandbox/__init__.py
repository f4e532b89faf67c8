"""The `sandbox` environment for Harbor: no daemon, no image, no root, starts in milliseconds.

A task sees the tools of the host's /usr, read-only, and private folders; nothing else of the host, and no network.
There are two mechanisms: bubblewrap with namespaces, and Landlock where a machine forbids namespaces. `check` chooses
one, `launch` starts it, `client` is the driver's side of a running sandbox, `server` and `file_ops` run inside.
"""

ENVIRONMENT = "dockyard.rollout.sandbox.environment:SandboxEnvironment"
"""For Harbor's `environment.import_path`."""
