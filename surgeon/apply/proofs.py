"""What is known of a plan's promise: proven on a twin now, proven before, or still to be proven by `apply`.

A proof counts again for the same config, the same plan as far as a twin shows it, the same versions and code of
surgeon and plugins. It is kept in the user's folder for caches, so that only the first `apply` of a plan to models of a
config takes the seconds that torch and transformers need to start.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError

from surgeon.apply.shapes import changed_counts
from surgeon.blueprint.blueprint import Blueprint, Layer, Output
from surgeon.blueprint.recipes import Constant, Copy, Joined, Means
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.checkpoint.weights import quantisation
from surgeon.common.cache import MAX_ENTRY_BYTES, cache_folder, read_entry, write_entry
from surgeon.common.formatting import show_layers
from surgeon.common.promises import CONDITION
from surgeon.common.schema import Bounded
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy
from surgeon.families.anatomy_cache import digest_of, found_with, versions
from surgeon.families.grafted_config import is_grafted, native_config
from surgeon.families.vocabulary import with_vocabulary
from surgeon.runtime.bundle import bundle

# Raised whenever entries mean something else.
_FORMAT = 1
_KIND = "proofs"
_MOST = 1024
# What a twin is made and run by.
_LIBRARIES = ("transformers", "torch")

How = Literal["proven", "cached", "promised", "none"]


class _Entry(Bounded):
    """One proof that held."""

    model_config = ConfigDict(strict=False)

    key: str
    day: datetime.date


@dataclass(frozen=True)
class Proof:
    """How the promise of a plan is known to hold; `none` where it promises less than exactness, so no twin is run.

    `seconds` is what the proof took where it was `proven` now, `day` when it was where it is `cached`; `libraries` are
    the versions that it ran on.
    """

    how: How
    seconds: float = 0.0
    day: datetime.date | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """In words; empty where nothing is proven."""
        shown = ", ".join(f"{name} {version}" for name, version in self.libraries.items())
        match self.how:
            case "proven":
                known = f"proven on a twin ({self.seconds:.1f} s)"
            case "cached":
                known = f"proven on a twin of this config before (cached {self.day}; {shown})"
            case "promised":
                known = "promised; apply proves it on a twin before it writes"
            case _:
                return ""
        return f"{known}, {CONDITION}"

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return {"how": self.how, "text": self.text, "libraries": dict(self.libraries)}


NOTHING_TO_PROVE = Proof("none")


def promised(blueprint: Blueprint) -> Proof:
    """What is known of a blueprint's promise where nobody has looked."""
    return Proof("promised", libraries=_run_by()) if blueprint.promise == "exact" else NOTHING_TO_PROVE


def known_proof(blueprint: Blueprint, anatomy: Anatomy, config: Mapping[str, Any]) -> Proof:
    """What the cache knows of a blueprint's promise for a base of this `config`."""
    if (unproven := promised(blueprint)).how == "none":
        return unproven
    folder = cache_folder(_KIND)
    key = _key(blueprint, anatomy, config) if folder is not None else ""
    content = read_entry(folder, f"{key}.json") if folder is not None else None
    if content is None:
        return unproven
    try:
        entry = _Entry.model_validate(parse_json_strict(content, file=key, max_bytes=MAX_ENTRY_BYTES))
    except (BadInput, ValidationError):
        return unproven
    return Proof("cached" if entry.key == key else "promised", day=entry.day, libraries=_run_by())


def prove(blueprint: Blueprint, anatomy: Anatomy, config: Mapping[str, Any]) -> Proof:
    """Prove on a twin that a blueprint keeps its promise of exactness, and keep that in the cache.

    Raises BadInput, which says where the twin of the output differs from that of the base.
    """
    began = time.perf_counter()
    _prove(blueprint, anatomy, config)
    if blueprint.promise != "exact":
        return NOTHING_TO_PROVE
    if (folder := cache_folder(_KIND)) is not None:
        entry = _Entry(key=_key(blueprint, anatomy, config), day=datetime.date.today())
        write_entry(folder, f"{entry.key}.json", entry.model_dump_json().encode(), most=_MOST)
    return Proof("proven", time.perf_counter() - began, libraries=_run_by())


def _prove(blueprint: Blueprint, anatomy: Anatomy, config: Mapping[str, Any]) -> None:
    counts = changed_counts(blueprint, anatomy, config)
    if counts and (blueprint.promise != "none" or any(each.claim.in_float32 for each in blueprint.operations)):
        from surgeon.apply.expert_proof import prove_experts

        prove_experts(blueprint, anatomy, config, counts)
        if len(blueprint.operations) == 1:
            return
    if blueprint.promise != "exact":
        _check_runs(blueprint, anatomy)
        if blueprint.kept_tokens is not None:
            from surgeon.apply.twin_proof import prove_rows

            prove_rows(anatomy, config, 0)
        if blueprint.promise == "rounding":
            # Imports torch and transformers, which a plan that promises nothing does without.
            from surgeon.apply.width_proof import prove_widths

            prove_widths(blueprint, anatomy, config)
        return
    if blueprint.extracted:
        _check_text(blueprint, anatomy)
        return
    if quantisation(config) is not None and quantisation(blueprint.config) is None:
        from surgeon.apply.number_proof import prove_numbers

        prove_numbers(blueprint, config)
        return
    if _only_moves(blueprint, config):
        from surgeon.apply.expert_proof import prove_moves

        prove_moves(blueprint, anatomy, config)
        return
    from surgeon.apply.twin_proof import prove_blueprint, prove_rows

    if anatomy.derivation.same_names:
        prove_blueprint(blueprint, anatomy, config)
        return
    _prove_moves(blueprint, anatomy)
    if blueprint.new_rows or blueprint.kept_tokens is not None:
        prove_rows(anatomy, config, len(blueprint.new_rows))
    elif blueprint.converted:
        prove_blueprint(blueprint, anatomy, config)


