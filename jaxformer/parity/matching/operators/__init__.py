"""Finds which parameters and values of the two sides hold the same numbers, in any layout.

In go arrays of the reference and of the candidate. Out come pairs, each with the layout that leads
from the one to the other.

- ``layouts``: whether two arrays hold the same numbers in another layout, and which.
- ``content``: exact fingerprints of arrays and of their parts.
- ``parameters``: which parameters hold the same numbers, and which are wrong.
- ``computed_parameters``: those that the reference computes of its own each time, or scales.
- ``parts``: a parameter that is made of parts of others.
- ``rounded_parameters``: parameters that one side keeps in 16 bits.
- ``values``: which value of the reference a value of the candidate is.
- ``anchors``: all such values of a run.
- ``weight_uses``: operators that read the same parameter.
- ``module_pairs``: which module of the reference a module of the candidate is.
- ``known_modules``, ``known_values``, ``known_gradients``: what must be equal where that is known.
- ``reference_attention``: what the reference's attentions allow; tokens that nobody uses.
"""
