"""What we add to a task's compose files. It comes before the task's own file, which so has the last word."""

from dataclasses import dataclass
from typing import Any

PRIVATE = ("/tests", "/logs/verifier")
"""Volumes of their own: a mount point can be neither replaced by a link nor filled through the container's disk."""
SLEEP = ("sh", "-c", "exec sleep infinity")  # a child named `sleep` could be killed, and the container with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """One trial's additions."""

    labels: dict[str, str]
    image: str | None
    """None: the task's compose file says."""
    network: str | None
    """A network of ours, or `none`, or the engine's `bridge`. None: whatever the task and Harbor arrange."""
    max_processes: int
    resolves: bool = True
    """Whether names can be looked up at all. Where not, each try would take ten seconds to fail."""
    private: tuple[str, ...] = PRIVATE

    def compose(self) -> dict[str, Any]:
        main: dict[str, Any] = {
            "labels": self.labels,
            "stop_grace_period": "0s",  # PID 1 is a shell, which takes no notice of being asked to stop
            "volumes": [{"type": "volume", "target": target} for target in self.private],
        }
        if self.image is None:
            return {"services": {"main": main}}
        main |= {
            "image": self.image,
            "command": list(SLEEP),
            "pull_policy": "never",
            "pids_limit": self.max_processes,
        }
        if not self.resolves:
            main["dns_opt"] = ["timeout:1", "attempts:1"]
        compose: dict[str, Any] = {"services": {"main": main}}
        if self.network in ("none", "bridge"):
            main["network_mode"] = self.network
        elif self.network:
            compose["networks"] = {"default": {"name": self.network, "external": True}}
        return compose
