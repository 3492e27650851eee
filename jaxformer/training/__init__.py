"""Training: from settings and a text or tokens to checkpoints of a trained model.

In go a ``TrainConfig`` and a ``Corpus`` or ``TokenCorpus``; out come the run's folder with its
checkpoints, ``metrics.jsonl`` and a picture of the losses. A run passes through the files in this
order:

- ``config`` and ``presets``: its settings, free of JAX; ``config_files``: as a TOML file;
  ``run_arguments``: which of them go together.
- ``experiment``: settings completed by the corpus, token ids, and what the run starts from;
  ``data``: what of folders of tokens is trained on and validated with; ``pairs``: the same of
  sources and targets.
- ``products``: whose products a run on a CPU has, measured by ``product_choice``;
  ``product_conditions``: which settings allow it, and what is built meanwhile, free of JAX.
- ``startup``: checks (``memory``, ``resume_checks``), the strategy, and the first state, which
  ``initial_state`` draws or restores; ``summary``: what is printed of all this.
- ``run_folder``: the lock and the settings on disk; ``state_arrays``: a state as a checkpoint.
- ``loop``: steps, evaluations and checkpoints, planned by ``step_scheduler``; ``batches`` gives the
  rows of each step.
- ``evaluation``, ``divergence``, ``profiling``: what happens between the steps.

``parallel`` has the step on several devices, ``logging`` what the run reports.
"""
