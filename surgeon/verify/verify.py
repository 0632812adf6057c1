"""`surgeon verify`: does an output keep what its manifest promises of its base?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.common import devices
from surgeon.common.files import check_readable
from surgeon.common.json_results import plain, plain_fields
from surgeon.common.listener import Listener, Quiet
from surgeon.common.tables import FittedTable
from surgeon.errors import BadInput, printable
from surgeon.families.anatomy import Anatomy, native_config, without_a_place
from surgeon.families.dissect import dissect
from surgeon.families.skeleton import wordless_auto
from surgeon.manifest.manifest import MANIFEST_FILE
from surgeon.manifest.reading import manifest_of
from surgeon.verify.check import Check
from surgeon.verify.earlier import check_earlier, earlier_state
from surgeon.verify.static import Drawn, bytes_to_read, check_static

if TYPE_CHECKING:
    from torch import Tensor

    from surgeon.models.compare import GrownLoss, LogitComparison
    from surgeon.models.compare_streamed import FirstDifference, StreamedComparison
    from surgeon.verify.comparison import Comparison


@dataclass(frozen=True)
class Verification:
    """Whether an output keeps its manifest's promises.

    `checks` are the static ones, `comparisons` those by logits. `holds` is true when every promise holds;
    where none was made (`promise` none), differing logits are as promised, and so they are where the output was
    `trained` since the surgery. `gated`: a domain gate decides which tokens have the base's logits. `tail_alone`: what
    is promised to rounding are the logits of the base's last V mod 4 tokens, and of all others that they are identical.
    """

    promise: str
    checks: list[Check]
    comparisons: list[Comparison] = field(default_factory=list)
    streamed: list[StreamedComparison] = field(default_factory=list)
    tokens: str = ""
    trained: bool = False
    gated: bool = False
    tail_alone: bool = False

    def __repr__(self) -> str:
        checks = f"{sum(check.holds for check in self.checks)} of {len(self.checks)} checks hold"
        return f"Verification(holds={self.holds}, promise {self.promise!r}, identical={self.identical}, {checks})"

    @property
    def identical(self) -> bool | None:
        """Whether all compared logits (and hidden states) were bit-identical; None when none were compared."""
        if not self.comparisons:
            return None
        return self.first_difference is None and all(c.identical for c in self.comparisons)

    @property
    def rounded(self) -> bool | None:
        """Whether all compared logits differ by no more than rounding; None when none were compared."""
        return all(c.rounded for c in self.comparisons) if self.comparisons else None

    @property
    def same_before_tail(self) -> bool:
        """Whether all compared logits but those of the base's last V mod 4 tokens were bit-identical."""
        return all(c.same_before_tail for c in self.comparisons)

    @property
    def bounded(self) -> bool | None:
        """Whether new tokens cost no old one more than is promised, at any position; None where there are none."""
        return all(each.kept for each in self.grown.values()) if self.grown else None

    @property
    def grown(self) -> dict[tuple[str, str], GrownLoss]:
        """What new tokens cost old ones, by mode and dtype; empty where there are no new tokens."""
        return {(c.mode, c.dtype): c.grown for c in self.comparisons if c.grown is not None}

    @property
    def first_difference(self) -> FirstDifference | None:
        """The first base layer after which hidden states differ, where the comparison went layer by layer."""
        return next((s.first_difference for s in self.streamed if s.first_difference is not None), None)

    @property
    def holds(self) -> bool:
        """Whether every promise of the manifest holds."""
        rounded = self.rounded is not False and (not self.tail_alone or self.same_before_tail)
        same = self.identical is not False or (self.promise == "rounding" and rounded)
        kept = self.promise == "none" or self.trained or (same and self.bounded is not False)
        return kept and all(check.holds for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """As plain data for `--json`."""
        return plain_fields(self, without=("streamed",)) | {
            "holds": self.holds,
            "identical": self.identical,
            "first_difference": plain(self.first_difference),
        }


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
    device: str = "auto",
    trust_remote_code: bool = False,
    listener: Listener | None = None,
) -> Verification:
    """Check `out` against `base`: bytes first, then logits (prefill and cached decode) on real tokens.

    Args:
        base: What the last surgery was carried out on, or an earlier state: the first base, say, of several surgeries.
        out: The output.
        logits: Whether models are run where the bytes are as promised.
        streamed: Whether one layer of each model is in memory at a time.
        text: A file to take tokens from (plain text or JSON lines); None: the probe text that surgeon brings.
        window: Tokens in each sequence.
        windows: How many sequences are taken; 0: all of the text.
        dtypes: In which dtypes the models run: auto (the checkpoint's), float32, bfloat16, float16.
        device: auto, cpu, cuda or cuda:N.
        trust_remote_code: Whether the checkpoints' own code may run.
        listener: Receives progress and notes.

    Returns:
        Every check and comparison; a broken promise is in it, and is not raised.

    Raises:
        BadInput: `out` is no output of surgeon, or an option is out of range.
    """
    listener = listener or Quiet()
    if unknown := set(dtypes) - {"auto", "float32", "bfloat16", "float16"}:
        raise BadInput(f"dtype {printable(unknown.pop())!r}: use auto, float32, bfloat16 or float16")
    devices.check(device)
    if logits and text is not None:
        check_readable(text, what="text")
    if Path(base).is_dir() and Path(out).is_dir() and Path(base).samefile(out):
        raise BadInput(f"{printable(str(out))}: BASE and OUT are the same folder; give the base that OUT was made from")
    base_folder = CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code)
    out_folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    anatomy = dissect(base_folder.config, base_folder.tensors, base_folder.own)
    wordless = anatomy.family.encoder or wordless_auto(base_folder.config) is not None
    if streamed and wordless:
        raise BadInput(f"{printable(str(base))}: {_kind_of(anatomy)}, which is compared whole; leave out --streamed")
    # What this is no output of is refused before any tensor is read, and before torch is loaded.
    manifest_of(out_folder)
    for folder in (base_folder, out_folder):
        for note in folder.notes:
            listener.say(f"{folder.source.shown}: {note}")
    if anatomy.idle:
        listener.say(f"{base_folder.source.shown}: {without_a_place(anatomy.idle)}")
    proof = _static(base_folder, out_folder, listener)
    if not logits or not all(check.holds for check in proof.checks):
        return Verification(proof.promise, proof.checks, trained=proof.trained, gated=_is_gated(out_folder))

    from surgeon.models.tokens import token_batches

    tokens = token_batches(Path(base), text=text, window=window, windows=windows, vocabulary=anatomy.sizes.vocabulary)
    found = Verification(
        proof.promise,
        proof.checks,
        tokens=tokens.source,
        trained=proof.trained,
        gated=_is_gated(out_folder),
        tail_alone=proof.tail_alone,
    )
    # Each is trusted as it was opened.
    folders, device = (base_folder, out_folder), devices.resolve(device)
    image = None if wordless else _Image.of(base_folder, streamed=streamed)
    if streamed:
        _add_streamed(found, proof, folders, tokens.ids, dtypes, device, listener)
    for dtype in () if streamed else dtypes:
        listener.say(f"comparing logits ({dtype}) on {tokens.source}")
        _add_whole(found, proof, folders, tokens.ids, dtype, device, image)
    found.checks.extend(image.notes if image is not None else ())
    return found


