"""Metrics of rollouts, among them those of the gateway, which show whether training sees what was sampled."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from dockyard.rollout.blame import failure_counts
from dockyard.types import Rollout


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The metrics of a step's rollouts."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    shaped = [rollout.shaped_reward for rollout in rollouts if rollout.shaped_reward is not None]
    return {
        "reward/mean": fmean(rewards) if rewards else float("nan"),
        **({"reward/shaped_mean": fmean(shaped)} if shaped else {}),
        "rollout/count": float(len(rollouts)),
        "rollout/lost": float(len(rollouts) - len(rewards)),
        "rollout/segments": fmean(len(rollout.segments) for rollout in rollouts),
        "rollout/sampled_tokens": float(sum(rollout.num_sampled for rollout in rollouts)),
        **gateway_metrics(rollouts),
        **{f"failure/{cause}": float(count) for cause, count in failure_counts(rollouts).items()},
    }


def gateway_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The gateway's metrics; empty if no rollout called the model. Rollouts recorded as text are left out."""
    rollouts = [rollout for rollout in rollouts if not rollout.exchanges]
    totals: Counter[str] = Counter()
    for rollout in rollouts:
        totals.update(rollout.stats)
    calls = [rollout.stats["calls"] for rollout in rollouts if rollout.stats.get("calls")]
    answered = [rollout.stats.get("answered", 0) for rollout in rollouts]
    if not calls:
        return {}
    return {
        "gateway/calls": float(sum(calls)),
        "gateway/splice_rate": totals["splices"] / max(sum(max(n - 1, 0) for n in answered), 1),
        "gateway/segments": sum(len(rollout.segments) for rollout in rollouts) / len(calls),
        "gateway/trained_share": totals["trained_tokens"] / max(totals["sampled_tokens"], 1),
        "gateway/reencoded_tokens": float(totals["reencoded_tokens"]),
        "gateway/untrusted_calls": float(totals["untrusted_calls"]),
        "gateway/cpu_ms_per_call": totals["cpu_us"] / 1000 / sum(calls),
        **{f"gateway/{name}": float(count) for name, count in sorted(totals.items()) if name.startswith("branch_")},
    }


def gateway_line(metrics: dict[str, float]) -> str:
    """The gateway's metrics as a line of text."""
    if not metrics:
        return ""
    branches = {name.removeprefix("gateway/branch_"): count for name, count in metrics.items() if "branch_" in name}
    reasons = ", ".join(f"{name} {count:.0f}" for name, count in branches.items()) or "none"
    return (
        f"gateway:      {metrics['gateway/segments']:.2f} segments a rollout, "
        f"{metrics['gateway/trained_share']:.1%} of sampled tokens trained, "
        f"{metrics['gateway/splice_rate']:.1%} of later calls spliced, branches: {reasons}; "
        f"{metrics['gateway/cpu_ms_per_call']:.1f} ms of CPU a call"
    )
