"""The proof of a plan: the program itself, run small.

A twin of the base (its config with small sizes, random numbers in every parameter and buffer) is saved as a checkpoint.
The same plan is carried out on it by the same planner, writer, manifest and shipped code; transformers loads both, and
their outputs are compared as in `verify`: whole texts, over a cache, and by `generate`. So wrong names, roles, places,
settings of layers and silent tensors show before a byte of the output is written. A twin cannot show effects of the
base's own numbers.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from surgeon.anatomy.anatomy import OLD_NORMS, Anatomy
from surgeon.anatomy.dissect import dissect_folder
from surgeon.anatomy.family import Packed, with_fields
from surgeon.anatomy.grafted_config import is_grafted, native_config
from surgeon.anatomy.growth import part_of
from surgeon.anatomy.limits import vocabulary_of
from surgeon.anatomy.names import under_base
from surgeon.anatomy.quantised import packed_of
from surgeon.anatomy.silence import some_tokens
from surgeon.anatomy.skeleton import Skeleton, encoder_auto, wordless_auto
from surgeon.anatomy.twin import WIDTHS, fill, fill_buffers, shrunk, twin_of_small
from surgeon.blueprint.blueprint import Blueprint
from surgeon.blueprint.shards import MAX_NEW_SHARD_BYTES, lay_out
from surgeon.checkpoint.folder import CONFIG_FILE, CheckpointFolder
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.checkpoint.weights import QUANTISATION, SINGLE_FILE
from surgeon.common.devices import one_thread
from surgeon.common.disk_space import no_room, writing
from surgeon.common.library import LOAD_FAILURES, config_of, first_line, quiet_transformers
from surgeon.common.listener import Quiet, Stopwatch
from surgeon.errors import BadInput, SurgeonError, printable
from surgeon.grafts.bundle import CODE_FILE, bundle, import_bundle
from surgeon.grafts.composition import composition_of
from surgeon.manifest.compose import BaseId
from surgeon.manifest.reading import manifest_of
from surgeon.models.compare import compare_models, decoded, load_pair, trim_logits
from surgeon.models.load import load_model, running, stored_dtype
from surgeon.models.outputs import auto_class, compare_outputs
from surgeon.operations import OPERATIONS
from surgeon.operations.operation import NEURONS
from surgeon.operations.prepare import Facts, OpenedBase, Scale
from surgeon.plan.plan import LoadedPlan, draw
from surgeon.runtime.gate_rules import GATE
from surgeon.verification.decoding import check_decoding
from surgeon.verification.verify import static_proof
from surgeon.writing.quantised_twin import quantised, small_blocks
from surgeon.writing.shapes import HEAD, HEADS, HIDDEN, KEYS
from surgeon.writing.surgery import Drawing, surgery_job
from surgeon.writing.write import execute

# Numbers of heads to try, in order, until the model's code runs.
_HEADS = (2, 4, 8, 3, 1)
_SEED = 3
_HEAD = 8
# The factor of every second expert's row of a router: scores are then far apart for some tokens, as in a trained model,
# and close for others.
_LARGE = 8.0
# A twin has at least so many words, unless the base has fewer; and how many tokens are decoded one by one.
_WORDS, _STEPS = 100, 4
# A question for users whose own model cannot be run; left out of messages about twins.
_OF_USERS = "; is config.json its own, is memory short?"
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


def prove_small(drawn: Drawing, base: OpenedBase) -> None:
    """Carry the plan out on a twin of the base and compare both outputs, as far as the plan promises something.

    Raises BadInput where they differ, where the twin's output cannot be made or run, and where no step of training
    reaches the new parts.
    """
    blueprint, place = drawn.blueprint, Path(tempfile.gettempdir())
    with writing(place), tempfile.TemporaryDirectory(prefix="surgeon-twin-") as work, one_thread():
        twin = save_twin(base, blueprint, Path(work, "base"))
        opened = OpenedBase(twin, dissect_folder(twin))
        scale = Scale(base.anatomy, opened.anatomy, blueprint)
        plan, facts = smaller(drawn.plan, drawn.facts, scale)
        try:
            made = _carry_out(plan, facts, opened, Path(work, "out"))
            if any(OPERATIONS.plugin_of(each.op) for each in plan.plan.operations):
                _carry_out(plan, facts, opened, Path(work, "again"))
                _check_repeated(Path(work, "out"), Path(work, "again"))
            config = base.folder.config
            # The twin of a base with FP8 next to four-bit numbers is in full precision.
            alike = (QUANTISATION in config) == (QUANTISATION in twin.config)
            if alike and wordless_auto(native_config(config)) is None:
                _check_same_tensors(blueprint, made, base.folder.tensors.keys() - twin.tensors.keys())
            out = CheckpointFolder.open(Path(work, "out"))
            _compare(twin, out, made, blueprint, base.anatomy.derivation.stack)
            if wrong := [check for check in static_proof(twin, out, Quiet(), facts=False).checks if not check.holds]:
                raise BadInput(f"{wrong[0].name}: {wrong[0].detail}")
        except SurgeonError as error:
            if (full := no_room(error)) is not None:
                raise BadInput(f"{printable(str(place))}: {full}; name a folder with room in TMPDIR") from error
            told = str(error).replace(f"{work}/", "").removesuffix(_OF_USERS)
            first, *others = plan.plan.operations
            way = "apply its operations by plans of their own to see which one it is" if others else first.way_on
            if not others and (plugin := OPERATIONS.plugin_of(first.op)) is not None:
                way = f"mend `{first.op}` of plugin {plugin.shown}, or leave it out"
            raise BadInput(f"on a twin of this model, {told}; {way}") from error


def _carry_out(plan: LoadedPlan, facts: Mapping[int, Facts], base: OpenedBase, out: Path) -> Blueprint:
    """Carry a plan out on the twin, with the given facts instead of gathering them again."""
    blueprint = draw(plan, base.anatomy, base.folder.config, facts)
    shards = lay_out(blueprint.outputs, base.folder.tensors, max_new_shard_bytes=MAX_NEW_SHARD_BYTES)
    drawn = Drawing(plan, facts, blueprint, shards)
    job = surgery_job(drawn, base, BaseId("twin", None), device=lambda: "cpu", read_back=True)
    execute(replace(job, look=None), out, Quiet(), Stopwatch())
    return blueprint


def _check_repeated(out: Path, again: Path) -> None:
    """Raise BadInput where the same plan gave a new tensor other values the second time."""
    first, second = (manifest_of(CheckpointFolder.open(each)).new_tensors for each in (out, again))
    for name, made in first.items():
        if made.sha256 != second[name].sha256:
            raise BadInput(
                f"{printable(name)} gets other values each time it is made; its recipe must draw by `bench.draws(key)`"
            )


def smaller(plan: LoadedPlan, facts: Mapping[int, Facts], scale: Scale) -> tuple[LoadedPlan, dict[int, Facts]]:
    """Return (plan, facts) for a twin: numbers that fit only the base's sizes are replaced."""
    small = [each.small(facts.get(n), scale) for n, each in enumerate(plan.plan.operations)]
    made = plan.plan.model_copy(update={"operations": [operation for operation, _ in small]})
    known = {number: found for number, (_, found) in enumerate(small) if found is not None}
    entries = [each.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True) for each, _ in small]
    text = json.dumps({"surgeon": 1, "seed": made.seed, "operations": entries})
    # The plan of a head that training adds is written in another form, and no plan file can ask for it.
    asked = all(operation.op in OPERATIONS for operation in made.operations)
    return LoadedPlan(made, text if asked else plan.text, "the plan"), known


