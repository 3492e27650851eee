"""The ``jaxformer`` command; a module here is one command, with its options.

Arguments go in, an exit code comes out. Options are dataclasses that tyro reads; they import no
JAX, so that help and errors of usage are instant. The work is done by the packages below, and none
of them imports this one. An error is one line on standard error;
docs/reference/exit_codes.md lists exit codes.

- ``main``: the table of commands, and how errors are reported; ``early_signals``: how a signal ends
  a run that has not begun.
- ``arguments``: reads arguments into options; ``starting``: what ``--init-from`` names;
  ``progress``: bars over bytes.
- ``train``, ``tokenize``, ``sample``, ``port``, ``verify``, ``inspect``, ``plan``, ``runs``,
  ``completions``: the commands.
- ``sample_options`` and ``sample_models``: the options of ``sample``, and the models that it loads.
- ``verify_code``: ``verify`` for models that people's own code makes; ``verify_outputs``: what
  both write and print.
"""
