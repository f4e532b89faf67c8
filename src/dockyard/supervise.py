"""Run a command as long as another process keeps this one's stdin open.

`python -I supervise.py SECONDS COMMAND...`: when stdin ends, because the other process closed it or ended, the command
and everything it started get SIGTERM, and SIGKILL after SECONDS. Imports nothing of Dockyard, because its Python path
is the command's.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main(patience_s: float, command: list[str]) -> int:
    """Return the command's exit code; 128 + the signal if a signal ended it, as in a shell."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_stdin, args=(child, patience_s), daemon=True).start()
    code = child.wait()
    _signal(child.pid, signal.SIGKILL)  # what it left running
    return code if code >= 0 else 128 - code


def _end_with_stdin(child: subprocess.Popen[bytes], patience_s: float) -> None:
    while os.read(0, 4096):
        pass
    _signal(child.pid, signal.SIGTERM)
    try:
        child.wait(patience_s)
    except subprocess.TimeoutExpired:
        _signal(child.pid, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_DFL)  # the parent may ignore them, and the command would inherit that
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
