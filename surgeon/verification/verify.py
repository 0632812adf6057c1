"""`surgeon verify`: check whether an output keeps the promises of its manifest about its base."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from surgeon.anatomy.anatomy import Anatomy, without_a_place
from surgeon.anatomy.anatomy_cache import recalled
from surgeon.anatomy.dissect import dissect_folder
from surgeon.anatomy.grafted_config import is_grafted, native_config
from surgeon.anatomy.limits import vocabulary_of
from surgeon.anatomy.skeleton import reads_images, wordless_auto
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common import devices
from surgeon.common.check import Check
from surgeon.common.files import check_readable
from surgeon.common.listener import Listener, Quiet
from surgeon.errors import BadInput, printable
from surgeon.manifest.compose import surgeries_of
from surgeon.manifest.lineage import before_training
from surgeon.manifest.manifest import MANIFEST_FILE, Manifest
from surgeon.manifest.reading import manifest_of
from surgeon.models.gguf_file import locate_base
from surgeon.verification.begun import check_begun
from surgeon.verification.earlier import check_earlier, earlier_state
from surgeon.verification.static import Drawn, bytes_to_read, check_static
from surgeon.verification.verification import Verification

if TYPE_CHECKING:
    from torch import Tensor

    from surgeon.models.compare import LogitComparison
    from surgeon.models.tokens import TokenBatches
    from surgeon.verification.comparison import Comparison


def verify(
    base: str | Path,
    out: str | Path,
    *,
    logits: bool = True,
    streamed: bool = False,
    text: Path | None = None,
    window: int = 128,
    windows: int = 8,
    dtypes: Sequence[str] = ("auto",),
    adapters: Sequence[str] = (),
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Verification:
    """Check `out` against `base`: bytes first, then logits (prefill and cached decode) on real tokens.

    Args:
        base: The base of the last surgery, or an earlier state, for example the first base of several surgeries; or the
            model that a training of `out` began with. A folder, or `user/name[@revision]` on the Hub, which is
            downloaded where necessary.
        out: The output, a folder or Hub id too.
        logits: Whether models are run after the bytes were found as promised.
        streamed: Whether only one layer of each model is in memory at a time.
        text: A file to take tokens from (plain text or JSON lines); None: the probe text that surgeon ships.
        window: Tokens in each sequence.
        windows: The number of sequences; 0: the whole text.
        dtypes: The dtypes in which the models run: auto (the checkpoint's), float32, bfloat16, float16.
        adapters: Folders of the merged adapters, in the plan's order: PEFT runs the base with them, and the output must
            compute the same, up to the rounding of its weights.
        device: auto, cpu, cuda or cuda:N.
        trust_remote_code: Whether the checkpoints' own code may run.
        listener: Receives progress and notes.

    Returns:
        Every check and comparison; a broken promise is reported here, and does not raise.

    Raises:
        BadInput: `out` is no output of surgeon, `base` is another model, or an option is out of range.
    """
    listener = listener or Quiet()
    _check_options(dtypes, device, text if logits else None)
    pair = _Pair.open(base, out, trust_remote_code=trust_remote_code)
    if streamed and pair.wordless:
        raise BadInput(f"{printable(str(base))}: {pair.kind}, which is compared whole; leave out --streamed")
    # Refuse an `out` that is no output of surgeon before reading any tensor, and before loading torch.
    manifest = manifest_of(pair.out)
    if manifest.sha256 in (surgery.sha256 for surgery in surgeries_of(pair.base)[:-1]):
        raise BadInput(f"{printable(str(base))}: was made from {printable(str(out))}; did you swap BASE and OUT?")
    adapted = _adapted(adapters, manifest, pair, whole=logits and not streamed) if adapters else None
    pair.say_notes(listener)
    proof = static_proof(pair.base, pair.out, listener)
    found = Verification(
        proof.promise,
        proof.checks,
        trained=proof.trained,
        gated=_is_gated(pair.out),
        tail_alone=proof.tail_alone,
    )
    if not logits or not all(check.holds for check in proof.checks):
        return found

    from surgeon.models.tokens import token_batches

    vocabulary = pair.anatomy.sizes.vocabulary
    rows = vocabulary_of(pair.out.config) or vocabulary
    if rows != vocabulary and not (proof.kept or proof.new or pair.wordless):
        # An adapter added its own embedding rows: compare only the rows that both models have.
        proof = proof._replace(kept=tuple(range(min(vocabulary, rows))))
    tokens = token_batches(
        pair.base.path, text=text, window=window, windows=windows, vocabulary=vocabulary, kept=proof.kept
    )
    comparer = _Comparer(pair, proof, tokens, devices.resolve(device), listener)
    found = comparer.streamed(found, dtypes) if streamed else comparer.whole(found, dtypes)
    return comparer.with_peft(found, adapted) if adapted else found


def _check_options(dtypes: Sequence[str], device: str, text: Path | None) -> None:
    """Raise BadInput for an unknown dtype or device, and for a text that cannot be read."""
    if unknown := set(dtypes) - {"auto", "float32", "bfloat16", "float16"}:
        raise BadInput(f"dtype {printable(unknown.pop())!r}: use auto, float32, bfloat16 or float16")
    devices.check(device)
    if text is not None:
        check_readable(text)


def _adapted(adapters: Sequence[str], manifest: Manifest, pair: _Pair, *, whole: bool) -> Callable[[Any], Any]:
    """Return a function that adds the adapters to the loaded base.

    Raises BadInput where they are not the merged adapters, or could not be run.
    """
    from surgeon.verification.adapters import with_adapters

    if not whole or pair.wordless:
        raise BadInput("`--adapter` compares logits of whole models; leave it out, or --static and --streamed")
    return with_adapters(adapters, manifest, pair.out, pair.anatomy)


@dataclass(frozen=True)
class _Pair:
    """An opened base and an opened output of it, both with the user's trust setting; `anatomy` is the base's."""

    base: CheckpointFolder
    out: CheckpointFolder
    anatomy: Anatomy

    @classmethod
    def open(cls, base: str | Path, out: str | Path, *, trust_remote_code: bool) -> _Pair:
        """Open the base and the output. Raises BadInput where they are the same folder, or one cannot be read."""
        base_folder, out_folder = (_opened(name, trust_remote_code) for name in (base, out))
        if base_folder.path.samefile(out_folder.path):
            raise BadInput(
                f"{printable(str(out))}: BASE and OUT are the same folder; give the base that OUT was made from"
            )
        return cls(base_folder, out_folder, dissect_folder(base_folder, recalled))

    @property
    def wordless(self) -> bool:
        """Whether the models generate no text: encoders, and decoders with a head for labels or answers."""
        return self.anatomy.family.encoder or wordless_auto(self.base.config) is not None

    @property
    def kind(self) -> str:
        """The kind of a model that generates no text, in words."""
        if self.anatomy.family.encoder:
            return f"an encoder ({self.anatomy.family.model_type})"
        return f"a {self.anatomy.family.model_type} with a head for labels or answers"

    def say_notes(self, listener: Listener) -> None:
        """Report the notes from opening the folders."""
        for folder in (self.base, self.out):
            for note in folder.notes:
                listener.say(f"{folder.source.shown}: {note}")
        if self.anatomy.idle:
            listener.say(f"{self.base.source.shown}: {without_a_place(self.anatomy.idle)}")


def _opened(name: str | Path, trust_remote_code: bool) -> CheckpointFolder:
    """Open a folder, or a checkpoint on the Hub, which is downloaded where necessary.

    Raises BadInput where it is not found or cannot be read.
    """
    located = locate_base(str(name), code=trust_remote_code)
    return CheckpointFolder.open(located.path, trust_remote_code=trust_remote_code)


@dataclass(frozen=True)
class _Comparer:
    """A comparison of two checkpoints' logits on real tokens, run after their bytes were found as promised."""

    pair: _Pair
    proof: StaticProof
    tokens: TokenBatches
    device: str
    listener: Listener

    def streamed(self, found: Verification, dtypes: Sequence[str]) -> Verification:
        """Return `found` with layer-by-layer comparisons, in all dtypes at once."""
        from surgeon.models.compare_streamed import compare_streamed

        image = _Image.of(self.pair, streamed=True)
        if is_grafted(self.pair.out.config):
            why_not = "not compared: layer by layer nothing is generated; leave out --streamed"
            image.notes.append(Check("decoding", True, why_not, note=True))
        self.listener.say(f"comparing logits ({', '.join(dtypes)}) on {self.tokens.source}")
        layered = compare_streamed(
            self.pair.base,
            self.pair.out,
            self.tokens.ids,
            dtypes=dtypes,
            layer_of_base=self.proof.layer_of_base,
            progress=_by_layers(self.listener),
            new=self.proof.new,
            kept=self.proof.kept,
            device=self.device,
        )
        return replace(
            found,
            tokens=self.tokens.source,
            checks=[*found.checks, *image.notes],
            comparisons=[mode for each in layered for mode in each.logits],
            streamed=list(layered),
        )

    def whole(self, found: Verification, dtypes: Sequence[str]) -> Verification:
        """Return `found` with comparisons of whole models in memory, one dtype after another."""
        from surgeon.models.compare import compare_models
        from surgeon.verification.decoding import check_decoding

        image = _Image() if self.pair.wordless else _Image.of(self.pair, streamed=False)
        if self.proof.kept is not None:
            image.leave_out("its prompt may have tokens that went")
        comparisons: list[Comparison] = []
        decoding: list[Check] = []
        for dtype in dtypes:
            self.listener.say(f"comparing logits ({dtype}) on {self.tokens.source}")
            if self.pair.wordless:
                comparisons.append(self._outputs(dtype))
                continue
            base, out = self._loaded(dtype)
            new, device = self.proof.new, self.device
            comparisons += compare_models(base, out, self.tokens.ids, new=new, device=device)
            comparisons += image.compared(base, out, new=new, device=device)
            if is_grafted(self.pair.out.config) and not decoding:
                # Free the base's memory for the output in float32.
                del base
                decoding.append(check_decoding(out, self.tokens.ids))
        checks = [*found.checks, *image.notes, *decoding]
        return replace(found, tokens=self.tokens.source, checks=checks, comparisons=comparisons)

    def with_peft(self, found: Verification, adapted: Callable[[Any], Any]) -> Verification:
        """Return `found` with a comparison against the `adapted` base, run by PEFT."""
        from surgeon.verification.adapters import compare_with_peft

        self.listener.say(f"comparing logits with PEFT (float32) on {self.tokens.source}")
        pair = self.pair
        check, compared = compare_with_peft(pair.base, pair.out, adapted, self.tokens.ids, device=self.device)
        return replace(found, checks=[*found.checks, check], comparisons=[*found.comparisons, compared])

    def _outputs(self, dtype: str) -> Comparison:
        """Compare the outputs of two models that generate no text."""
        from surgeon.models.outputs import auto_class, compare_outputs

        base, out = self.pair.base, self.pair.out
        auto = auto_class(base.config)
        return compare_outputs(base, out, self.tokens.ids, auto=auto, dtype=dtype, device=self.device)

    def _loaded(self, dtype: str) -> tuple[Any, Any]:
        """Load both models; where tokens were removed, restrict the base to the ids and logits of the other tokens."""
        from surgeon.models.compare import load_pair, trim_logits

        loaded = load_pair(self.pair.base, self.pair.out, dtype=dtype, device=self.device)
        if self.proof.kept is not None:
            trim_logits(*loaded, self.proof.kept)
        return loaded


def _is_gated(out: CheckpointFolder) -> bool:
    """Return whether the output's config has a domain gate."""
    surgery = out.config.get("surgery")
    return isinstance(surgery, Mapping) and bool(surgery.get("domain_gate"))


@dataclass
class _Image:
    """A prompt with a picture, for models that read images, and a note for each reason why it was not compared."""

    inputs: Mapping[str, Tensor] | None = None
    notes: list[Check] = field(default_factory=list)

    @classmethod
    def of(cls, pair: _Pair, *, streamed: bool) -> _Image:
        """Return the prompt made by the base's processor; without inputs where one of the models reads only text."""
        found, base = cls(), pair.base
        if not all(reads_images(native_config(folder.config)) for folder in (base, pair.out)):
            return found
        if streamed:
            found._note("layer by layer text alone is compared; leave out --streamed")
            return found
        from surgeon.models.tokenizer import open_processor

        try:
            processor, why_not = open_processor(base.path)
            if processor is not None:
                found.inputs = processor.with_picture()
        except BadInput as error:
            why_not = str(error)
        if found.inputs is None:
            found._note(why_not)
        return found

    def leave_out(self, why_not: str) -> None:
        """Skip the comparison on the prompt, and note why."""
        if self.inputs is not None:
            self.inputs = None
            self._note(why_not)

    def compared(self, base: Any, out: Any, **options: Any) -> list[LogitComparison]:
        """Return the comparisons of two loaded models on the prompt; empty where the base cannot run on it."""
        from surgeon.models.compare import compare_with_image

        if self.inputs is None:
            return []
        try:
            return compare_with_image(base, out, self.inputs, **options)
        except BadInput as error:
            dtype = str(base.dtype).removeprefix("torch.")
            self._note(f"{dtype}: {error}")
            return []

    def _note(self, why_not: str) -> None:
        """Append a note on why nothing was compared on a prompt with an image."""
        self.notes.append(Check("images", True, f"not compared on a prompt with an image: {why_not}", note=True))


def _by_layers(listener: Listener) -> Callable[[int, int], None]:
    """Return a callback that shows the layers run, over both models and all forward passes, as a listener's stage."""

    def show(done: int, total: int) -> None:
        """Begin the stage at the first layer, and count one more layer as done."""
        if done == 1:
            listener.begin("comparing, layer by layer", total, "layers")
        listener.advance(1)

    return show


class StaticProof(NamedTuple):
    """The result of the byte checks, and the promise. `layer_of_base` gives every base layer's number in the output.

    `new` are the output's rows for tokens that the base lacks. `kept` are the base's ids of the remaining tokens, where
    some were removed. `tail_alone` has the same meaning as in `Verification`.
    """

    promise: str
    trained: bool
    layer_of_base: tuple[int, ...]
    checks: list[Check]
    new: range
    tail_alone: bool
    kept: tuple[int, ...] | None = None


def static_proof(
    base: CheckpointFolder, out: CheckpointFolder, listener: Listener, *, facts: bool = True
) -> StaticProof:
    """Run the checks that need only bytes, against the last surgery's base, an earlier state, or a run's beginning.

    Without `facts` the operations' own checks of what they found out of the base are left out: a twin has other
    numbers.
    """
    manifest, file = manifest_of(out), out.path / MANIFEST_FILE
    listener.begin("reading", bytes_to_read(base, out))
    if began := before_training(manifest, base):
        checks = check_begun(began, manifest, base, out, advance=listener.advance)
        layers = tuple(range(len(manifest.layers)))
        return StaticProof(manifest.promise, True, layers, checks, range(0), tail_alone=False)
    if state := earlier_state(base, out, manifest):
        checks = check_earlier(state, manifest, base, out, advance=listener.advance)
        new = next(iter(state.more.values()), range(0))
        return StaticProof(state.promise, state.trained, state.layers, checks, new, tail_alone=False)
    drawn = Drawn.of(manifest, base.config, base.tensors, base.own, str(file))
    checks = check_static(drawn, manifest, base, out, facts=facts, advance=listener.advance)
    blueprint = drawn.blueprint
    trained, layers = bool(manifest.training), blueprint.layer_of_base
    return StaticProof(
        blueprint.promise, trained, layers, checks, blueprint.new_rows, blueprint.tail_alone, blueprint.kept_tokens
    )
