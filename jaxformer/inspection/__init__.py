"""``jaxformer inspect``: the numbers of analysis, scaling and costs for a trained run, drawn."""
