from ._branches import logged_scales as logged_scales
from ._page import new_figure as new_figure, new_panels as new_panels, tidy as tidy
from ._training import write_training_report as write_training_report
