"""Names of operators, in the words of JAX and of PyTorch, by what they do."""

# The operator that marks what enters or leaves a module.
MARK = "mark"
# Operators that only bring numbers into another shape.
LAYOUT_ONLY = {
    "reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "view", "unsqueeze",
    "_unsafe_view", "expand", "permute", "t", "clone", "copy", "convert_element_type", "_to_copy",
    "to", "detach", "alias", "slice", "split", "select", "index", "concatenate", "cat", "stack",
    MARK,
}  # fmt: skip
# Of these, the ones that copy the numbers, which takes time; the others make a view where they can.
COPIES = {"clone", "copy", "_to_copy", "concatenate", "cat", "stack", "index"}
# Operators that add values up.
SUMS = {"add", "add_any", "sub", "reduce_sum"}
# Operators whose results are in memory of their own.
OWN_MEMORY = {"add", "add_any", "mm", "dot_general", "embedding_dense_backward", "scatter-add"}
# Operators that take hardly longer than reading what they made: it may be forgotten.
QUICK = LAYOUT_ONLY | {
    "add", "add_any", "sub", "rsub", "mul", "div", "neg", "abs", "max", "min", "maximum", "minimum",
    "square", "pow", "integer_pow", "sqrt", "rsqrt", "exp", "log", "tanh", "tanh_backward",
    "logistic", "sigmoid", "sigmoid_backward", "silu", "silu_backward", "gelu", "gelu_backward",
    "relu", "erf", "sin", "cos", "threshold_backward", "where", "select_n", "masked_fill", "pad",
    "_softmax", "_softmax_backward_data", "native_layer_norm", "embedding_dense_backward",
}  # fmt: skip
