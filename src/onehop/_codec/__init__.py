"""Objects to a small stream and buffers, and back; knows nothing of memory, ranks or links."""

from onehop._codec.functions import function_reference, resolve_reference
from onehop._codec.pickling import Encoded, decode, encode
from onehop._codec.reducers import register_reducer

__all__ = [
    "Encoded",
    "decode",
    "encode",
    "function_reference",
    "register_reducer",
    "resolve_reference",
]
