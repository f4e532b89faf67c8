"""Labels that say whose a container or network is, so that a later run can tell what nobody will remove any more."""

import os
import socket
from dataclasses import astuple, dataclass
from pathlib import Path

OWNER_LABEL = "dockyard.owner"
RUN_LABEL = "dockyard.run"
PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"
_UNKNOWN = "-"  # where there is no /proc
_SEPARATOR = "|"


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from any other that ever had its number."""

    host: str
    boot: str
    namespace: str
    """Process numbers mean something only within one."""
    pid: str
    started: str

    @classmethod
    def current(cls) -> "Owner":
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "Owner":
        return cls(socket.gethostname(), _boot(), _namespace(), str(pid), _start_time(pid))

    @classmethod
    def parse(cls, label: str) -> "Owner | None":
        """None for what we did not write."""
        parts = label.split(_SEPARATOR)
        return cls(*parts) if len(parts) == 5 and parts[3].isdigit() else None

    @property
    def label(self) -> str:
        return _SEPARATOR.join(astuple(self))

    def is_gone(self) -> bool:
        """Certainly ended. False for owners on other hosts, of whom nothing is known here."""
        if self.host != socket.gethostname():
            return False
        if self.boot != _boot():
            return True
        if self.namespace != _namespace():
            return False
        if self.started == _UNKNOWN:
            return not _is_alive(int(self.pid))
        return _start_time(int(self.pid)) != self.started


def owner_labels(run: str) -> dict[str, str]:
    """For everything a run makes."""
    return {OWNER_LABEL: Owner.current().label, RUN_LABEL: run}


def label_args(labels: dict[str, str]) -> list[str]:
    return [arg for name, value in labels.items() for arg in ("--label", f"{name}={value}")]


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def _namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return _UNKNOWN


def _start_time(pid: int) -> str:
    stat = _read(f"/proc/{pid}/stat")
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else _UNKNOWN


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return _UNKNOWN
