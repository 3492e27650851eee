"""Compares two checkpoints block by block from their files, whatever their size.

In go two open checkpoints and token ids. Out comes the same ``Report`` as from ``comparison``: each
module answers for its own code anyway, so no more than one block has to be in memory.

First both models run forward, block after block, and only what enters and leaves a block is kept.
Then each block is compared as a model of its own, on what entered the reference's. Last comes what
is around the blocks: embeddings, final norm, head; there the blocks return what the reference's
returned.

- ``session``: the whole comparison, and what is reported.
- ``layout``: which modules are blocks, and which arrays are too large to be held whole.
- ``empty_reference``: the reference's modules without weights.
- ``reference_side``, ``candidate_side``: passes of a model whose weights come and go.
- ``products``: large embeddings and heads, of which a pass holds a part at a time.
- ``blocks``: what is found of one block; ``around``: what is found around them.
- ``state``: what a run that was killed resumes from.
- ``choice``: whether a comparison is made block by block, and why.
"""
