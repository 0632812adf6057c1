"""Control blocks for planners: the interpolators that they name, and the checks of their entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from surgeon.grafts.checks import check_layers, fraction, loss_weight, one_of
from surgeon.grafts.kinds import Kind, KnownGraft
from surgeon.runtime.control_rules import INTERPOLATOR, ControlRules, ControlSpec
from surgeon.runtime.interpolators import Interpolation, InterpolatorSpec
from surgeon.runtime.rules import BRANCH, Surgery

DIVERGENCES = ("mse", "cosine", "none")


class ControlKind(Kind):
    """A control block: an expanded twin of the layer, and an interpolator."""

    key = "control"
    mark = "C"
    in_twin = "refused"
    branching = True

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """Return a text like `control block, lerp`."""
        return f"control block, {entry['interpolator']['kind']}"

    def claims(self, suffix: str) -> bool:
        """Return whether the tensor is in a twin, or belongs to the interpolator.

        Other grafts inside a twin claim their own tensors first (`owner_of`).
        """
        return suffix.startswith((BRANCH, INTERPOLATOR))


class KnownControl(KnownGraft, ControlRules):
    """Control blocks, as planners use them; `interpolators` are those that entries can name."""

    kinds = (ControlKind(),)
    part = "surgeon.runtime.control"
    module = "ControlGraft"
    roles = ()

    def uses(self, raw: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
        """Return the interpolators that the entries name, as (key, module, class)."""
        entries = raw.get("control")
        stated = [entry.get("interpolator") for entry in entries if isinstance(entry, Mapping)] if entries else []
        named = {str(told.get("kind", "lerp")) if isinstance(told, Mapping) else "lerp" for told in stated}
        kinds = {key: type(rule) for key, rule in self.interpolators.items() if key in named}
        return tuple((key, kind.__module__, kind.__name__) for key, kind in kinds.items())

    def check(self, surgery: Surgery, config: Any) -> None:
        """Check that entries are consistent and layers exist. Raises ValueError.

        An interpolator that projects also needs a divergence to be trained by.
        """
        blocks: dict[int, ControlSpec] = surgery.of[self.name]
        check_layers(blocks, surgery.trunk_layers, "control")
        for block in blocks.values():
            one_of("interpolator kind", block.interpolator.kind, self.interpolators)
            rule = self.interpolators[block.interpolator.kind]
            check_interpolator(rule, block.interpolator, self.interpolators.values())
            one_of("divergence kind", block.divergence.kind, DIVERGENCES)
            loss_weight("divergence weight", block.divergence.weight)
            if rule.projects and block.divergence.kind == "none":
                raise ValueError(
                    f"config.surgery: layer {block.layer} projects for a divergence that is `none`; "
                    "its matrix would never train: use `lerp`"
                )


def check_interpolator(rule: Interpolation, spec: InterpolatorSpec, known: Iterable[Interpolation]) -> None:
    """Raise ValueError where α is not in its range, or the rule lacks an option of the spec.

    `known` are the interpolators to choose from.
    """
    fraction("alpha", spec.alpha)
    if spec.inference_alpha is not None:
        fraction("inference_alpha", spec.inference_alpha)
    if spec.inference_alpha is not None and not rule.scalar_alpha:
        others = ", ".join(each.key for each in known if each.scalar_alpha)
        raise ValueError(
            f"config.surgery: inference_alpha needs an interpolator with one α for all tokens "
            f"({others}), not `{rule.key}`"
        )
    # Where α is learned, or added to a gate's output, it is stored as a logit, which 0 and 1 do not have.
    if (spec.learnable or not rule.scalar_alpha) and not 0.0 < spec.alpha < 1.0:
        raise ValueError(
            f"config.surgery: alpha is {spec.alpha}; where `{rule.key}` learns it must lie between 0 and 1, exclusive"
        )
