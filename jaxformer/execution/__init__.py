"""How a model is run, never what it computes.

A program wraps the tracing of a model in context managers: ``attention_kernel``,
``scanned_layers``, ``shared_traces``, ``rematerialization``, ``layout``. The model's modules call
the functions here, which look up what is in effect. The numbers stay the same, up to rounding.
Nothing of the mirror is imported here at run time: what a file needs of it comes in as an argument.

- ``attention_backends``: which kernel computes an attention, and why another cannot.
- ``fused_attention``: calls cuDNN's and splash attention's kernels, or those of the next lines.
- ``called_attention``: attention on a CPU as a custom call, and its gradients as another.
- ``blockwise_attention``: attention over long texts on a CPU, with few scores in memory at a time.
- ``attention_products``: the products of attention, in the layout that is fastest.
- ``query_blocks``: cuts the queries of the plain core into blocks, to skip masked keys.
- ``chunked_loss``: the loss of a large vocabulary, with few logits in memory at a time.
- ``gpu_shapes``: layouts and sizes that XLA should be given on an NVIDIA GPU.
- ``shared_traces``: equal blocks are traced once, whatever their number.
- ``layer_scan``: runs equal blocks in one loop, which compiles faster.
- ``called_products``: products of a run on a CPU as custom calls, of jaxformer's or of torch's.
- ``called_norms``: norms as custom calls, where products are.
- ``called_activations``: GELU as a custom call, where products are.
- ``called_feed_forward``: a feed-forward with GELU, whose products and GELU are one custom call.
- ``called_losses``: the cross-entropy of many classes as a custom call, where products are.
- ``called_updates``: AdamW of all parameters as one custom call, where products are.
- ``few_rows``: products of few rows with large matrices, as generation has them on a CPU.
- ``narrow_products``: products with weights of int8 or bfloat16, widened a block at a time.
- ``float_calls``: custom calls whose results are arrays of float32.
- ``added_rows``: rows that are added to each text, with a quick sum as their gradient.
- ``batch_parts``: the parts of a batch that a CPU computes one after the other.
- ``batch_halves``: the halves of a batch, which a CPU's cores generate at the same time.
- ``cores``: how many cores of the processor there are to use.
- ``grouped_products``: products of rows with the matrix of each row's group, as experts have them.
- ``grouped_feed_forward``: the same for the three products of a gated feed-forward.
- ``separate_experts``: the same for few rows on a CPU, without copies of matrices.
- ``lengths``: how long prompts and caches are when text is generated, so that few programs compile.
- ``token_window``: the rows of a generating program, in buffers, with their cache.
- ``shared_window``: the same where each row belongs to another request, and comes and goes.
- ``drafted_window``: the same with the cache of a draft.
- ``seeds``: keys of seeds, of which every bit counts.
- ``delayed_draws``: initial weights, drawn by one program for each kind of array.
- ``rematerialization``: what the forward pass keeps for the backward pass.
- ``sharding``: where arrays lie among many devices; ``training.parallel`` decides it.
- ``all_reduce``: sums over devices, always added in the same order.
- ``scopes``: values that hold within a ``with`` block, as all of these choices do.
"""