def _add_streamed(
    found: Verification,
    proof: _Static,
    folders: tuple[CheckpointFolder, CheckpointFolder],
    ids: Tensor,
    dtypes: Sequence[str],
    device: str,
    listener: Listener,
) -> None:
    """Add the comparisons of two checkpoints layer by layer, in all dtypes at once."""
    from surgeon.models.compare_streamed import compare_streamed

    listener.say(f"comparing logits ({', '.join(dtypes)}) on {found.tokens}")
    layered = compare_streamed(
        *folders,
        ids,
        dtypes=dtypes,
        layer_of_base=proof.layer_of_base,
        progress=_shown(listener),
        more=proof.more,
        device=device,
    )
    found.streamed.extend(layered)
    found.comparisons.extend(mode for each in layered for mode in each.logits)


def _add_whole(
    found: Verification,
    proof: _Static,
    folders: tuple[CheckpointFolder, CheckpointFolder],
    ids: Tensor,
    dtype: str,
    device: str,
    image: _Image | None,
) -> None:
    """Add the comparisons of two checkpoints in memory, in one dtype; without an `image` they write no words."""
    if image is None:
        from surgeon.models.outputs import auto_class, compare_outputs

        auto = auto_class(folders[0].config)
        found.comparisons.append(compare_outputs(*folders, ids, auto=auto, dtype=dtype, device=device))
        return
    from surgeon.models.compare import compare_models, load_pair

    pair = load_pair(*folders, dtype=dtype, device=device)
    found.comparisons.extend(compare_models(*pair, ids, more=proof.more, device=device))
    found.comparisons.extend(image.compared(*pair, more=proof.more, device=device))


