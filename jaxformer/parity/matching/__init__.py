"""Stage 2: finds what belongs together on the two sides: the *anchors*.

In go the records of both sides. Out come places where both must hold the same numbers.

- ``operators/``: parameters and values that hold the same numbers, in any layout. These anchors
  are found. Where it is known which modules are the same, what enters and leaves them is too.
- ``pairs``: these modules, by the rules that port the weights.
- ``positions``: tables of positions, given to the candidate.
- ``arguments``: which arrays that a module gets are the same on both sides.
- ``names``: names of modules that a user gives.

Nothing is judged here, except rotary tables.
"""
