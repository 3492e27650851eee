"""Several processes that train as one, connected by JAX's own multi-controller runtime.

A run's settings say which process this is (``ProcessSettings``). Every process then makes the same
calls; process 0, the primary, prints and writes files. An error in one process is raised in all,
and a process that is lost ends the others, each with one line and an exit code.

- ``settings``: which process of how many this is, free of JAX.
- ``launcher``: starts the processes of one machine, and again when one is lost.
- ``processes``: what training calls: start, run on the primary, agree on values, leave.
- ``control_plane``: how values and errors travel: the coordination service's key-value store.
- ``peers``: heartbeats; notices a lost process and writes down what ended the run.
- ``shutdown``: a message and an exit code where the runtime would only abort.
"""
