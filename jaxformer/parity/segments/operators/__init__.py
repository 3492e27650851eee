"""Finds the segments of operators that differ, forward and backward.

In go the two tapes and their anchors. Out come divergences: segments of the candidate that compute
something else than the reference's between the same places.

- ``walk``: goes through the candidate's tape from anchor to anchor.
- ``requirements``: what is known of modules, held against the values on the way.
- ``ends``, ``false_anchors``: where a wrong segment ends, and where it begins; ``equal_ends``:
  which of equal values is wrong.
- ``factors``: two factors of a product that are wrong at once.
- ``divergences``: a wrong segment, and trials of other arrays in it.
- ``results``, ``result_checks``: the results: their numbers, and whether they are complete, in
  their places and finite alike; ``choices``: integers and truth values among them; ``shapes``:
  those of another shape.
- ``constants``: what float32 does to the numbers and tables of a segment.
- ``effects``: how much of a wrong segment reaches the results.
- ``unverified``: parameters that nothing shows to be right; ``lacking``: those of zeros or ones
  that the candidate lacks.
- ``gradients``: the backward passes.
- ``padding_rows``: the gradients of padding tokens.
- ``frozen_parameters``: the gradients of what the reference does not train.
"""
