"""From settings to rollouts: task sets, and environments, gateway and pool opened together."""