def save_twin(base: OpenedBase, blueprint: Blueprint, folder: Path) -> CheckpointFolder:
    """Save a twin of the base as a checkpoint whose tensors have the base's names and dtypes.

    Raises BadInput where transformers cannot build or run one.
    """
    config = _with_small_grafts(base.folder.config)
    small, twin = _running_twin(config, blueprint, base.anatomy)
    tensors = base.folder.tensors
    packed = packed_of(config, {name: (name,) for name in tensors}, tensors)
    stored = _by_name(twin, base, packed)
    for layer in (layer for dropped in blueprint.dropped.values() for layer in dropped):
        # Layers that are dropped as silent must be silent in the twin too.
        for suffix, value in base.anatomy.kinds[base.anatomy.kind_of[layer]].silence.items():
            if (held := stored.get(base.anatomy.layer_name(layer, suffix))) is not None:
                held.fill_(value)
    for layer, number in enumerate(base.anatomy.kind_of):
        for part in base.anatomy.kinds[number].parts:
            held = stored.get(base.anatomy.layer_name(layer, part.suffix))
            if held is not None and held.ndim > 1 and len(held) > 1 and part.blocks and part.blocks[0][0] == "router":
                held[::2].mul_(_LARGE)
    settings = small.pop(QUANTISATION, None)
    # Experts that the twin does not have are left out.
    if packed := {name: each for name, each in packed.items() if name in stored}:
        small[QUANTISATION] = small_blocks(settings)
        stored = quantised(stored, packed, base.folder, small[QUANTISATION])
    folder.mkdir()
    if is_grafted(small):
        (folder / CODE_FILE).write_bytes(bundle(small))
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / SINGLE_FILE, {"format": "pt"})
    if wordless_auto(native_config(small)) is not None:
        # Whatever head the base has, the twin gets a language head.
        small["architectures"] = [type(twin.model).__name__]
    if not is_grafted(small):
        # A tokenizer's own code is no part of the model.
        small.pop("auto_map", None)
    (folder / CONFIG_FILE).write_text(json.dumps(small), encoding="utf-8")
    return CheckpointFolder.open(folder)


