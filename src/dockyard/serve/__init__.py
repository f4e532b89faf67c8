"""`dockyard serve`: the policy behind an OpenAI- and Anthropic-compatible server of its own, for any agent."""
