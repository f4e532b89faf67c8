"""Callbacks: methods of the user's that a run calls after a rollout, a group, a step and an evaluation."""

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dockyard.errors import DockyardError, StopRun, UsageError
from dockyard.extension import REFERENCE, RESTART, check_methods, line_of, load_methods
from dockyard.rollout.plan import Attempt, RolloutPlan
from dockyard.run_dir.paths import EVAL, ROLLOUTS, step_of
from dockyard.types import Group, Rollout

logger = logging.getLogger(__name__)

_SETTING = "callbacks"


class Callbacks:
    """Methods that a run calls while it makes progress.

    Write a class with one or more of these methods and name it in the run file: `callbacks = ["my_module:MyClass"]`. It
    may derive from this class, but need not. One instance is created for each run, without arguments.

    Calls come in the order of the run, one at a time. They block the run, and the rollouts in progress wait as well, so
    a method should return within milliseconds; start a thread for slow work.

    If a method raises an exception, the run logs a warning once, continues, keeps calling the method, and logs at its
    end how often it failed. To end a run early, raise `StopRun`.

    A resumed run does not repeat the calls for results that were already recorded.
    """

    stop_on_error: bool = False
    """Set it to True to end the run with an error when a method raises an exception."""

    def after_rollout(self, rollout: Rollout) -> None:
        """Called when a rollout of a training step, of `dockyard rollout` or of `dockyard eval` is finished.

        Its `reward` is None if it was lost to an infrastructure failure. Not called for rollouts on held-out tasks
        during training, and for recorded rollouts that a run trains on.
        """

    def after_group(self, group: Group) -> None:
        """Called when all rollouts of one task in a training step, or in `dockyard rollout`, are finished."""

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called when a training step is recorded, with its metrics as in `metrics.jsonl`. Steps count from 0."""

    def after_evaluation(self, version: int, scores: Mapping[str, float]) -> None:
        """Called when held-out tasks have been evaluated: before, during and after training, and in `dockyard eval`.

        `version` is the number of updates of the weights; in `dockyard eval` it is 0. `scores` has the mean reward as
        `reward` and pass@k as `pass@1`, ..., each with the 95 % confidence interval as `reward_low` and `reward_high`.
        During training the call comes after that of the step. It is left out if every rollout was lost.
        """


@dataclass(slots=True)
class _Instance:
    """An instance of the user's class, and how often each of its methods was called and failed."""

    reference: str
    wrapped: object
    calls: Counter[str] = field(default_factory=Counter[str])
    failures: Counter[str] = field(default_factory=Counter[str])

    def call(self, name: str, *arguments: object) -> None:
        method: Callable[..., object] | None = getattr(self.wrapped, name, None)  # it defines some of the methods
        if method is None:
            return
        self.calls[name] += 1
        try:
            method(*arguments)
        except StopRun:
            raise
        except Exception as error:  # a mistake in the user's code must not cost the run
            self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        what = f"callback `{self.reference}.{name}` failed: {type(error).__name__}: {error}"
        what += line_of(error, sys.modules.get(type(self.wrapped).__module__))
        if getattr(self.wrapped, "stop_on_error", False):
            hint = f"correct it, then `--resume` the run ({RESTART}); without `stop_on_error` the run would continue"
            raise DockyardError(what, hint=hint) from error
        self.failures[name] += 1
        if self.failures[name] == 1:
            logger.warning("%s; the run continues, and further failures are only counted", what)


@dataclass(frozen=True, slots=True)
class _Finished:
    """A finished rollout and its place in the run."""

    plan: RolloutPlan
    attempt: Attempt
    rollout: Rollout
    made: bool
    """False if it was read from disk."""


