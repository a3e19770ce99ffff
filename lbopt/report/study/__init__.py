"""The report of a study (`write_study_report`), and its numbers as dataclasses (`read_study`).

`decision_lines` says beforehand what a study can decide; `detectable_difference` and `seeds_needed`
are the power calculation.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
