"""Typed configuration: what a config file returns."""

from lbopt.config.sweep import Arm as Arm, SweepConfig as SweepConfig
from lbopt.config.train import (
    About as About,
    CheckpointConfig as CheckpointConfig,
    DataConfig as DataConfig,
    ModelConfig as ModelConfig,
    OptimizerConfig as OptimizerConfig,
    ParallelConfig as ParallelConfig,
    ScheduleConfig as ScheduleConfig,
    TrainConfig as TrainConfig,
)
