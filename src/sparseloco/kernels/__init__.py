"""Fast paths for the codec; the torch code in ``compress`` is the definition, and their bits are equal."""

from sparseloco.kernels.fast import digest_tensors, path

__all__ = ["digest_tensors", "path"]
