"""Stage 3: runs what lies between anchors on the reference's numbers, forward and backward.

A *segment* is what the candidate computes from some anchors to the next ones. It is given what the
reference has at its beginning, and is compared with what the reference has at its end, so that no
bug hides another.

- ``calls/``: the segments of a pair of modules: from what enters it and what its submodules
  return, to what enters these and what it returns. They are known by name.
- ``operators/``: segments of operators between equal values. They are found on the way, each as
  short as the values tell.
"""
