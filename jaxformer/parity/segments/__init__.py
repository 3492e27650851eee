"""Stage 3: runs what lies between anchors on the reference's numbers, forward and backward.

A *segment* is what the candidate computes from some anchors to the next ones. It is given what the
reference has at its beginning, and is compared with what the reference has at its end, so that no
bug hides another.

- ``calls/``: the segments of a pair of modules: from what enters it and what its submodules
  return, to what enters these and what it returns. Those of jaxformer's own models are known.
- ``operators/``: segments of operators between equal values. They are found on the way, each as
  short as the values tell.

Both kinds have a runner of their own. A pair's segments have ends that are known beforehand: each
is a function that runs by itself, in any order, with a backward pass by its own vjp, and is freed
afterwards, which streaming and the pass in the dtype under test need. The ends of operators show
only while they run: all stand on one tape, and a value that is found wrong is put right there for
those behind it. What they share is what comes of a segment: a value, the one wanted, a judgement. A
pair that is found wrong becomes a model of operators (``calls.pair_functions``).

Of the candidate both evaluate a jaxpr, operator by operator and without compiling: a pair in the
dtypes that it is written in, as a cast is a bug there, and operators with every float in float64.

Pairs of modules need less memory, as a segment is judged and freed before the next one is made, and
operators find values that no module returns. GPT-2 of 124 million parameters, forward and backward
over 256 positions: 24 s and 3.5 GiB by pairs, 34 s and 3.9 GiB by operators (two cores of an AMD
EPYC with AVX-512; ``benchmarks/verify.py``, with ``--operators``); with AVX2 alone, where operators
share numpy's work among the cores, 35 and 48 s.

Names that a user gives to modules divide nothing. Measured in ten comparisons of four
small foreign models, right and with bugs, dividing by them first took twice the CPU time (14 s, not
7), gave no line of code for two bugs of which operators give one, and passed swapped names in
silence.
"""
