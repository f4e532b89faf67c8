"""The phases of a run. Rollouts are recorded by phase: one file per training step and one per evaluation."""

EVAL_BEFORE, EVAL_AFTER = "eval-before", "eval-after"
"""The evaluations before the first training step and after the last."""
ROLLOUTS, EVAL = "rollouts", "eval"
"""The only phase of a run that makes rollouts without training, and of an evaluation."""
_NAMED = (EVAL_BEFORE, EVAL_AFTER, ROLLOUTS, EVAL)


def step_phase(step: int) -> str:
    """Return the phase of a training step."""
    return f"step-{step:05}"


def step_of(phase: str) -> int | None:
    """Return the training step of a phase, or None outside training."""
    name, _, number = phase.partition("-")
    return int(number) if name == "step" else None


def eval_phase(version: int) -> str:
    """Return the phase that evaluates this weight version during training."""
    return f"eval-{version:05}"


def eval_of(phase: str) -> int | None:
    """Return the weight version that a phase evaluates during training, or None for any other phase."""
    name, _, number = phase.partition("-")
    return int(number) if name == "eval" and number.isdecimal() else None


def check_phase(phase: str) -> None:
    """Raise ValueError unless this is the name of a phase."""
    step, version = step_of(phase), eval_of(phase)
    if step is not None:
        known = (step_phase(step),)
    else:
        known = _NAMED if version is None else (eval_phase(version),)
    if phase not in known:
        raise ValueError(f"`{phase}` is not a phase of a run")
