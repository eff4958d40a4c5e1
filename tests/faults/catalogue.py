"""All planted faults."""

from faults.decoding import DECODING
from faults.drafting import DRAFTING
from faults.operators import OPERATORS
from faults.policies import POLICIES
from faults.stores import STORES

FAULTS = [*OPERATORS, *STORES, *POLICIES, *DRAFTING, *DECODING]
