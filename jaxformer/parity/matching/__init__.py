"""Stage 2: finds what belongs together on the two sides: the *anchors*.

In go the records of both sides. Out come places where both must hold the same numbers.

- ``calls/``: modules paired by name, by the rules that port the weights; their calls, and what is
  read and returned in them. These anchors are known before anything is compared.
- ``operators/``: parameters and values that hold the same numbers, in any layout. These anchors
  are found.

Nothing is judged here, except rotary tables.
"""
