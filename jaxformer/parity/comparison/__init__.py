"""Compares a reference in PyTorch with a candidate in JAX and judges every difference.

In go two models and their inputs. Out comes a ``Report``: a verdict for every pair of modules, or
for every step of training or generation.

- ``api``: ``compare`` and ``assert_parity``, for every kind of candidate.
- ``modules``: jaxformer's own modules, or modules by name: every pair, isolated.
- ``training``, ``generation``: ``compare_training`` and ``compare_generation``, step by step.
- ``reference_run``: the reference, run once for any number of candidates.
- ``teacher_forcing``, ``isolated_calls``: pairs run on the reference's inputs, isolated.
- ``products``: a large output head, in slices of the vocabulary.
- ``pair_nodes``: what was recorded of a pair, as a node of the report.
- ``reference_gradients``: the same modules of the reference, run backward by themselves.
- ``weights``, ``settings``: what is compared in addition to outputs and gradients.
- ``context``: errors and rounding of modules inside the whole models.
- ``code_lines``: of a pair with a bug, both lines of code and a diagnosis, from ``graphs``.
- ``verdicts``: from differences to a verdict and a message.
- ``training_runs``, ``shared_dropout``: both sides of a training comparison, equal dropout masks.
"""
