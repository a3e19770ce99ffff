from ._combine import (
    CombinedMask as CombinedMask,
    FunctionMask as FunctionMask,
    LeafMask as LeafMask,
    PathMask as PathMask,
    RoleMask as RoleMask,
    all_leaves as all_leaves,
    exclude_paths as exclude_paths,
    exclude_roles as exclude_roles,
    select_paths as select_paths,
    select_roles as select_roles,
    weights_only as weights_only,
    with_known_roles as with_known_roles,
    without as without,
)
from ._matrices import matrix_dimension_numbers as matrix_dimension_numbers
from ._names import ROLES as ROLES, LeafRole as LeafRole, Role as Role, Rule as Rule
from ._recording import record_choice as record_choice, recorded_choices as recorded_choices
from ._resolve import Split as Split, resolve_mask as resolve_mask, resolve_split as resolve_split
from ._roles import (
    explain_roles as explain_roles,
    leaf_role as leaf_role,
    tree_roles as tree_roles,
)
from ._types import module_roles as module_roles
