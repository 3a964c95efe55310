"""``python missing_rank.py ...`` is ``python -m sparseloco ...`` of which rank 1 never gets to its start, for tests.

Rank 0 leaves a file ``waiting`` where it works once it waits for the other.
"""

import os
import time
from pathlib import Path
from typing import Any

from sparseloco.cli import main
from sparseloco.transport import meeting

wait_for_all = meeting.wait_for_all


def waiting(*given: Any) -> None:
    Path("waiting").touch()
    wait_for_all(*given)


if __name__ == "__main__":  # doctests import every file
    while os.environ["RANK"] == "1":
        time.sleep(1)
    meeting.wait_for_all = waiting
    main()
