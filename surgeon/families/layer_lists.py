"""Lists of a config with an entry for each layer that config.json leaves out, as transformers derives them.

A class may derive such a list from an interval or a pattern (SmolLM3's `no_rope_layers`), and would derive another for
a model with more layers: so it is written out before layers are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgeon.common.library import LOAD_FAILURES, config_of, first_line
from surgeon.errors import BadInput, printable
from surgeon.families.family import OWN_CONFIG, Family, per_layer_lists


def unlisted(config: Mapping[str, Any], family: Family, layers: int) -> dict[str, list[Any]]:
    """The lists of one entry for each of `layers` layers that transformers makes of this config and it does not state.

    Empty for families whose lists are known. Raises BadInput where transformers has no config of this type, or cannot
    read it.
    """
    if family.lists_known:
        return {}
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    try:
        full = config_of(config, CONFIG_MAPPING[model_type]).to_dict()
    except KeyError as error:
        raise BadInput(
            f"config.json: the installed transformers has no model_type {printable(repr(model_type))}; update it"
        ) from error
    except LOAD_FAILURES as error:
        raise BadInput(f"config.json: transformers cannot read it ({first_line(error)}); {OWN_CONFIG}") from error
    return {key: value for key, value in per_layer_lists(full, layers).items() if config.get(key) is None}
