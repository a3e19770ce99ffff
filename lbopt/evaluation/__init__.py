"""Exact distributed evaluation."""

from lbopt.evaluation.evaluate import evaluate as evaluate
