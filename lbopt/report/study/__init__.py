"""The report of a study (`write_study_report`), and its numbers as dataclasses (`read_study`)."""

from lbopt.report.study._read import read_study
from lbopt.report.study._write import StudyReport, write_study_report

__all__ = ["StudyReport", "read_study", "write_study_report"]
