"""``python -m sparseloco`` is the command ``sparseloco``."""

from sparseloco.cli import main

if __name__ == "__main__":
    main()
