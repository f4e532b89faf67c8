"""The engine inside this process: a transformers model, decoded in batches by a thread."""
