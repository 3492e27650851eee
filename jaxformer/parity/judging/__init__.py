"""Stage 4: decides what the numbers of segments mean: exact, rounding, a bug, or not compared.

In go differences of segments. Out come a verdict for each module and the segments that count. Where
the line is, ``jaxformer.parity.tolerance`` says, for all stages.

- ``verdicts``: from the differences of a pair of modules to a verdict and a message.
- ``module_nodes``: what was required of known modules, as nodes of the report.
- ``module_rounding``: what a dtype rounds in what they return.
- ``weights``: parameters of both sides, before anything is run.
- ``divergences``: which wrong segments of operators reach the results.
- ``pair_coverage``: how many of both sides' modules and parameters were compared in pairs.
- ``coverage``: modules whose values were compared, and what was not.
- ``no_effect``: parameters and inputs of the candidate that its results do not depend on.
- ``labels``: the candidate's names of its modules, in the report.
- ``rounding``: what a dtype rounds on both sides, where operators were compared.
"""
