"""Takes two models through the stages.

In go two models and their inputs. Out comes a ``Report``.

- ``api``: ``compare`` and ``assert_parity``, for every kind of candidate.
- ``operators``: any two functions: operator by operator, with no names.
- ``parts``: the same of two models, or parts of them, whose modules are known to be the same.
- ``modules``: jaxformer's own models, whose modules mirror the reference's, as such parts.
- ``reference_run``: the reference of these, and how it is ported.
- ``training``, ``generation``: ``compare_training`` and ``compare_generation``, step by step.
- ``language_models``: the models and token ids of these two, checked before they run.
- ``training_runs``, ``shared_dropout``: both sides of a training comparison, equal dropout masks.
- ``mirrored_optimizer``: PyTorch's optimizer, for parameters in the candidate's layout.
"""