def _kind_of(anatomy: Anatomy) -> str:
    """What a model that writes no words is, in words."""
    if anatomy.family.encoder:
        return f"an encoder ({anatomy.family.model_type})"
    return f"a {anatomy.family.model_type} with a head for labels or answers"


def _is_gated(out: CheckpointFolder) -> bool:
    surgery = out.config.get("surgery")
    return isinstance(surgery, Mapping) and bool(surgery.get("domain_gate"))


@dataclass
class _Image:
    """A prompt with a picture for models that read images, and a note for each reason why it was not compared."""

    inputs: Mapping[str, Tensor] | None = None
    notes: list[Check] = field(default_factory=list)

    @classmethod
    def of(cls, base: CheckpointFolder, *, streamed: bool) -> _Image:
        """As the base's processor makes it; nothing for a model that reads text alone."""
        from surgeon.families.skeleton import reads_images

        found = cls()
        if not reads_images(native_config(base.config)):
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

    def compared(self, base: Any, out: Any, **options: Any) -> list[LogitComparison]:
        """The comparisons of two loaded models, none where the base cannot be run on it."""
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
        self.notes.append(Check("images", True, f"not compared on a prompt with an image: {why_not}", note=True))


def _shown(listener: Listener) -> Callable[[int, int], None]:
    """Layers run, of both models in all forwards, as a stage of the listener."""

    def show(done: int, total: int) -> None:
        if done == 1:
            listener.begin("comparing, layer by layer", total, "layers")
        listener.advance(1)

    return show


class _Static(NamedTuple):
    """What bytes prove, and what is promised: for every base layer, `layer_of_base` is its number in the output.

    `more` is how many rows for tokens the output has that the base has not; `tail_alone` is that of `Verification`.
    """

    promise: str
    trained: bool
    layer_of_base: tuple[int, ...]
    checks: list[Check]
    more: int
    tail_alone: bool


def _static(base: CheckpointFolder, out: CheckpointFolder, listener: Listener) -> _Static:
    """The checks that need bytes only, against the base of the last surgery or an earlier state."""
    manifest, file = manifest_of(out), out.path / MANIFEST_FILE
    listener.begin("reading", bytes_to_read(base, out))
    if state := earlier_state(base, out, manifest):
        checks = check_earlier(state, manifest, base, out, advance=listener.advance)
        more = max(state.more.values(), default=0)
        return _Static(state.promise, state.trained, state.layers, checks, more, tail_alone=False)
    drawn = Drawn.of(manifest, base.config, base.tensors, base.own, str(file))
    checks = check_static(drawn, manifest, base, out, advance=listener.advance)
    blueprint = drawn.blueprint
    trained, layers = bool(manifest.training), blueprint.layer_of_base
    return _Static(blueprint.promise, trained, layers, checks, blueprint.more_rows, blueprint.tail_alone)


