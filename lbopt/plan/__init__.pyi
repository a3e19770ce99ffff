from ._bounds import Grid as Grid, Tile as Tile, dp_limit as dp_limit, grid as grid, tile as tile
from ._collectives import bytes_between_slices as bytes_between_slices
from ._costs import estimated_cycles as estimated_cycles, hbm_bytes as hbm_bytes
from ._document import plan_document as plan_document
from ._hardware import CHIPS as CHIPS
from ._hlo_program import HloProgram as HloProgram
from ._limits import words_received as words_received
from ._make import Plan as Plan, make_plan as make_plan
from ._step_cost import (
    StepCost as StepCost,
    cost_of as cost_of,
    read_cost as read_cost,
    read_program as read_program,
)
from ._suggest import suggest_changes as suggest_changes, suggest_evaluation as suggest_evaluation
from ._table import (
    breakdown_lines as breakdown_lines,
    comparison_lines as comparison_lines,
    duration_text as duration_text,
    plan_lines as plan_lines,
    suggestion_lines as suggestion_lines,
)
from ._topology import (
    Topology as Topology,
    open_topology as open_topology,
    parse_topology as parse_topology,
    planning as planning,
    prepare_environment as prepare_environment,
)