def _running_twin(config: Mapping[str, Any], blueprint: Blueprint, anatomy: Anatomy) -> tuple[dict[str, Any], Skeleton]:
    """Return (config, twin) of the first small size that runs. Raises BadInput where none does."""
    failed: Exception | None = None
    for small in _small_configs(config, blueprint, anatomy):
        try:
            twin = _grafted_twin(small) if is_grafted(small) else twin_of_small(small, seed=_SEED)
            with torch.no_grad():
                twin.model(input_ids=some_tokens(twin))
            return small, twin
        except (BadInput, *LOAD_FAILURES) as error:
            failed = failed or error
    assert failed is not None
    raise BadInput(f"a twin of this model cannot be run ({first_line(failed)}), so nothing can be proven of it")


def _with_small_grafts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with small grafts: a graft sized for a large FFN would be many times a twin's width."""
    if not is_grafted(config):
        return config

    def fewer(entry: Any) -> Any:
        """Return a graft's entry with a size of at most `NEURONS`; an entry without a size as it is."""
        sized = isinstance(entry, Mapping) and isinstance(entry.get("size"), int)
        return {**entry, "size": min(entry["size"], NEURONS)} if sized else entry

    surgery = config["surgery"]
    made = {key: list(map(fewer, each)) if isinstance(each, list) else each for key, each in surgery.items()}
    return {**config, "surgery": made}


def _grafted_twin(config: Mapping[str, Any]) -> Skeleton:
    """Return a twin of a base with grafts, built by its shipped code, with its gates open.

    Raises BadInput where the shipped code cannot build it.
    """
    trunk = twin_of_small(native_config(config), seed=_SEED)
    composition = composition_of(config)
    assert composition is not None
    name = None if composition.encoder else composition.class_of(composition.auto)
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            kind = getattr(import_bundle(config), name or str(config["architectures"][0]))
            model = kind._from_config(config_of(config, kind.config_class)).float().eval()
    except LOAD_FAILURES as error:
        raise BadInput(f"config.json: the grafted model cannot be built from it ({first_line(error)})") from error
    fill(model, _SEED)
    fill_buffers(model, _SEED)
    model.tie_weights()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith(f"{GATE}threshold"):
                # A closed gate would hide what it switches.
                value.fill_(-1.0)
    return replace(trunk, model=model)


