"""What a program does with jaxformer in a few lines: load, generate, save, train.

``import jaxformer`` offers all of it, and imports this package when it is first used. A path or a
module goes in; a model that reads and writes text, or a finished run, comes out. The work is done
by the packages below.

- ``model``: ``load``, and ``Model``: a module with its tokenizer.
- ``runs``: ``train``, and ``TrainResult``: what a run has left in its folder.
"""
