"""Reports: from finished run folders to one page and two pictures.

Reads only the files of a run folder, never a model or a transport, so that a report can be made anywhere.
``matplotlib`` (charts), ``jinja2`` (page) and ``msgspec`` (validation) are imported where they are used.
"""

from sparseloco.report.runs import Evaluation, Run, Summary, load_run
from sparseloco.report.seeds import Group, groups, seeds_table
from sparseloco.report.table import Cell, Row, summary_table
from sparseloco.report.write import write_report

__all__ = [
    "Cell",
    "Evaluation",
    "Group",
    "Row",
    "Run",
    "Summary",
    "groups",
    "load_run",
    "seeds_table",
    "summary_table",
    "write_report",
]