def verification_view(verification: Verification) -> RenderableType:
    """Checks and comparisons, and the verdict in one line."""
    checks = FittedTable(headings=False)
    for check in verification.checks:
        style = "yellow" if check.note else "green" if check.holds else "bold red"
        mark = Text("note" if check.note else "holds" if check.holds else "FAILS", style=style)
        checks.add_row(mark, check.name, check.detail)
    parts: list[RenderableType] = [checks]
    if verification.comparisons:
        parts += [Text(), Text(f"logits on {printable(verification.tokens)}"), _comparisons(verification)]
        parts += _new_tokens(verification)
        parts += _gated_tokens(verification) if verification.gated else []
    difference = verification.first_difference
    if difference is not None:
        parts.append(Text(f"first difference ({difference.mode}): {printable(difference.where)}"))
    return Group(*parts, Text(), verdict(verification))


def verdict(verification: Verification) -> Text:
    """One line: exact, not preserving as promised, or broken."""
    if not verification.holds:
        return Text("a promise does not hold", style="bold red")
    if verification.trained:
        logits = "logits not compared" if verification.identical is None else "logits are the trained model's"
        return Text(f"trained: every other tensor is the base's, byte for byte ({logits})", style="bold green")
    if verification.promise == "none":
        found = {True: "identical all the same", False: "logits differ", None: "logits not compared"}
        return Text(f"not preserving, as promised ({found[verification.identical]})", style="bold yellow")
    if verification.identical is None:
        return Text("every static promise holds (logits not compared)", style="bold green")
    if verification.promise == "rounding" and not verification.identical:
        most = max(c.max_abs_difference for c in verification.comparisons)
        of = " of the base's last V mod 4 tokens" if verification.tail_alone else ""
        return Text(
            f"every promise holds, logits{of} differ by rounding alone (at most {most:.3g})", style="bold green"
        )
    if verification.bounded:
        rise = max(grown.rise for grown in verification.grown.values())
        words = f"every old logit is bit-identical, new tokens cost an old one at most {rise:.4g} nats"
        return Text(f"exact: every promise holds, {words}", style="bold green")
    return Text("exact: every promise holds, every logit is bit-identical", style="bold green")


def _comparisons(verification: Verification) -> FittedTable:
    table = FittedTable("mode", "dtype", names=2)
    for measured in ("tokens", "identical", "max |Δ|", "KL (nats)", "top-1", "base loss", "output loss"):
        table.add_column(measured)
    for c in verification.comparisons:
        table.add_row(
            c.mode,
            c.dtype,
            f"{c.tokens:,}",
            Text("yes", style="green") if c.identical else Text("no", style="yellow"),
            f"{c.max_abs_difference:.3g}",
            *_next_token(c.next_token),
        )
    return table


def _new_tokens(verification: Verification) -> list[RenderableType]:
    """What new tokens cost the old ones, where there are some, and what is promised of that."""
    return [
        Text(
            f"{mode} ({dtype}): {grown.added:,} new rows raise the loss on an old token by at most"
            f" {grown.rise:.6f} nats; log(1 + k/V) = {grown.bound:.6f}",
            style="" if grown.kept else "bold red",
        )
        for (mode, dtype), grown in verification.grown.items()
    ]


def _gated_tokens(verification: Verification) -> list[RenderableType]:
    """On how many tokens a domain gate kept the base's logits, and what the loss is on the others."""
    lines: list[RenderableType] = []
    for c in verification.comparisons:
        rest = "" if c.apart is None else f"; on the others the loss is {c.apart[1]:.4f}, the base's {c.apart[0]:.4f}"
        share = f"{c.same:,} of {c.tokens:,} tokens ({c.same / c.tokens:.2%})"
        lines.append(Text(f"domain gate, {c.mode} ({c.dtype}): {share} have the base's logits, bit for bit{rest}"))
    return lines


def _next_token(figures: tuple[float, float, float, float] | None) -> tuple[str, ...]:
    """KL, top-1 agreement and both losses as cells; empty ones for an encoder, which predicts no next token."""
    if figures is None:
        return ("",) * 4
    kl, agreement, base_loss, out_loss = figures
    return (f"{kl:.3g}", f"{agreement:.2%}", f"{base_loss:.6f}", f"{out_loss:.6f}")
