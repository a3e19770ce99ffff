from ._cost import SearchCost as SearchCost, search_cost as search_cost
from ._methods import DRAWN_BY as DRAWN_BY, make_searcher as make_searcher
from ._searcher import (
    Factors as Factors,
    Proposal as Proposal,
    Score as Score,
    Searcher as Searcher,
)
from ._widened import can_widen as can_widen, edge_of as edge_of, is_beyond as is_beyond
