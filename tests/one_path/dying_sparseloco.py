"""``python dying_sparseloco.py ...`` is ``python -m sparseloco ...`` of which one rank kills itself once, for tests.

``DYING_RANK`` says which, ``DYING_STEP`` after how many inner steps, in the first attempt of torchrun only.
"""

import os
import signal
from typing import Any

from sparseloco.cli import main
from sparseloco.replica import Replica

stepped = Replica.stepped


def dying(self: Any) -> None:
    stepped(self)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and os.environ["RANK"] == os.environ["DYING_RANK"] and self.step == int(os.environ["DYING_STEP"]):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":  # doctests import every file
    Replica.stepped = dying  # type: ignore[method-assign]
    main()
