"""Modal: a GPU for the policy alone, with loop and rollouts on the caller's machine, or for the whole run."""
