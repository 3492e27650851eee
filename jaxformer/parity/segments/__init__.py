"""Stage 3: runs what lies between anchors on the reference's numbers, forward and backward.

A *segment* is what the candidate computes from some anchors to the next ones. It is given what the
reference has at its beginning, and is compared with what the reference has at its end, so that no
bug hides another. Segments are found on the way, each as short as the values tell.

In go the two tapes and their anchors. Out come divergences: segments of the candidate that compute
something else than the reference's between the same places.

- ``walk``: goes through the candidate's tape from anchor to anchor.
- ``requirements``: what is known of modules, held against the values on the way;
  ``weight_values``: what must be equal around two operators that read the same weight.
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
- ``backward_runs``: both backward passes; ``gradients``: what they give parameters and inputs.
- ``padding_rows``: the gradients of padding tokens.
- ``frozen_parameters``: the gradients of what the reference does not train.

All values stand on one tape, and one that is found wrong is put right there for those behind it.
Where it is known which modules of the two sides are the same, as of jaxformer's own models, what
enters and leaves them must be equal too: then a segment has an end at each, and belongs to one
module.

Names that a user gives to modules divide nothing. Measured in ten comparisons of four
small foreign models, right and with bugs, dividing by them first took twice the CPU time (14 s, not
7), gave no line of code for two bugs of which operators give one, and passed swapped names in
silence.
"""
