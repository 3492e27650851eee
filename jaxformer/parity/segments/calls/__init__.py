"""Runs every pair of modules by itself, on the reference's numbers.

- ``teacher_forcing``: all pairs, each with the reference's inputs and outputs of submodules.
- ``isolated_calls``: one call of a pair: its numbers beside those of the reference.
- ``products``: a large output head, in slices of the vocabulary.
- ``reference_gradients``: the same modules of the reference, run backward by themselves.
- ``pair_functions``: a pair as two functions of the same arrays, for a closer look.
"""
