"""What a program does with jaxformer in a few lines: load, generate, save, train.

``import jaxformer`` offers all of it, and imports this package when it is first used. A path or a
module goes in; a model that reads and writes text, or a finished run, comes out. The work is done
by the packages below.

- ``model``: ``load``, and ``Model``: a module with its tokenizer. It is inspected and saved there.
- ``text_model``: what ``Model`` writes: one text, the texts of many prompts, targets of sources.
- ``loaded_model``: what ``Model`` holds: module, tokenizer, and the checkpoint of both.
- ``runs``: ``train``, and ``TrainResult``: what a run has left in its folder.
"""
