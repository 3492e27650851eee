"""Stage 5: says why a wrong segment is wrong, and where in the code.

In go the segments that count. Out come root causes, with the lines of code of both sides. A
diagnosis is tried, never guessed: it is given only if the substitution makes the candidate's
segment agree with the reference's value, or if the formula gives what that side computes.

- ``causes``: root causes of wrong segments.
- ``settings``: settings of the two models that differ, and what they change.
- ``attempts``: all diagnoses that are tried, in order.
- ``evidence``: both sides of a segment, what enters it, and its numbers.
- ``formulas``: the function, norm or softmax that each side computes.
- ``lookups``: which rows of a table are read.
- ``masks``: which keys each query may attend to.
- ``means``: a mean that one side alone subtracts.
- ``substitutions``: another number or input.
- ``ablations``: a step that only one side has.
- ``counts``: weights that one side reads more often.
- ``parameters``: numbers that were never loaded.
- ``relations``: factors, missing terms, axes and order.
- ``rotations``: layout, base and first position of rotary positions.
- ``reductions``: the numbers over which a mean or an extreme is taken.
- ``rows``: how far a segment is right in the rows that the reference computes.
- ``gradients``: what only a backward pass has.
"""
