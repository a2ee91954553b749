"""par-weipru: peers average pruned real weights entry by entry; Tian et al., MCE-PL, section V-C.

As avr-weipru (see there for our decisions), but the mean of an entry runs over the peers where it is not zero,
"partially averaging": entries that others have pruned do not shrink it.
"""

from rayfl.gather import ElementwiseMean
from rayfl.methods.base import Capabilities
from rayfl.methods.masks.avr_weipru import AvrWeipru


class ParWeipru(AvrWeipru):
    """avr-weipru with the mean of each entry over the peers where it is not zero."""

    paper = "Tian et al., MCE-PL, pruned real weights averaged by entry"
    capabilities = Capabilities(on_device=True)
    gather = {"weights": ElementwiseMean("nonzero")}
