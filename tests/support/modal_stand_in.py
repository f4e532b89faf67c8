"""Modal on this machine, for tests: `modal_stand_in.py run SCRIPT ARGUMENTS...` is `modal run` without an account,
`modal_stand_in.py serve SCRIPT` what a container of a web server does, and `modal_stand_in.py warm DESCRIPTOR` does the
former for each order that comes, in processes that have imported torch already.

Images, secrets and settings are Modal's own objects, and every call is checked against Modal's own signature. Functions
run as processes of this machine that end with the caller, one at a time. They are restarted with the same input when
they are killed, as Modal does after a preemption. Everything is kept in the folder $MODAL_STAND_IN:

    calls/NAME-3.pid   the process that executes the call
    volume/            the volume, which is what $DOCKYARD_MODAL_MOUNT must name
"""

import contextlib
import ctypes
import importlib.util
import inspect
import json
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import modal as real

FOLDER = Path(os.environ.get("MODAL_STAND_IN", "."))
_PR_SET_PDEATHSIG = 1
_HEAVY = ("dockyard.backends.modal.policy", "dockyard.trainer.run", "litellm", "matplotlib.pyplot")
_containers: Connection
"""Takes the inputs of function calls. Gives the number of the process that carries one out, then how it ended."""


def check(method: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse what the real one would refuse."""
    inspect.signature(method).bind(*args, **kwargs)


@dataclass
class Dict:
    """A folder of files."""

    folder: Path

    @staticmethod
    @contextlib.contextmanager
    def ephemeral() -> Generator["Dict"]:
        folder = FOLDER / "dicts" / uuid4().hex
        folder.mkdir(parents=True)
        yield Dict(folder)

    def put(self, key: str, value: Any) -> None:
        check(real.Dict.put, self, key, value)
        draft = self.folder / f".{uuid4().hex}"
        draft.write_text(json.dumps(value))
        draft.replace(self.folder / key)

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return json.loads((self.folder / key).read_text())
        except FileNotFoundError:
            return default

    def pop(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        (self.folder / key).unlink(missing_ok=True)
        return value


class Volume:
    @staticmethod
    def from_name(name: str, *, create_if_missing: bool) -> "Volume":
        check(real.Volume.from_name, name, create_if_missing=create_if_missing)
        return Volume()

    @contextlib.contextmanager
    def batch_upload(self, force: bool) -> Generator["Volume"]:
        yield self

    def put_directory(self, local: str, there: str) -> None:
        shutil.copytree(local, FOLDER / "volume" / there.lstrip("/"), dirs_exist_ok=True)

    def put_file(self, local: str, there: str) -> None:
        target = FOLDER / "volume" / there.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(local, target)

    def commit(self) -> None: ...


@dataclass(frozen=True)
class Tunnel:
    url: str


@contextlib.contextmanager
def forward(port: int) -> Generator[Tunnel]:
    check(real.forward, port)
    yield Tunnel(f"http://127.0.0.1:{port}")


def concurrent(**options: Any) -> Callable[[Any], Any]:
    check(real.concurrent, **options)
    return lambda function: function


def web_server(port: int, **options: Any) -> Callable[[Any], Any]:
    check(real.web_server, port, **options)
    return lambda function: function


class FunctionCall[*T]:
    """A process that is restarted when it is killed."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._name = f"{function.__name__}-{len(list((FOLDER / 'calls').glob('*.input')))}"
        self._input = FOLDER / "calls" / f"{self._name}.input"
        self._input.write_bytes(pickle.dumps((function.__module__, function.__name__, arguments)))
        self._done = threading.Event()
        self._cancelled = False
        self._pid: int | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._cancelled:
                    break
                _containers.send(self._input)
                self._pid = _containers.recv()
                (FOLDER / "calls" / f"{self._name}.pid").write_text(str(self._pid))
            if _containers.recv() != -signal.SIGKILL:
                break
        self._done.set()

    def get(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise TimeoutError
        output = self._input.with_suffix(".output")
        if not output.exists():
            raise real.exception.RemoteError("the container ended")
        value = pickle.loads(output.read_bytes())  # noqa: S301
        if isinstance(value, Exception):
            raise value
        return value

    def cancel(self, terminate_containers: bool) -> None:
        check(real.FunctionCall.cancel, self, terminate_containers=terminate_containers)
        with self._lock:
            self._cancelled = True
            if self._pid and not self._done.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
        self._done.wait()


class Function[*T]:
    def __init__(self, raw: Callable[..., Any]) -> None:
        self.raw = raw

    def with_options(self, **options: Any) -> "Function":
        check(real.Function.with_options, self, **options)
        return self

    def spawn(self, *arguments: Any) -> FunctionCall:
        check(self.raw, *arguments)
        (FOLDER / "calls").mkdir(parents=True, exist_ok=True)
        return FunctionCall(self.raw, arguments)


class App:
    def __init__(self, name: str, **options: Any) -> None:
        self._real = real.App(name, **options)
        self.entrypoint: Callable[..., None] | None = None
        self.functions: list[Function[Any]] = []

    def function(self, **options: Any) -> Callable[[Callable[..., Any]], Function]:
        # The real one takes the same, but for volumes that are folders here.
        check(real.App.function, self, **options)

        def register(raw: Callable[..., Any]) -> Function[Any]:
            self.functions.append(Function(raw))
            return self.functions[-1]

        return register

    def local_entrypoint(self) -> Callable[[Callable[..., None]], Callable[..., None]]:
        def register(raw: Callable[..., None]) -> Callable[..., None]:
            self.entrypoint = raw
            return raw

        return register


def install() -> None:
    """Replace the module `modal` for later imports."""
    stand_in = types.ModuleType("modal")
    stand_in.__dict__.update(real.__dict__)
    stand_in.__dict__.update(
        App=App,
        Function=Function,
        FunctionCall=FunctionCall,
        Dict=Dict,
        Volume=Volume,
        forward=forward,
        concurrent=concurrent,
        web_server=web_server,
    )
    sys.modules["modal"] = stand_in


def load(script: Path) -> Any:
    """The script as a module."""
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(path: Path) -> None:
    """What a container does."""
    module, name, arguments = pickle.loads(path.read_bytes())  # noqa: S301
    function = getattr(importlib.import_module(module), name)
    try:
        value = function.raw(*arguments)
    except Exception as error:  # as Modal does, whatever it is
        value = error
    draft = path.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(value))
    draft.replace(path.with_suffix(".output"))


def run(words: list[str]) -> None:
    """What `modal run` does."""
    global _containers
    _containers, theirs = Pipe()
    forked(lambda: carry_out(theirs, call), _containers)  # now: later on there will be threads
    theirs.close()
    script, *others = words
    load(Path(script)).app.entrypoint(*others)


def run_logged(order: tuple[list[str], Path]) -> None:
    """`run`, its output added to a file."""
    words, path = order
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    run(words)


def carry_out[T](orders: Connection, work: Callable[[T], None]) -> None:
    """Run each order in its own process, one at a time; report its number, then its exit status."""
    with contextlib.suppress(EOFError):
        while True:
            order = orders.recv()
            pid = forked(lambda order=order: work(order), orders)
            orders.send(pid)
            orders.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def forked(work: Callable[[], None], not_theirs: Connection) -> int:
    """A copy of this process that does this and ends, at the latest with us."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before we asked to go with it
        os._exit(1)
    not_theirs.close()
    return end_after(work)


def end_after(work: Callable[[], None]) -> NoReturn:
    """This, and nothing that the process we are a copy of would do next."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    install()
    verb, first, *others = sys.argv[1:]
    if verb == "run":
        run([first, *others])
    elif verb == "serve":
        load(Path(first)).app.functions[0].raw()
    else:
        for name in _HEAVY:
            importlib.import_module(name)
        carry_out(Connection(int(first)), run_logged)
