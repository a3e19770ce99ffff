"""Learning-rate schedules: strictly functions of the optimizer step."""
