from ._bucket import (
    bucket_errors as bucket_errors,
    bucket_path as bucket_path,
    checkpoint_root as checkpoint_root,
    copy_changes as copy_changes,
    copy_changes_soon as copy_changes_soon,
    is_folder_held as is_folder_held,
    is_whole_checkpoint as is_whole_checkpoint,
    local_workdir as local_workdir,
    move_checkpoint as move_checkpoint,
    shown_path as shown_path,
)
from ._data_files import place_of_data as place_of_data
from ._folder import (
    CRITICAL_FILE as CRITICAL_FILE,
    PROFILE_FOLDER as PROFILE_FOLDER,
    CompareConfigs as CompareConfigs,
    absolute_workdir as absolute_workdir,
    check_shared_workdir as check_shared_workdir,
    file_errors as file_errors,
    make_writable_folder as make_writable_folder,
    open_workdir as open_workdir,
    read_config as read_config,
    read_study_config as read_study_config,
    refuse_another_run as refuse_another_run,
    remove_leftovers as remove_leftovers,
    write_bytes as write_bytes,
    write_json as write_json,
    write_text as write_text,
)
from ._hooks import MetricsHook as MetricsHook, metrics_hooks as metrics_hooks
from ._identity import (
    CHECKSUMS as CHECKSUMS,
    GONE as GONE,
    OwnFiles as OwnFiles,
    changes_of as changes_of,
    data_changes as data_changes,
    kept_sources as kept_sources,
    last_record as last_record,
    own_files as own_files,
    record_changes as record_changes,
    refuse_changes as refuse_changes,
    source_changes as source_changes,
    source_diff as source_diff,
)
from ._jsonl import (
    MetricsWriter as MetricsWriter,
    NoMetricsWriter as NoMetricsWriter,
    broken_losses as broken_losses,
    finite_or_none as finite_or_none,
    read_json_lines as read_json_lines,
)
from ._lock import Shard as Shard, had_shards as had_shards, starting_lock as starting_lock
from ._mllog import MlperfLog as MlperfLog
from ._trackers import check_trackers as check_trackers, open_trackers as open_trackers
from ._versions import (
    EXTRAS_OF_PACKAGES as EXTRAS_OF_PACKAGES,
    describe_software as describe_software,
    different_versions as different_versions,
    environment_changes as environment_changes,
    last_environment as last_environment,
    machine_text as machine_text,
    package_versions as package_versions,
)
