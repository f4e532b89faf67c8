"""Run on Modal: only the policy, with loop and rollouts on the caller's machine, or the whole run."""
