"""Typed configuration: what a config file returns."""

from lbopt.config.aggregator import AggregatorConfig as AggregatorConfig
from lbopt.config.data import DataConfig as DataConfig
from lbopt.config.loss import LossConfig as LossConfig
from lbopt.config.measure import MeasureConfig as MeasureConfig
from lbopt.config.model import ModelConfig as ModelConfig
from lbopt.config.optimizer import OptimizerConfig as OptimizerConfig
from lbopt.config.parallel import ParallelConfig as ParallelConfig
from lbopt.config.phase import PhaseConfig as PhaseConfig
from lbopt.config.schedule import ScheduleConfig as ScheduleConfig
from lbopt.config.search import SearchConfig as SearchConfig
from lbopt.config.sweep import Arm as Arm, SweepConfig as SweepConfig
from lbopt.config.train import (
    About as About,
    CheckpointConfig as CheckpointConfig,
    TrainConfig as TrainConfig,
)
