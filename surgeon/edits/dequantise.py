"""`dequantise`: the numbers that quantised tensors stand for, in full precision.

transformers multiplies a number of FP8 (in blocks), of four bits (MXFP4) or of few bits (as compressed-tensors packs
them, whose package unpacks them) by its scale when it loads such a model in full precision. Here the products are
stored, each rounded once, and the quantisation entry of config.json is removed.

A GGUF file is a base whose numbers transformers' loader has made already (`surgeon.models.gguf_file`): they are
kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import Field

from surgeon.anatomy.compressed import OF_ACTIVATIONS, packs_of
from surgeon.anatomy.quantised import is_scale, packed_of
from surgeon.blueprint.blueprint import Claim, OperationRecord
from surgeon.blueprint.draft import Draft, Outer
from surgeon.blueprint.recipes import Copy, Dequantised, Recipe, Unpacked
from surgeon.checkpoint.header import QUANTISED_DTYPES, TensorInfo
from surgeon.checkpoint.source import GGUF_RECORD, MAX_SIDE_FILE_BYTES
from surgeon.checkpoint.strict_json import parse_json_strict
from surgeon.checkpoint.weights import COMPRESSED, QUANTISATION, quantisation
from surgeon.common.schema import Many
from surgeon.errors import BadInput, printable
from surgeon.operations.operation import Operation, Paper, TrainingDefaults
from surgeon.operations.prepare import Facts, OpenedBase

# The dtype that transformers uses where config.json names none, and the stored dtypes.
_DTYPE = "bfloat16"
_STORED = {"bfloat16": "BF16", "float16": "F16"}
_SHOWN = {"fp8": "FP8", "mxfp4": "MXFP4"}


class GgufFacts(Facts):
    """The GGUF file that the base is read from: its name, digest, and the types of its tensors; empty for others."""

    file: str | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    types: dict[str, Many] = {}  # noqa: RUF012  # pydantic copies it


class Dequantise(Operation):
    """Replace quantised tensors by the numbers they stand for, in full precision, as transformers computes them."""

    papers = (
        Paper(
            "rouhani2023microscaling",
            "Rouhani, Bita Darvish and Zhao, Ritchie and More, Ankit and Hall, Mathew and others",
            "Microscaling Data Formats for Deep Learning",
            2023,
            "2310.10537",
        ),
    )
    training = TrainingDefaults("ours, no paper's: nothing is new, so nothing trains", lr=1e-5)

    facts = GgufFacts
    way_on = "use the transformers of constraints.txt"

    op: Literal["dequantise"]

    def prepare(self, base: OpenedBase) -> GgufFacts:
        """Read which GGUF file the base was read from, if any, and note what the loader changed."""
        if GGUF_RECORD not in base.folder.side_files or base.folder.manifest is not None:
            return GgufFacts()
        content = base.folder.read_side_file(GGUF_RECORD)
        read = parse_json_strict(content, file=GGUF_RECORD, max_bytes=MAX_SIDE_FILE_BYTES)
        try:
            base.notes.extend(printable(str(note), 300) for note in read["notes"])
            return GgufFacts(file=read["file"], sha256=read["sha256"], types=read["types"])
        except (KeyError, TypeError, ValueError):
            raise BadInput(f"{GGUF_RECORD}: not as surgeon writes it; read the GGUF file again") from None

    def edit(self, draft: Draft, facts: GgufFacts | None) -> OperationRecord:
        """Replace quantised tensors and their scales by products: in the layers, outside and above them.

        The numbers of a GGUF file stay as they are.
        """
        if facts is not None and facts.file is not None:
            types = ", ".join(f"{count:,} {name}" for name, count in sorted(facts.types.items()))
            return OperationRecord(
                op=self.op,
                matched=f"{printable(facts.file)}: {types} tensors are {_DTYPE}, as transformers reads them",
                claim=Claim("exact", "every number is the base's, as transformers' loader read it from the file"),
                trains="new",
            )
        method = _check(draft)
        config, number = draft.config, draft.number
        # The dtype in which transformers would load the numbers.
        dtype = next(iter(_dtypes(config)), _DTYPE)
        for index, layer in enumerate(draft.layers):
            draft.open(index)
            if method == COMPRESSED:
                # Layers of one kind may each use another code.
                layer.tensors = _opened(config, draft.anatomy.layers[index], _STORED[dtype])
            layer.rewritten |= dict.fromkeys((name for name, each in layer.tensors.items() if _is_made(each)), number)
        outer, *beyond = (
            _opened(config, each, _STORED[dtype]) for each in (draft.anatomy.outer, *draft.anatomy.beyond)
        )
        draft.outer, *draft.beyond = (
            {name: Outer(recipe, number if _is_made(recipe) else None) for name, recipe in each.items()}
            for each in (outer, *beyond)
        )
        _check_all(draft)
        draft.converted = {key: value for key, value in config.items() if key != QUANTISATION}
        layers = (layer.tensors for layer in draft.layers)
        made = sum(_is_made(each) for held in (*layers, outer, *beyond) for each in held.values())
        stored = (*draft.anatomy.layers, draft.anatomy.outer, *draft.anatomy.beyond)
        left = sum(name.endswith(OF_ACTIVATIONS) for held in stored for name in held)
        return OperationRecord(
            op=self.op,
            matched=f"{made:,} {_SHOWN.get(method, method)} tensors become {dtype}, without scales"
            + (f"; left out: {left:,} scales of quantised activations and caches" if left else ""),
            claim=Claim(
                "exact", f"its numbers are those that transformers dequantises to {dtype}, and so are its logits"
            ),
            trains="new",
        )


def _check(draft: Draft) -> str:
    """Return the base's quantisation method. Raises BadInput where there is none, or another operation came first."""
    if draft.records:
        raise BadInput("a model is dequantised by a plan of its own: apply the operations before it first")
    settings = quantisation(draft.config)
    if settings is None:
        raise BadInput(f"config.json: no `{QUANTISATION}`, so nothing is quantised here; leave `dequantise` out")
    compressed = settings["quant_method"] == COMPRESSED
    if compressed and find_spec("compressed_tensors") is None:
        raise BadInput(
            f"config.json: the numbers of this base are unpacked by the package {COMPRESSED}: `pip install"
            f" {COMPRESSED}`, or operate on the full-precision weights"
        )
    if draft.bank is not None or any(layer.grafts for layer in draft.layers):
        raise BadInput("the model carries grafts beside quantised layers; dequantise its base and graft onto that")
    allowed = _STORED if compressed else (_DTYPE,)
    found = {str(dtype) for dtype in _dtypes(draft.config)}
    if len(found) > 1 or found - {*allowed}:
        raise BadInput(
            f"config.json: dtype {printable(', '.join(sorted(found)), 40)}: surgeon dequantises to"
            f" {' or '.join(allowed)}; write that in its place"
        )
    return str(settings["quant_method"])


