"""Engines past one machine that own the loop and call our rollouts: who they are, and how a run is handed to them."""
