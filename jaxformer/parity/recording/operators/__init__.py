"""Records operators: runs a side once, in float64, and writes each operator on a tape.

In go a PyTorch module, or a candidate as a function of its parameters, and inputs. Out comes a
``Tape`` with the operators, their values and their lines of code; then, given cotangents, the
operators of the backward pass on the same tape.

- ``graph``: operators and their values, what they depend on. Large values that are soon made again
  are forgotten.
- ``running_again``: runs a part of a run once more, with other arrays.
- ``kinds``: names of operators, by what they do.
- ``tape``: all of them, in the order of a run.
- ``torch_run``: a PyTorch module; ``torch_recorder``: its operators, as they are dispatched;
  ``torch_calls``: the calls of its modules.
- ``torch_decompositions``: compound operators of PyTorch, taken apart.
- ``torch_stops``: where it stops gradients.
- ``torch_parameters``: names and numbers of its parameters, and which are not trained.
- ``torch_weights``: its weights in float64, in memory only while an operator reads them.
- ``references``: what a reference must be; ``compile`` and the like are taken off it.
- ``candidates``: the ways to call a candidate, and what it is called with.
- ``jax_run``: a candidate, evaluated operator by operator.
- ``tracing``: the jaxprs of a candidate, forward and backward.
- ``equations``: what one equation of a jaxpr computes, with every float in float64 or as written.
- ``evaluation``: goes through the equations of a jaxpr: onto a tape, or evaluated as written.
- ``collectives``: what runs over devices, on one device.
- ``host_calls``: a call in a jaxpr that is made when it is evaluated.
- ``numpy_operators``: common primitives in numpy, which compiles nothing.
- ``module_marks``: what enters and leaves a candidate's modules, marked in its jaxpr.
- ``narrow_runs``: both sides once more, in a narrower dtype.
- ``sources``: the user's line of code that made an equation.
- ``signatures``, ``failures``: inputs that fit no argument, and what a user's model raises, in one
  line.
"""
