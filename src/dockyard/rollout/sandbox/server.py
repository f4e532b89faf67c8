"""The server inside a sandbox: it starts commands for the driver. With namespaces it is PID 1. Standard library only.

One message on the socket is one request. `run` carries six file descriptors: control, stdin, stdout, stderr, and the
read ends of the last two; `errand` carries control and, if files are copied, their stream; `kill` and `ping` carry only
control. The reply is sent over control when the command itself has ended; its background processes continue to run.
Closing control before that kills everything that the command started.
"""

# `socket`, `ctypes`, `signal` and `typing` would double the start-up time: hence the modules that they are based on,
# signalfd and few annotations.
import _ctypes
import _socket
import marshal
import os
import resource
import select
import sys
from _collections_abc import Callable

from dockyard.rollout.sandbox.file_ops import ERRANDS

LIBC = _ctypes.dlopen(None, 0)  # pyright: ignore[reportArgumentType]
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
SIGKILL, SIGPIPE, SIGCHLD, SIGXFSZ = 9, 13, 17, 25
SIG_DFL, SIG_IGN = 0, 1
SIG_BLOCK, SIG_UNBLOCK = 0, 1
SIGNAL_MASK = (1 << (SIGCHLD - 1)).to_bytes(128, sys.byteorder)
MAX_ANSWER = 4096
COMMANDS_PATIENCE_S = 30.0
NUM_LIMITS = 16
"""The number of kinds of RLIMIT_, which start at 0."""

type Request = tuple[list[str], str, dict[str, str], int, int]


def call(function: str, *args: int | bytes | None) -> int:
    """Call a function of the C library."""
    return _ctypes.call_function(_ctypes.dlsym(LIBC, function), args)


class Commands:
    """A child of the server that starts the commands, so that they cannot reach the server itself.

    The same child starts all of them, so that a command can signal what another left running.
    """

    def __init__(self, stand_apart: Callable[[], None]) -> None:
        self._stand_apart = stand_apart
        self._start()

    def run(self, fds: list[int]) -> None:
        if not self._hand_over(fds):  # it was killed: by `kill -9 -1`, or by the seal
            self._requests.close()
            self._start()
            self._hand_over(fds)

    def _start(self) -> None:
        self._requests, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        self._requests.settimeout(COMMANDS_PATIENCE_S)
        self._pid = os.fork()
        if self._pid == 0:
            self._requests.close()
            self._stand_apart()
            serve(theirs, receipt=b"taken")
        theirs.close()

    def _hand_over(self, fds: list[int]) -> bool:
        """Pass a request to the child and return whether it took it. A child that a command has stopped is killed."""
        data = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
        try:
            self._requests.sendmsg([b"run"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, data)], _socket.MSG_NOSIGNAL)
            return self._requests.recv(16) != b""
        except TimeoutError:
            send_kill(self._pid)
            return False
        except OSError:
            return False


def standing() -> tuple[object, ...]:
    """Return what other processes of the same user can change of this one: its limits and its scheduling."""
    limits = [resource.getrlimit(kind) for kind in range(NUM_LIMITS)]
    return limits, os.sched_getaffinity(0), os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)


def serve(
    requests: _socket.socket, commands: Commands | None = None, *, receipt: bytes = b"", can_kill_all: bool = True
) -> None:
    """Answer requests until the driver ends; then the kernel, or the watcher, ends every process in here."""
    before = standing()
    while True:
        message, fds = receive(requests)
        if message == b"run" and commands is not None:
            commands.run(fds)
        elif message == b"run" and os.fork() == 0:
            requests.close()
            supervise(_socket.socket(fileno=fds[0]), fds[1:4], fds[4:])
            os._exit(0)
        if message == b"run" and receipt:
            requests.send(receipt)
        if message == b"errand" and os.fork() == 0:
            requests.close()
            run_errand(_socket.socket(fileno=fds[0]), fds[1:])
            os._exit(0)
        if message == b"kill":
            (kill_everything if can_kill_all else kill_children)()
            os.write(fds[0], b"done" if standing() == before else b"bent")
        if message == b"ping":
            os.write(fds[0], b"here")
        for fd in fds:
            os.close(fd)
        if not message:
            os._exit(0)


