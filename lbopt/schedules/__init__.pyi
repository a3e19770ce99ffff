from ._batch_phases import (
    BatchPhase as BatchPhase,
    batch_phases as batch_phases,
    critical_changes as critical_changes,
    doubling_changes as doubling_changes,
    phase_schedule as phase_schedule,
    ramp_changes as ramp_changes,
    seesaw_changes as seesaw_changes,
)
from ._decay import exponential_factor as exponential_factor, step_factor as step_factor
from ._published import (
    albert_schedule as albert_schedule,
    exponential_schedule as exponential_schedule,
    mixed_batch_schedule as mixed_batch_schedule,
    mlperf_schedule as mlperf_schedule,
    step_schedule as step_schedule,
)
from ._rules import (
    NUMBERS as NUMBERS,
    RULES as RULES,
    Change as Change,
    ScalingRule as ScalingRule,
    combine_rules as combine_rules,
    rule_changes as rule_changes,
    scale_number as scale_number,
)
from ._scaling import scale_learning_rate as scale_learning_rate
from ._scaling_plan import (
    ScaledBatch as ScaledBatch,
    check_warmup_rule as check_warmup_rule,
    scale_batch as scale_batch,
    scaling_plan as scaling_plan,
)
from ._stretch import stretch_schedule as stretch_schedule
from ._units import Units as Units
from ._warmup import legw_schedule as legw_schedule, warmup_schedule as warmup_schedule
