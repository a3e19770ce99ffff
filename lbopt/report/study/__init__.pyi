from ._read import read_study as read_study
from ._write import StudyReport as StudyReport, write_study_report as write_study_report
