"""The report of a study (`write_study_report`), and its numbers as dataclasses (`read_study`)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
