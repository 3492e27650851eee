"""The engine around the step: corpora, strategies, loop, checkpoints, metrics."""
