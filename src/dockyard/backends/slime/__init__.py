"""Run on SLiME: the hooks through which it calls Dockyard for rollouts, and the launcher."""
