"""Stage 3: runs what lies between anchors on the reference's numbers, forward and backward.

A *segment* is what the candidate computes from some anchors to the next ones. It is given what the
reference has at its beginning, and is compared with what the reference has at its end, so that no
bug hides another.

- ``operators/``: segments of operators between equal values. They are found on the way, each as
  short as the values tell.

All values stand on one tape, and one that is found wrong is put right there for those behind it.
Where it is known which modules of the two sides are the same, as of jaxformer's own models, what
enters and leaves them must be equal too: then a segment has an end at each, and belongs to one
module.

Names that a user gives to modules divide nothing. Measured in ten comparisons of four
small foreign models, right and with bugs, dividing by them first took twice the CPU time (14 s, not
7), gave no line of code for two bugs of which operators give one, and passed swapped names in
silence.
"""
