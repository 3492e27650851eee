"""The PyTorch twins of ``jaxformer``, and the baseline that its speed is measured against.

Same files, same classes, same constructor keywords, same attribute paths; the dimension letters
are those of ``jaxformer/__init__.py``. Nothing here imports JAX or ``jaxformer``.
"""
