"""Where a run's environments are, as trials and the gateway need to know it."""

# pyright: reportMissingTypeStubs=false

from dataclasses import dataclass

from harbor import TrialEnvironmentConfig

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One kind of environment, ready for trials."""

    environment: TrialEnvironmentConfig
    """What every trial gets."""
    listen: tuple[str, ...] = (LOOPBACK,)
    """Addresses of this machine where the gateway listens, loopback first."""
    host: str | None = None
    """The gateway's host as agents inside see it. None: they cannot reach this machine."""