def receive(requests: _socket.socket) -> tuple[bytes, list[int]]:
    message, ancillary, _, _ = requests.recvmsg(16, _socket.CMSG_SPACE(6 * 4), _socket.MSG_CMSG_CLOEXEC)
    data = b"".join(data for _, _, data in ancillary)
    return message, [int.from_bytes(data[i : i + 4], sys.byteorder) for i in range(0, len(data), 4)]


def kill_everything() -> None:
    try:
        os.kill(-1, SIGKILL)  # all at once, so that a fork bomb cannot escape it
        os.waitpid(-1, 0)  # with SIGCHLD ignored: returns when the last child has ended
    except (ProcessLookupError, ChildProcessError):
        return


def supervise(control: _socket.socket, stdio: list[int], outputs: list[int]) -> None:
    """Run one command, report its return code, and kill its whole tree if the driver closes control first."""
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of this process, so none is lost
    call("signal", SIGCHLD, SIG_DFL)
    call("sigprocmask", SIG_BLOCK, SIGNAL_MASK, None)
    exits = call("signalfd", -1, SIGNAL_MASK, os.O_CLOEXEC)
    request: Request | None = read_request(control)
    if request is None:
        return
    child = os.fork()
    if child == 0:
        execute(request, stdio)
    for fd in stdio:
        os.close(fd)
    code = wait(child, control, exits)
    if code is None:
        kill_tree()
        return
    try:
        control.sendall(code.to_bytes(4, "big"))
        control.recv(1)  # the driver closes it when it has read the output
    except OSError:
        pass
    drain(outputs, exits)


def run_errand(control: _socket.socket, streams: list[int]) -> None:
    """Run a file operation and answer `done`, or the error. Does not wait for a driver that has ended."""
    os.umask(0o022)
    request: tuple[str, list[object]] | None = read_request(control)
    if request is None:
        return
    name, args = request
    try:
        ERRANDS[name](*streams, *args)
        answer = "done"
    except Exception as error:  # any error is reported to the driver
        answer = str(error)[:MAX_ANSWER] or type(error).__name__
    try:
        control.sendall(os.fsencode(answer))
    except OSError:
        return


def read_request(control: _socket.socket):  # a tuple, as the driver encoded it
    size = int.from_bytes(read_exactly(control, 4), "big")
    body = read_exactly(control, size)
    return marshal.loads(body) if size and len(body) == size else None


