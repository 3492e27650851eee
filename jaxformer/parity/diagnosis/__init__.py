"""Stage 5: says why a wrong segment is wrong, and where in the code.

In go the segments that count. Out come root causes, with the lines of code of both sides.

- ``causes``: root causes of wrong segments.
- ``operators/``: what would make a segment right: substitutions that are tried, one after another.
- ``settings``: settings of the two models that differ, and what they change.
"""
