"""Stage 2: finds what belongs together on the two sides: the *anchors*.

In go the records of both sides. Out come places where both must hold the same numbers: parameters
and values, in any layout, each with the layout that leads from the one to the other. Where it is
known which modules are the same, what enters and leaves them is too.

- ``layouts``: whether two arrays hold the same numbers in another layout, and which.
- ``content``: exact fingerprints of arrays and of their parts.
- ``parameters``: which parameters hold the same numbers, and which are wrong.
- ``computed_parameters``: those that the reference computes of its own each time, or scales;
  ``moved_scales``: scales before a product on one side, and after it on the other.
- ``parts``: a parameter that is made of parts of others.
- ``rounded_parameters``: parameters that one side keeps in 16 bits.
- ``values``: which value of the reference a value of the candidate is.
- ``anchors``: all such values of a run.
- ``weight_uses``: operators that read the same parameter.
- ``module_pairs``: which module of the reference a module of the candidate is, by numbers;
  ``pairs``: by the rules that port the weights.
- ``known_parameters``: those that are the same by the rules that port them; ``known_modules``,
  ``known_values``, ``known_gradients``: what must be equal where modules are known to be the same.
- ``reference_attention``: what the reference's attentions allow; tokens that nobody uses.
- ``positions``: tables of positions, given to the candidate.
- ``arguments``: which arrays that a module gets are the same on both sides.
- ``names``: names of modules that a user gives.

Nothing is judged here, except rotary tables.
"""
