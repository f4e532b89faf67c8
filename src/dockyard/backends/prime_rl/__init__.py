"""Run on Prime-RL: translate a run file into its settings, and provide rollouts as a verifiers plug-in."""
