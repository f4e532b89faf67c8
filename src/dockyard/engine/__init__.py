"""Engines sample tokens from the policy: token ids in, token ids and logprobs out."""