def _dtypes(config: Mapping[str, Any]) -> list[Any]:
    """Return the dtypes that a config.json and its parts name; an empty list where they name none."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    found = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return [dtype for dtype in found if dtype is not None]


def _is_made(recipe: Recipe) -> bool:
    """Return whether a recipe computes full-precision numbers from quantised ones."""
    return isinstance(recipe, (Dequantised, Unpacked))


def _opened(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], dtype: str) -> dict[str, Recipe]:
    """Return the recipes of `tensors`, with quantised ones as numbers, and without scales.

    Keys are names or suffixes, as in `tensors`.
    """
    if quantisation(config)["quant_method"] == COMPRESSED:  # type: ignore[index]
        return _unpacked(config, tensors, dtype)
    packed = packed_of(config, {name: (name,) for name in tensors}, tensors)
    made: dict[str, Recipe] = {}
    for name, info in tensors.items():
        if (found := packed.get(name)) is not None:
            weight, scales = Copy.of(info), Copy.of(tensors[found.scales])
            made[found.suffix] = Dequantised(weight, scales, found.block, dtype, found.shape)
        elif not is_scale(config, name):
            made[name] = Copy.of(info)
    return made


def _unpacked(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], dtype: str) -> dict[str, Recipe]:
    """Return the tensors unpacked from compressed-tensors' formats, whose groups match modules by full name.

    Raises BadInput where a tensor's columns are in groups of another order.
    """
    whole = {info.name: info for info in tensors.values()}
    packs = packs_of(config, whole)
    made: dict[str, Recipe] = {}
    for name, info in tensors.items():
        if (pack := packs.get(info.name)) is not None:
            if pack.order is not None:
                raise BadInput(
                    f"{printable(pack.order)}: groups of columns in another order, which {COMPRESSED} does not read;"
                    " operate on the full-precision weights"
                )
            zeros, sizes = (None if each is None else Copy.of(whole[each]) for each in (pack.zeros, pack.sizes))
            plain = pack.name[len(info.name) - len(name) :]
            weight, scales = Copy.of(info), Copy.of(whole[pack.scales])
            made[plain] = Unpacked(weight, scales, zeros, sizes, pack.code, dtype, pack.shape)
        elif not is_scale(config, name):
            made[name] = Copy.of(info)
    return made


def _check_all(draft: Draft) -> None:
    """Raise BadInput where a tensor is still quantised."""
    held = [recipe for layer in draft.layers for recipe in layer.tensors.values()]
    held += [each.recipe for tensors in (draft.outer, *draft.beyond) for each in tensors.values()]
    for recipe in held:
        if isinstance(recipe, Copy) and recipe.dtype in QUANTISED_DTYPES:
            raise BadInput(
                f"{printable(recipe.source or 'a tensor')}: {recipe.dtype}, which surgeon moves as bytes but does not"
                " dequantise (two numbers of four bits in a byte of an FP8 checkpoint)"
            )
