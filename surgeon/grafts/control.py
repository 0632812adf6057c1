"""Control blocks, as planners know them: which interpolators they name, and what is checked of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from surgeon.grafts.checks import check_layers, fraction, loss_weight, one_of
from surgeon.grafts.kinds import Kind, KnownGraft
from surgeon.runtime.control_rules import INTERPOLATOR, ControlRules, ControlSpec
from surgeon.runtime.interpolators import Interpolation, InterpolatorSpec
from surgeon.runtime.rules import BRANCH, Surgery

DIVERGENCES = ("mse", "cosine", "none")
NO_ATTENTION = (
    "divergence `attention` compares attention maps, which sdpa, flash and flex attention never form;"
    " use `mse` or `cosine`"
)


class ControlKind(Kind):
    """A control block: an expanded twin of the layer, and an interpolator."""

    key = "control"
    mark = "C"
    in_twin = "refused"
    branching = True

    def text(self, entry: Mapping[str, Any], where: str = "") -> str:
        """`control block, lerp`."""
        return f"control block, {entry['interpolator']['kind']}"

    def claims(self, suffix: str) -> bool:
        """All of a twin that no other graft claims, and the interpolator."""
        return suffix.startswith((BRANCH, INTERPOLATOR))


class KnownControl(KnownGraft, ControlRules):
    """Control blocks; `interpolators` are those that can be named."""

    kinds = (ControlKind(),)
    part = "surgeon.runtime.control"
    module = "ControlGraft"
    roles = ()

    def uses(self, raw: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
        """The interpolators that its entries name."""
        entries = raw.get("control")
        stated = [entry.get("interpolator") for entry in entries if isinstance(entry, Mapping)] if entries else []
        named = {str(told.get("kind", "lerp")) if isinstance(told, Mapping) else "lerp" for told in stated}
        kinds = {key: type(rule) for key, rule in self.interpolators.items() if key in named}
        return tuple((key, kind.__module__, kind.__name__) for key, kind in kinds.items())

    def check(self, surgery: Surgery, config: Any) -> None:
        """Entries hold together, layers exist, and what projects has something to project for."""
        blocks: dict[int, ControlSpec] = surgery.of[self.name]
        check_layers(blocks, surgery.trunk_layers, "control")
        for block in blocks.values():
            one_of("interpolator kind", block.interpolator.kind, self.interpolators)
            rule = self.interpolators[block.interpolator.kind]
            check_interpolator(rule, block.interpolator, self.interpolators.values())
            if block.divergence.kind == "attention":
                raise ValueError(f"config.surgery: {NO_ATTENTION}")
            one_of("divergence kind", block.divergence.kind, DIVERGENCES)
            loss_weight("divergence weight", block.divergence.weight)
            if rule.projects and block.divergence.kind == "none":
                raise ValueError(
                    f"config.surgery: layer {block.layer} projects for a divergence that is `none`; "
                    "its matrix would never train: use `lerp`"
                )


def check_interpolator(rule: Interpolation, spec: InterpolatorSpec, known: Iterable[Interpolation]) -> None:
    """ValueError where α is no share, or the spec asks for what the rule has not; `known` are those to choose from."""
    fraction("alpha", spec.alpha)
    if spec.inference_alpha is not None:
        fraction("inference_alpha", spec.inference_alpha)
    if spec.inference_alpha is not None and not rule.scalar_alpha:
        others = ", ".join(each.key for each in known if each.scalar_alpha)
        raise ValueError(
            f"config.surgery: inference_alpha needs an interpolator with one α for all tokens "
            f"({others}), not `{rule.key}`"
        )
    # A logit holds α where it is learned or added to a gate's output; 0 and 1 have none.
    if (spec.learnable or not rule.scalar_alpha) and not 0.0 < spec.alpha < 1.0:
        raise ValueError(
            f"config.surgery: alpha is {spec.alpha}; where `{rule.key}` learns it must lie between 0 and 1, exclusive"
        )
