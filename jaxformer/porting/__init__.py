"""Weights between PyTorch and JAX."""

from jaxformer.porting.naming import export_arrays, import_arrays

__all__ = ["export_arrays", "import_arrays"]
