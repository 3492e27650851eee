"""Takes two models through the stages.

In go two models and their inputs. Out comes a ``Report``.

- ``api``: ``compare`` and ``assert_parity``, for every kind of candidate.
- ``modules``: jaxformer's own models, whose modules mirror the reference's: pair by pair.
- ``operators``: any two functions: operator by operator, with no names.
- ``code_lines``: a wrong pair of modules, as two functions, operator by operator.
- ``reference_run``: the reference, run once for any number of candidates.
- ``training``, ``generation``: ``compare_training`` and ``compare_generation``, step by step.
- ``language_models``: the models and token ids of these two, checked before they run.
- ``training_runs``, ``shared_dropout``: both sides of a training comparison, equal dropout masks.
- ``mirrored_optimizer``: PyTorch's optimizer, for parameters in the candidate's layout.
"""
