"""Prime-RL owns the loop: its settings from a run file, and the rollouts it asks for as a plug-in of verifiers."""
