"""The report of a study: `write_study_report` writes it, `read_study` gives its numbers as dataclasses."""

from lbopt.report.study._read import read_study
from lbopt.report.study._write import StudyReport, write_study_report

__all__ = ["StudyReport", "read_study", "write_study_report"]
