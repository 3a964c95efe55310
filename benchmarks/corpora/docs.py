"""Documentation in English out of packages."""

PACKAGES = ()


def texts(work):
    return iter(())