@dataclass(slots=True, kw_only=True)
class RunCallbacks:
    """The callbacks of one run. It calls them in the order of the run, and never for what is only replayed.

    With `rollout.max_staleness`, rollouts of later steps may finish early: they are reported when their step begins.
    """

    instances: tuple[_Instance, ...] = ()
    last_recorded: int = -1
    """The last step that was recorded before the run was resumed."""
    _step: int = 0
    _early: dict[int, list[_Finished]] = field(default_factory=dict[int, list[_Finished]])
    _unfinished: dict[tuple[str, int], list[_Finished]] = field(default_factory=dict[tuple[str, int], list[_Finished]])
    _phases: set[str] = field(default_factory=set[str])
    """The phases in which a rollout was made."""
    _scores: list[tuple[int, dict[str, float]]] = field(default_factory=list[tuple[int, dict[str, float]]])
    """Evaluations that are finished and not reported yet."""

    def start(self, step: int) -> None:
        """Training starts with this step."""
        self._step = step

    def rollout_finished(self, plan: RolloutPlan, attempt: Attempt, rollout: Rollout, *, made: bool) -> None:
        """Report a rollout, and its group once that is complete. `made` is False for a rollout read from disk."""
        if not self.instances:
            return
        finished = _Finished(plan, attempt, rollout, made)
        if made:
            self._phases.add(plan.phase)
        step = step_of(plan.phase)
        if step is not None and step > self._step:
            self._early.setdefault(step, []).append(finished)
        elif step is not None or plan.phase in (ROLLOUTS, EVAL):
            self._report(finished)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report a step and its evaluation, then the rollouts of the next step that are already finished."""
        if step > self.last_recorded:
            self._call("after_step", step, dict(metrics))
        self.report_evaluations()
        self._step = step + 1
        for finished in self._early.pop(self._step, ()):
            self._report(finished)

    def evaluated(self, phase: str, version: int, scores: Mapping[str, float]) -> None:
        """Note the scores of an evaluation. They are reported when its results are recorded."""
        if phase in self._phases:
            self._scores.append((version, dict(scores)))

    def report_evaluations(self) -> None:
        """Report the evaluations noted so far."""
        while self._scores:
            self._call("after_evaluation", *self._scores.pop(0))

    def close(self) -> None:
        """Log how often each method failed."""
        for instance in self.instances:
            for name, count in instance.failures.items():
                message = "callback `%s.%s` failed in %d of %d calls"
                logger.warning(message, instance.reference, name, count, instance.calls[name])

    def _report(self, finished: _Finished) -> None:
        plan, group = finished.plan, finished.attempt.group
        if finished.made:
            self._call("after_rollout", finished.rollout)
        if plan.phase == EVAL:
            return
        members = self._unfinished.setdefault((plan.phase, group), [])
        members.append(finished)
        if len(members) < plan.group_size:
            return
        del self._unfinished[plan.phase, group]
        if any(member.made for member in members):
            ordered = sorted(members, key=lambda member: member.attempt.index)
            rollouts = tuple(member.rollout for member in ordered)
            self._call("after_group", Group(task=finished.rollout.task, rollouts=rollouts, spare=plan.first_group > 0))

    def _call(self, name: str, *arguments: object) -> None:
        for instance in self.instances:
            instance.call(name, *arguments)


def log_stop(stop: StopRun, verb: str, run_dir: Path) -> None:
    """Log why a callback stopped the run, and how to continue it."""
    logger.warning("stopped by a callback: %s; `dockyard %s --resume %s` continues", stop.message, verb, run_dir)


def load_callbacks(references: Sequence[str], *, last_recorded: int = -1) -> RunCallbacks:
    """Create the classes that the setting names. Raise UsageError if one of them or of their methods is wrong."""
    return RunCallbacks(instances=tuple(map(_load, references)), last_recorded=last_recorded)


def check_callbacks(references: Sequence[str]) -> None:
    """Raise UsageError if one of the classes, of their constructors or of their methods is wrong. Creates none."""
    for reference in references:
        _check_reference(reference)
        check_methods(reference, _SETTING, Callbacks, optional=True)


def _check_reference(reference: str) -> None:
    if not re.fullmatch(REFERENCE, reference):
        hint = f'write `{_SETTING} = ["module:Class"]`, with a class in `module.py` in the current folder'
        raise UsageError(f"`{_SETTING}` has `{reference}`, which is not `module:Class`", hint=hint)


def _load(reference: str) -> _Instance:
    _check_reference(reference)
    return _Instance(reference, load_methods(reference, _SETTING, Callbacks, optional=True))
