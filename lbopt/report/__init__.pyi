from ._page import new_figure as new_figure
from ._training import write_training_report as write_training_report
