"""The engine around the step: corpora, strategies, loop, checkpoints, metrics. No twin in torch_ref."""
