"""What is told to Harbor and what it imports: no telemetry, no price list fetched on import."""

import os

QUIET = {"HARBOR_TELEMETRY": "off", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def hush() -> None:
    """Unless the user has said otherwise."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
