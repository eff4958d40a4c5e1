"""All planted faults."""

from faults.decoding import DECODING
from faults.drafting import DRAFTING
from faults.kernels import KERNELS
from faults.operators import OPERATORS
from faults.passes import PASSES
from faults.policies import POLICIES
from faults.stores import STORES
from faults.telling import TELLING

FAULTS = [*OPERATORS, *KERNELS, *PASSES, *STORES, *POLICIES, *DRAFTING, *DECODING, *TELLING]
