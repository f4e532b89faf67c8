"""The HTTP server agents talk to: renders prompts, drives the engine with token ids, records every turn exactly."""
