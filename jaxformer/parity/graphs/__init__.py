"""Compares any JAX function with a PyTorch module, without names: by the values of their operators.

In go a PyTorch module, a candidate of any framework (NNX, Linen, Equinox, Haiku, or a function
and its parameters) and inputs. Out comes a ``Report``: the verdict, each root cause with its source
line on both sides, and what was covered.

Both sides are run once, in float64, and each operator is recorded on a *tape*. Values that are
equal on both tapes, whatever their layout, are *anchors*. Where a value of the candidate should be
an anchor and is not, the operators since the last anchors hold a bug; the reference's value is put
in its place, and the run goes on. So no bug hides another. Then the backward passes are recorded on
the same tapes, and compared in the same way.

- ``recording/``: runs a side and records its operators.
- ``matching/``: finds equal parameters and values, the anchors.
- ``segments/``: judges what lies between two anchors, forward and backward.
- ``diagnosis/``: what would make a wrong segment right.
- ``compare``: all of it, in order.
"""