def _only_moves(blueprint: Blueprint, config: Mapping[str, Any]) -> bool:
    """Whether an output is the base's model, and bytes of the base stand in tensors of other names."""
    made = [output for output in blueprint.outputs if output.new]
    return blueprint.config == config and bool(made) and all(output.kept.covered for output in made)


def _check_runs(blueprint: Blueprint, anatomy: Anatomy) -> None:
    """Have a twin without the layers that a plan takes out run. Raises BadInput where it does not."""
    gone = [layer for dropped in blueprint.dropped.values() for layer in dropped]
    if not gone:
        return
    try:
        anatomy.derivation.check_runs(native_config(blueprint.config))
    except BadInput as error:
        raise BadInput(f"without {show_layers(sorted(gone))} {error}") from error


def _prove_moves(blueprint: Blueprint, anatomy: Anatomy) -> None:
    """Have a twin grow, get grafts and be untied as the blueprint says, though its tensors have other names in memory.

    Raises BadInput where its logits differ.
    """
    layers = blueprint.layers
    gone = [layer for dropped in blueprint.dropped.values() for layer in dropped]
    config = blueprint.config
    if blueprint.new_rows or blueprint.kept_tokens is not None:
        # A twin has words of its own.
        config = with_vocabulary(config, anatomy, anatomy.sizes.vocabulary)
    trunk = native_config(config)
    if not blueprint.native:
        anatomy.derivation.prove_grafts(trunk, config)
    if len(layers) == anatomy.sizes.layers and not gone and not blueprint.untied:
        return
    if blueprint.untied:
        _check_head(blueprint, anatomy)
    constants = {
        o.name: o.recipe.value
        for o in blueprint.outputs
        if o.new and isinstance(o.recipe, Constant) and not isinstance(o.recipe.value, tuple)
    }
    anatomy.derivation.prove(
        trunk,
        [layer.like for layer in layers],
        [layer.base is not None for layer in layers],
        [
            {
                s: constants[name]
                for s in anatomy.layers[layer.like]
                if (name := anatomy.layer_name(layer.index, _stored_as(anatomy, layer, s))) in constants
            }
            for layer in layers
        ],
        {layer: anatomy.kinds[anatomy.kind_of[layer]].silence for layer in gone},
    )


def _check_text(blueprint: Blueprint, anatomy: Anatomy) -> None:
    """Raise BadInput where a text model is another than its tower, of which a twin has the base's logits."""
    config, names = anatomy.derivation.text_model()
    made = {output.name: output.recipe.sources for output in blueprint.outputs if not output.computed}
    odd = next((name for old, name in names.items() if [*made.get(name, ())] != [old]), None)
    if odd is not None or blueprint.config != config or len(made) != len(names):
        raise BadInput(
            f"{printable(odd or 'config.json')}: the plan makes something else than the text tower of the base"
        )


def _check_head(blueprint: Blueprint, anatomy: Anatomy) -> None:
    """Raise BadInput where an untied head is something else than what it was tied to, as it is in the twin's."""
    made = {output.name: output.recipe for output in blueprint.outputs}
    for name, source in anatomy.derivation.head_tensors().items():
        recipe = made.get(name)
        same = recipe is not None and recipe == made[source]
        if not same and not (isinstance(recipe, Copy) and recipe.source == source):
            raise BadInput(
                f"{printable(name)}: the plan makes it something else than {printable(source)}, so"
                " logits are not the base's"
            )


def _stored_as(anatomy: Anatomy, layer: Layer, suffix: str) -> str:
    """What the output calls a tensor of the layer that it is like."""
    return anatomy.kinds[anatomy.kind_of[layer.like]].name_opened(suffix) if layer.opened else suffix


def _run_by() -> dict[str, str]:
    found = versions()
    return {name: found[name] for name in _LIBRARIES}


def _key(blueprint: Blueprint, anatomy: Anatomy, config: Mapping[str, Any]) -> str:
    """What a proof follows from: config and plan as far as a twin shows them, shipped code, libraries, surgeon."""
    code = [hashlib.sha256(bundle(each)).hexdigest() for each in (config, blueprint.config) if is_grafted(each)]
    gone = {
        layer: dict(anatomy.kinds[anatomy.kind_of[layer]].silence)
        for dropped in blueprint.dropped.values()
        for layer in dropped
    }
    layers = [[layer.like, layer.base is not None, layer.opened] for layer in blueprint.layers]
    outputs = [[output.name, output.new, *_shape_of(output, blueprint.words)] for output in blueprint.outputs]
    plan = [blueprint.config, layers, outputs, sorted(gone.items())]
    return digest_of([_FORMAT, found_with(), dict(config), code, plan])


def _shape_of(output: Output, words: Mapping[str, Any]) -> list[Any]:
    """What a twin shows of a recipe: what is computed is random there."""
    recipe = output.recipe
    if recipe.computed and not all(isinstance(each, Constant | Copy | Joined | Means) for each in recipe.walk()):
        return [type(recipe).__name__]
    return [words[output.name], list(recipe.shape)]
