"""What models with grafts may have, one and not another. Here all is there; a joined file reads as if only its own was.

Modules ask by `if TWINS:`, `if not TWINS:` or `if TWINS and …:`. A joined file has the branch that is taken, and of
the question nothing; `classes.present_in` says what a model has. Not shipped.
"""

from __future__ import annotations

# What only planners check: no file has it.
CHECKED: bool = True
# Layers have expanded twins.
TWINS: bool = True
# In every forward something crosses layers: a router's choice, control states, a gate's decision.
CROSSES: bool = True
ROUTES: bool = True
MIXES: bool = True
GATES: bool = True
# A graft acts before a layer, after it, or stands in the model itself.
BEFORE: bool = True
AFTER: bool = True
COMPLETES: bool = True
# A graft has losses of its own, which apply in training, whatever the batch or where tokens' domains are known.
LOSSES: bool = True
MEASURES: bool = True
DOMAINS: bool = True
# Of adapters the gates classify domains.
CLASSIFIES: bool = True
# Layers that the base does not have, which a surgery inserted whole.
INSERTED: bool = True
# Modules of grafts stand in the places of native ones.
REPLACES: bool = True
# Grafts stand beside blocks.
SITES: bool = True
# Blocks have other names than grafts know them by, or are no modules.
SEATS: bool = True
SPANS: bool = True
# The text decoder's config is a part of the whole.
PARTS: bool = True
