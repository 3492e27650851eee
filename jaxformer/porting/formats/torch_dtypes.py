"""PyTorch's names of the dtypes that numpy and ml_dtypes have too."""

import numpy as np

from jaxformer.porting.formats import tensors as t

DTYPES: dict[str, np.dtype] = {
    **{
        name: np.dtype(name)
        for name in (
            *("float64", "float32", "float16", "complex128", "complex64", "bool"),
            *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        )
    },
    "bfloat16": t.BFLOAT16,
    "float8_e4m3fn": t.FLOAT8_E4M3FN,
    "float8_e4m3fnuz": t.FLOAT8_E4M3FNUZ,
    "float8_e5m2": t.FLOAT8_E5M2,
    "float8_e5m2fnuz": t.FLOAT8_E5M2FNUZ,
    "float8_e8m0fnu": t.FLOAT8_E8M0FNU,
}
# The dtypes whose storages have a class; storages of the others are bytes, with a dtype beside.
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
