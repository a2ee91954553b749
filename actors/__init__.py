"""The runtime on Ray. Each of its processes is prepared for arithmetic before anything here loads numpy or torch."""

import logging

from actors.ray_internals import prepare_plain_ray
from rayfl.determinism.process import prepare_process

prepare_process()
prepare_plain_ray()
# When it is imported in a notebook, Ray recommends a package that rayfl does not need.
logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