def _small_configs(config: Mapping[str, Any], blueprint: Blueprint, anatomy: Anatomy) -> Iterator[dict[str, Any]]:
    """Yield configs of twins to try; the first that runs is used.

    Where the plan changes heads, the twin has the base's own number of heads, as the plan states the new number. Its
    stream is divisible by both numbers, as many classes require.
    """
    experts = any("expert" in key or "top_k" in key or "topk" in key for key in blueprint.resized)
    changed = {key: blueprint.resized[key] for key in (HEADS, KEYS) if key in blueprint.resized}
    if changed:
        sizes = anatomy.sizes
        divided = math.lcm(sizes.heads, changed.get(HEADS, sizes.heads))
        width = divided * -(-NEURONS // divided)
        # Sizes that equal the stream's in the base equal it in the twin: OPT projects no embeddings of that width.
        part = part_of(config, anatomy.derivation.path)
        wide = [key for key, value in part.items() if WIDTHS.fullmatch(key) and value == sizes.hidden]
        own = {HEADS: sizes.heads, KEYS: sizes.kv_heads, HIDDEN: width, **dict.fromkeys(wide, width)}
        for size in (_HEAD, sizes.head_dim):
            small = shrunk(config, heads_left=sizes.heads)
            yield with_fields(small, anatomy.derivation.path, own | {HEAD: size})
    for heads in _HEADS:
        yield shrunk(config, heads_left=heads, all_experts=experts)


def _by_name(twin: Skeleton, base: OpenedBase, packed: Mapping[str, Packed]) -> dict[str, Tensor]:
    """Return a twin's tensors as transformers saves them, by the base's names and in the base's dtypes.

    Tensors that the base stores quantised (`packed`) are in full precision.
    """
    with tempfile.TemporaryDirectory(prefix="surgeon-twin-") as folder, quiet_transformers():
        twin.model.save_pretrained(folder)
        saved = dict(load_file(Path(folder, SINGLE_FILE)))
    # A checkpoint may store a tied tensor twice.
    tied = twin.model.all_tied_weights_keys.items()
    saved |= {name: saved[of].clone() for name, of in tied if of in saved and name not in saved}
    found: dict[str, Tensor] = {}
    left = set(saved) - twin.model.all_tied_weights_keys.keys()
    if wordless_auto(native_config(base.folder.config)) is not None:
        # The saved names are those of another class, the one with the language head.
        return {name: saved[name] for name in left}
    for name, info in base.folder.tensors.items():
        place = _place_in(packed[name].suffix if name in packed else name, saved, twin)
        if place is not None:
            dtype = stored_dtype(info.dtype) if info.dtype in FLOAT_DTYPES else saved[place].dtype
            found[name] = saved[place].to(dtype)
            left.discard(place)
    # Tensors that a checkpoint may lack, such as a head.
    return found | {name: saved[name] for name in left}


def _place_in(name: str, held: Mapping[str, Tensor], twin: Skeleton) -> str | None:
    """Return the name in `held` of a stored tensor, whose own name may lack the base model's prefix or use old words.

    None where the model has no such tensor.
    """
    old = next((old for old in OLD_NORMS if name.endswith(f".{old}")), None)
    present = name if old is None else name.removesuffix(old) + OLD_NORMS[old]
    prefix = f"{twin.model.base_model_prefix}."
    tried = (present, f"{prefix}{present}", present.removeprefix(prefix), under_base(twin.model, present))
    return next((each for each in tried if each in held), None)


def _check_same_tensors(blueprint: Blueprint, small: Blueprint, unread: AbstractSet[str]) -> None:
    """Raise BadInput where the twin's output has other layers or new tensors than the output will have.

    Tensors that no class reads (`unread`), such as those of layers that predict further tokens, are ignored, and so are
    single experts, of which a twin may have fewer.
    """
    orders = [[(layer.like, layer.base, layer.opened) for layer in each.layers] for each in (blueprint, small)]
    if orders[0] != orders[1]:
        raise BadInput("the plan makes other layers")
    # A twin may have fewer experts.
    names = [
        {output.name for output in each.outputs if output.new and not _EXPERT.search(output.name)}
        for each in (blueprint, small)
    ]
    if odd := sorted((names[0] ^ names[1]) - unread):
        raise BadInput(f"the plan makes other tensors ({printable(odd[0])})")


def _compare(base: CheckpointFolder, out: CheckpointFolder, made: Blueprint, blueprint: Blueprint, stack: str) -> None:
    """Compare the outputs of two twins, as far as the blueprint promises something.

    Raises SurgeonError where they differ. `made` is the twin's blueprint, `blueprint` the base's; `stack` is the path
    of the base's layers.
    """
    native, auto = native_config(base.config), auto_class(base.config)
    if encoder_auto(native) is not None:
        for dtype in ("float32", "bfloat16"):
            found = compare_outputs(base, out, _tokens(_WORDS), auto=auto, dtype=dtype, device="cpu")
            _check_promise([found], blueprint)
        if is_grafted(out.config):
            check_learns(load_model(out, auto=auto), _tokens(_WORDS), blueprint, encoder=True)
        return
    words = vocabulary_of(native) or _WORDS
    if made.kept_tokens is not None:
        words = len(made.kept_tokens)
    ids, promised = _tokens(min(words, _WORDS)), blueprint.promise != "none"
    dtypes = ("bfloat16", "float32") if promised else ("float32",)
    # bfloat16 weights are the same numbers in float32, so both models are loaded once.
    once = QUANTISATION in base.config or {"F64", "F32", "F16"}.isdisjoint(info.dtype for info in base.tensors.values())
    for dtype in dtypes:
        if dtype == dtypes[0] or not once:
            one, other = load_pair(base, out, dtype=dtype)
            if made.kept_tokens is not None:
                trim_logits(one, other, made.kept_tokens)
            # The output need not do what the base cannot do.
            steps = _STEPS if _decodes(one, ids) else 0
        else:
            one, other = one.float(), other.float()
        _check_promise(compare_models(one, other, ids, new=made.new_rows, decode_tokens=steps), blueprint)
    if promised and type(one) is type(other):
        _check_images(one, other, ids, stack)
    if is_grafted(out.config):
        check_learns(other, ids, blueprint)
        if not (check := check_decoding(other, ids)).holds:
            raise BadInput(check.detail)


def _tokens(words: int) -> Tensor:
    """Return two texts of 32 random tokens below `words`."""
    return torch.randint(3, words, (2, 32), generator=torch.Generator().manual_seed(_SEED))


def _decodes(model: Any, ids: Tensor) -> bool:
    """Return whether a model runs over a cache; any surgeon error counts as no."""
    try:
        with torch.inference_mode():
            for _ in decoded(model, ids, 1):
                pass
    except SurgeonError:
        return False
    return True


def _check_promise(found: Sequence[Any], blueprint: Blueprint) -> None:
    """Raise BadInput for a difference that the promise does not allow."""
    exact = blueprint.promise == "exact"
    rounded = blueprint.promise == "rounding" or any(each.claim.in_float32 for each in blueprint.operations)
    for each in found:
        if not (each.identical if exact else each.rounded or not rounded):
            raise BadInput(
                f"the {each.output} ({each.mode}, {each.dtype}) are not the base's, by up to"
                f" {each.max_abs_difference:.3g} of {each.largest:.3g}"
            )


def _check_images(base: Any, out: Any, ids: Tensor, stack: str) -> None:
    """Raise BadInput where an image's features for several layers (DeepStack) reach other layers than in the base.

    Models without such features are not checked.
    """
    one, other = (_with_image(model, ids, stack) for model in (base, out))
    if one is not None and other is not None and not torch.equal(one, other):
        raise BadInput(
            "an image would reach other layers: this model adds features of images to its lowest ones, by their numbers"
        )


def _with_image(model: Any, ids: Tensor, stack: str) -> Tensor | None:
    """Return the text decoder's states for a text and an image's features that enter several layers.

    None where the decoder accepts no such features. They are random: what matters is which layer gets which.
    """
    decoder = model.get_submodule(stack.rpartition(".")[0])
    taken = inspect.signature(decoder.forward).parameters
    draws = torch.Generator().manual_seed(2)
    where = torch.zeros(ids.shape, dtype=torch.bool)
    where[:, 2:6] = True

    def features(count: int) -> list[Tensor]:
        """Return `count` random features of an image, one for each layer that gets them."""
        width = model.config.get_text_config().hidden_size
        return [torch.randn(int(where.sum()), width, generator=draws) for _ in range(count)]

    fields = model.config.to_dict()
    given: dict[str, Any]
    if "deepstack_visual_embeds" in taken:
        given = {"deepstack_visual_embeds": features(len(_found(fields, "deepstack_visual_indexes") or ()))}
    elif "deepstack_features" in taken:
        numbers = [layer for _, layer in _found(fields, "deepstack_layer_map") or ()]
        given = {"deepstack_features": dict(zip(numbers, features(len(numbers)), strict=True))}
    else:
        return None
    masks = {"visual_pos_masks": where, "vision_mask": where[..., None]}
    given |= {name: mask for name, mask in masks.items() if name in taken}
    with torch.inference_mode(), running(model):
        embedded = model.get_input_embeddings()(ids)
        hidden: Tensor = decoder(inputs_embeds=embedded, use_cache=False, **given).last_hidden_state
    return hidden


def _found(fields: Mapping[str, Any], key: str) -> Any:
    """Return a field of a config, from whichever nested part has it; None where no part has it."""
    if fields.get(key):
        return fields[key]
    parts = (value for value in fields.values() if isinstance(value, Mapping))
    return next((found for part in parts if (found := _found(part, key))), None)


def check_learns(model: Any, ids: Tensor, blueprint: Blueprint, *, encoder: bool = False) -> None:
    """Raise BadInput where a step of training fails, or gives the new parts no gradient.

    In an encoder every new control must get a gradient; elsewhere one new tensor with a gradient is enough. Where no
    new tensor gets one, the step is repeated once with the signs of all new tensors changed.
    """
    model = model.float().train()
    names = set(model.freeze_base())
    made_by = [note.operation for layer in blueprint.layers for note in layer.grafts if note.operation is not None]
    if not names and any(blueprint.operations[number].trains == "new" for number in made_by):
        raise BadInput("the output's `freeze_base` names no new parameter, so training would leave them all out")
    new = {name: value for name, value in model.named_parameters() if name in names}
    # An earlier surgery's grafts may stay frozen. A gate may happen to be shut for all of these tokens; with the
    # opposite signs it is open for some.
    for _ in range(2 if new else 0):
        with running(model):
            if encoder:
                _backward(model, ids)
            else:
                model(input_ids=ids, labels=ids, domain_ids=torch.ones(len(ids), dtype=torch.long)).loss.backward()
        reached = {name for name, value in new.items() if value.grad is not None and bool(value.grad.any())}
        if encoder and (still := [name for name in new if name.endswith("lora_B") and name not in reached]):
            raise BadInput(f"{still[0]} gets no gradient, so it would never learn")
        if reached:
            break
        with torch.no_grad():
            for value in new.values():
                value.neg_()
    else:
        if new:
            raise BadInput("what is new gets no gradient, so it would never learn")
    model.eval()


def _backward(model: Any, ids: Tensor) -> None:
    """Compute gradients of a random weighting of an encoder's output."""
    # With a flow object of the caller's own; without it the model complains that its losses are unused.
    flow = sys.modules[type(model).__module__].Flow()
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), return_dict=True, surgery_flow=flow)[0]
    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
