"""Finds which modules, calls and arrays of the two sides belong together.

In go the module trees of both sides, the parameter links of porting, and the calls of one pass of
each. Out come pairs of modules, matched calls with their tensors aligned, and what must be equal
before modules can be judged: masks and positions.

- ``pairs``: pairs of modules, from the rules that port the weights or from a map of names.
- ``alignment``: the layout transform from a reference array to a candidate array.
- ``calls``: matched calls of a pair, their inputs, outputs and gradients in the candidate's layout.
- ``masks``: attention masks, recovered from the reference's scores.
- ``positions``: rotary tables, ALiBi slopes and position ids.
"""
