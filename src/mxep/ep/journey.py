"""Old name of `mxep.ep.blocks`."""

import sys

from mxep.deprecation import warn_deprecated
from mxep.ep import blocks

warn_deprecated("mxep.ep.journey", "mxep.ep.blocks", since="0.2")
sys.modules[__name__] = blocks
