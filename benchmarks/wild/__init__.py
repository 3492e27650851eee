"""Compares JAX models that other people published with their PyTorch references.

The models come from public packages, installed in an environment of its own; the weights are small
and random, so nothing is downloaded. ``docs/write_wild.py`` runs all of it and
writes docs/reference/wild.md.

- ``settings``: what is compared: a model of each side, and inputs.
- ``inputs``: tokens, padding, images, sound.
- ``flax_pairs``: a Flax model of transformers beside its PyTorch one, called as people call it.
- ``flax_families``: the families of transformers, with configurations that few people use.
- ``libraries``: models of other packages.
- ``run``: compares the settings of one family and prints a line of JSON for each.
- ``page``: the page that shows these lines.
"""
