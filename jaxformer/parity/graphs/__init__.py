"""Compares any JAX function with a PyTorch module, without names: by the values of their operators.

In go a PyTorch module, a candidate of any framework (NNX, Linen, Equinox, Haiku, or a function
and its parameters) and inputs. Out comes a ``GraphReport``: the verdict, each root cause with its
source line on both sides, and what was covered.

Both sides are run once, in float64, and each operator is recorded on a *tape*. Values that are
equal on both tapes, whatever their layout, are *anchors*. Where a value of the candidate should be
an anchor and is not, the operators since the last anchors hold a bug; the reference's value is put
in its place, and the run goes on. So no bug hides another. Then the backward passes are recorded on
the same tapes, and compared in the same way.

Two runs:

- ``tape``: operators and their values; what an operator depends on; a part that is run again.
- ``candidates``: the ways to call a candidate.
- ``jax_tape``: a jaxpr, evaluated operator by operator with every float in float64.
- ``numpy_operators``: common primitives in numpy, which is faster where arrays are small.
- ``torch_tape``: the operators of a PyTorch module, with every float in float64.

What is equal:

- ``layouts``: whether two arrays hold the same numbers in another layout, and which.
- ``content``: exact fingerprints of arrays and of their parts.
- ``parameters``: which parameters hold the same numbers, and which are wrong; ``parts``: one that
  is made of parts of others.
- ``matching``: which value of the reference a value of the candidate is.
- ``anchors``: all such values of a run.
- ``weight_uses``: operators that read the same parameter.

What is not:

- ``segments``: goes through the candidate's tape from anchor to anchor.
- ``ends``: where a wrong segment ends.
- ``divergences``: a wrong segment, and a table that is only rounded.
- ``constants``: what float32 does to the numbers and tables of a segment.
- ``effects``: how much of a wrong segment reaches the results.
- ``gradients``: the backward passes.
- ``diagnosis/``: what would make a wrong segment right.

``report`` says what was found, ``page`` as a page; ``compare`` does all of it, in order.
"""
