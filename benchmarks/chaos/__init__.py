"""A run of six peers over a store in which everything goes wrong that can; see ``__main__``."""
