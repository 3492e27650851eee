"""Compares two checkpoints block by block from their files, whatever their size.

In go two open checkpoints and token ids. Out comes the same ``Report`` as from ``comparison``: each
module is run by itself on the reference's inputs anyway, so no more than one block of each side has
to be in memory, in float64.

First both models run forward, block after block, and only what enters and leaves a block is kept.
Then each block of the reference is run again, with every call inside it recorded, and its modules
are judged as in ``comparison``.
Last comes what is around the blocks: embeddings, final norm, head.

- ``session``: the whole comparison, and what is reported.
- ``layout``: which modules are blocks, and which arrays are too large to be held whole.
- ``empty_reference``: the reference's modules without weights.
- ``reference_side``, ``candidate_side``: passes of a model whose weights come and go.
- ``products``: large embeddings and heads, of which a pass holds a part at a time.
- ``blocks``: what is found of one block.
- ``state``: what a run that was killed resumes from.
- ``choice``: whether a comparison is made block by block, and why.
"""
