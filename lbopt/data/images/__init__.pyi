from ._augment import Policy as Policy
from ._boxes import (
    INTERPOLATIONS as INTERPOLATIONS,
    central_box as central_box,
    check_boxes as check_boxes,
    check_interpolation as check_interpolation,
)
from ._dataset import (
    ImageDataset as ImageDataset,
    Preparation as Preparation,
    image_size_of as image_size_of,
)
from ._layout import image_shape as image_shape
from ._policy import check_policy as check_policy
from ._small import (
    LARGEST_IN_MEMORY_BYTES as LARGEST_IN_MEMORY_BYTES,
    SmallImages as SmallImages,
    load_image_arrays as load_image_arrays,
)
