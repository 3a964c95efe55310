"""Fast paths for the codec; the torch code in ``compress`` is the definition, and their bits are equal."""
