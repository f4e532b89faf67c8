"""W&B, TensorBoard and Trackio: they get the metrics of each step under the names in `metrics.jsonl`.

A missing package or key is an error before the first rollout. Whatever fails after that warns once, and training goes
on without that tracker.
"""

import logging
import math
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from dockyard.config import RunConfig, TrackerConfig
from dockyard.errors import UsageError
from dockyard.run_dir.run import RunDir

logger = logging.getLogger(__name__)

_OFFLINE = ("offline", "dryrun", "disabled")
_UPLOAD_S = 600  # how long the end of a run waits for W&B; `wandb sync` sends what is left
# What may hold a key, or lead to something that needs none.
_PRIVATE = {
    "agent": {"kwargs", "env"},
    "environment": {"kwargs"},
    "engine": {"url"},
    "gateway": {"tunnel", "public_url"},
}


class Tracker(Protocol):
    """One destination of metrics."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def finish(self, summary: Mapping[str, float], *, failed: bool) -> None: ...


class Trackers:
    """The trackers that the settings name. An error in one of them does not stop the run."""

    def __init__(self, open_by_name: Mapping[str, Callable[[], Tracker]], *, since: int = -1) -> None:
        self._since = since
        self._summary: dict[str, float] = {}
        self._open: dict[str, Tracker] = {}
        for name, opened in open_by_name.items():
            with self._excused(name):
                self._open[name] = opened()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send a step's metrics, unless they were sent before the run was resumed."""
        if step <= self._since:
            return
        finite = _finite(numbers)
        for name, tracker in list(self._open.items()):
            with self._excused(name):
                tracker.log(step, finite)

    def conclude(self, summary: Mapping[str, Any]) -> None:
        """Set the summary that trackers get when the run ends."""
        self._summary = _finite(summary)

    def close(self, *, failed: bool) -> None:
        for name, tracker in list(self._open.items()):
            with self._excused(name):
                tracker.finish(self._summary, failed=failed)

    @contextmanager
    def _excused(self, name: str) -> Generator[None]:
        try:
            yield
        except Exception as error:  # whatever a tracker raises must not stop the run
            self._open.pop(name, None)
            logger.warning("%s failed, the run continues without it: %s: %s", name, type(error).__name__, error)


def _finite(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in numbers.items()
        if isinstance(value, int | float) and math.isfinite(value) and not isinstance(value, bool)
    }


def check_trackers(config: TrackerConfig) -> None:
    """Raise an error if a tracker cannot work, before anything starts."""
    wanted = {"wandb": config.wandb, "tensorboard": config.tensorboard, "trackio": config.trackio}
    for name, value in wanted.items():
        if value and find_spec(name) is None:
            raise UsageError(
                f"`tracker.{name}` is set, but `{name}` is not installed", hint="`pip install 'dockyard[trackers]'`"
            )
    if config.wandb:
        _check_wandb_key()


def _check_wandb_key() -> None:
    import wandb

    if wandb.setup().settings.mode in _OFFLINE:
        return
    try:
        found = wandb.login(prompt=False, verify=False)
    except wandb.Error as error:
        raise UsageError(f"W&B rejects the key: {error}", hint="correct `WANDB_API_KEY`") from error
    if not found:
        raise UsageError(
            "`tracker.wandb` is set, but there is no W&B key",
            hint="`WANDB_API_KEY=...` in `.env`, or `wandb login`; `WANDB_MODE=offline` needs none",
        )


@contextmanager
def open_trackers(config: RunConfig, run: RunDir) -> Generator[Trackers]:
    """Open the trackers that the settings name, and close them with the block."""
    sent = [int(line["step"] or 0) for line in run.read_metrics()]
    trackers = Trackers(_wanted(config, run), since=max(sent, default=-1))
    try:
        yield trackers
    except BaseException:
        trackers.close(failed=True)
        raise
    trackers.close(failed=False)


def _wanted(config: RunConfig, run: RunDir) -> dict[str, Callable[[], Tracker]]:
    wanted: dict[str, Callable[[], Tracker]] = {}
    settings = config.model_dump(mode="json", exclude=_PRIVATE)
    if project := config.tracker.wandb:
        wanted["W&B"] = lambda: _Wandb(project, run, settings)
    if config.tracker.tensorboard:
        wanted["TensorBoard"] = lambda: _TensorBoard(run)
    if space := config.tracker.trackio:
        wanted["Trackio"] = lambda: _Trackio(space, run, settings)
    return wanted


class _Wandb:
    def __init__(self, project: str, run: RunDir, settings: dict[str, Any]) -> None:
        import wandb

        # `x_disable_meta`: the command line is part of it, and may hold what the settings given here leave out.
        options = wandb.Settings(console="off", silent=True, x_disable_meta=True, finish_timeout=_UPLOAD_S)
        self._run = wandb.init(
            project=project,
            id=run.tracker_id,
            name=run.path.name,
            dir=run.paths.trackers,
            resume="allow",
            config=settings,
            settings=options,
        )
        if self._run.offline:
            logger.info("W&B is offline; `wandb sync %s` sends the run", Path(self._run.dir).parent)
        else:
            logger.info("W&B: %s", self._run.url)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self, summary: Mapping[str, float], *, failed: bool) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(failed))


class _TensorBoard:
    def __init__(self, run: RunDir) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.paths.trackers / "tensorboard"
        self._writer = SummaryWriter(str(folder))
        logger.info("TensorBoard: `tensorboard --logdir %s`", folder)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, summary: Mapping[str, float], *, failed: bool) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, project: str, run: RunDir, settings: dict[str, Any]) -> None:
        import trackio

        self._finish = trackio.finish
        with redirect_stdout(sys.stderr):  # it prints a greeting, and stdout is for data
            self._run = trackio.init(
                project,
                name=f"{run.path.name}-{run.tracker_id}",
                config=settings,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self, summary: Mapping[str, float], *, failed: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._finish()  # not the run's own `finish`: it would be called again, with a message, at exit