def read_exactly(control: _socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (chunk := control.recv(size - len(data))):
        data += chunk
    return data


def execute(request: Request, stdio: list[int]) -> None:
    """Replace this process by the command. The limits are set here, so that the server itself can still fork."""
    argv, cwd, env, max_processes, max_memory = request
    try:
        os.setsid()
        os.umask(0o022)
        for target, fd in enumerate(stdio):
            os.dup2(fd, target)
        for signal in (SIGPIPE, SIGXFSZ):  # Python ignores them, and exec keeps that
            call("signal", signal, SIG_DFL)
        call("sigprocmask", SIG_UNBLOCK, SIGNAL_MASK, None)
        os.chdir(cwd)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if max_processes:
            resource.setrlimit(resource.RLIMIT_NPROC, (max_processes, max_processes))
        if max_memory:  # not RLIMIT_AS: node and java reserve far more than they use
            resource.setrlimit(resource.RLIMIT_DATA, (max_memory, max_memory))
        os.execve(argv[0], [os.path.basename(argv[0]), *argv[1:]], env)  # bash prints its name in errors
    except (OSError, ValueError) as error:
        os.write(2, f"sandbox: {error}\n".encode())
    os._exit(126)


def wait(child: int, control: _socket.socket, exits: int) -> int | None:
    """Return the command's return code, or None if the driver closed control."""
    events = select.poll()
    events.register(control.fileno(), select.POLLIN)
    events.register(exits, select.POLLIN)
    while True:
        ready = [fd for fd, _ in events.poll()]
        if exits in ready:
            os.read(exits, 128)
            code = reap(child)
            if code is not None:
                return code
        if control.fileno() in ready:
            return None


def reap(child: int) -> int | None:
    """Reap all processes that have ended. Return the return code of `child`, as in a shell, if it is one of them."""
    code = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = os.waitstatus_to_exitcode(ended[1])
                code = status if status >= 0 else 128 - status
    except ChildProcessError:
        pass
    return code


def kill_tree() -> None:
    """Kill every descendant: first by process group, which a fork bomb cannot escape, then one by one."""
    try:
        while True:
            for child, group in children():
                if group != os.getpgrp():
                    send_kill(-group)
                send_kill(child)
            os.waitpid(-1, 0)
            reap(0)
    except ChildProcessError:
        return


def kill_children() -> None:
    """The same for the server itself, whose children the kernel reaps otherwise."""
    call("signal", SIGCHLD, SIG_DFL)  # each end is reported, and its children become ours
    kill_tree()
    call("signal", SIGCHLD, SIG_IGN)


def send_kill(target: int) -> None:
    try:
        os.kill(target, SIGKILL)
    except ProcessLookupError:
        pass


def children() -> list[tuple[int, int]]:
    """Return each child of this process with its process group."""
    found: list[tuple[int, int]] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    _, parent, group = file.read().rpartition(b")")[2].split()[:3]
            except OSError:  # it ended meanwhile
                continue
            if int(parent) == os.getpid():
                found.append((int(name), int(group)))
    return found


def drain(outputs: list[int], exits: int) -> None:
    """Discard what background processes still write: a closed pipe would kill them."""
    events = select.poll()
    for fd in (*outputs, exits):
        events.register(fd, select.POLLIN)
    num_open = len(outputs)
    while num_open:
        for fd, _ in events.poll():
            data = os.read(fd, 65536)
            if fd == exits:
                reap(0)
            elif not data:
                events.unregister(fd)
                num_open -= 1


def close_others(keep: int) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != keep:
            try:
                os.close(fd)  # the host could be reached through the folders that this Python was loaded from
            except OSError:  # the one that listed the folder
                pass
    os.set_inheritable(keep, False)


def prepare(keep: int) -> None:
    """Remove everything from this process that a command could misuse."""
    close_others(keep)
    with open("/proc/self/oom_score_adj", "wb") as file:
        file.write(b"1000")  # when the host runs out of memory, it kills sandboxes before the trainer
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # no ptrace; /proc/1/{mem,environ,fd} are closed
    call("signal", SIGCHLD, SIG_IGN)  # the kernel reaps


def run_confined(requests: int, stand_apart: Callable[[], None], *, has_scopes: bool) -> None:
    """Serve without namespaces. `has_scopes`: Landlock lets this process signal its own descendants only."""
    close_others(requests)
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):  # commands must not get the watcher's
        os.dup2(nothing, fd)
    os.close(nothing)
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    call("signal", SIGCHLD, SIG_IGN)
    if has_scopes and can_signal(os.getppid()):
        raise PermissionError(1, "Landlock does not keep signals inside")
    driver = _socket.socket(fileno=requests)
    commands = Commands(stand_apart)
    driver.send(b"ready")
    serve(driver, commands, can_kill_all=has_scopes)


def can_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    return True


if __name__ == "__main__":
    prepare(int(sys.argv[1]))
    driver = _socket.socket(fileno=int(sys.argv[1]))
    driver.send(b"ready")
    serve(driver)
