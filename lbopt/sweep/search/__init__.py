"""Which candidates a cell tries next: methods that ask and are told, behind one small protocol."""

from lbopt.sweep.search.make import make_searcher as make_searcher
from lbopt.sweep.search.protocol import (
    Factors as Factors,
    Proposal as Proposal,
    Score as Score,
    Searcher as Searcher,
)
