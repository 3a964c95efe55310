"""``sparseloco bench``: what encode and decode cost here, against plain torch, a baseline and the memory's limit.

Measured figures come from child processes with a fixed allocator and thread count; :mod:`sparseloco.bench.paths` is
the only module that knows how frames and kernels are called.
"""
