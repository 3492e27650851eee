"""``jaxformer inspect``: the numbers of ``analysis`` and ``costs`` for a trained run, drawn."""
