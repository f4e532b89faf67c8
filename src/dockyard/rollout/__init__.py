"""One Harbor Trial per rollout, and where its commands run."""
