"""Hold one checkpoint against another: the promises of a manifest, or any two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surgeon import devices
from surgeon.api.common import Quiet, manifest_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.comparing import compare
from surgeon.errors import BadInput, printable
from surgeon.execute import Listener
from surgeon.families.anatomy import dissect
from surgeon.manifest import MANIFEST_FILE, adapters_of
from surgeon.plan.drafting import draw
from surgeon.plan.loading import parse_plan
from surgeon.results import Difference, Verification

if TYPE_CHECKING:
    from surgeon.verification.encoders import OutputComparison
    from surgeon.verification.logits import LogitComparison
    from surgeon.verification.static import Check
    from surgeon.verification.streaming import StreamedComparison


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

    `base` is what the last surgery was carried out on, or an earlier state: the first base, say, of several surgeries.

    `text` is a file to take tokens from (plain text or JSON lines), None the probe text that surgeon brings;
    `windows` 0 takes all of it. `streamed` holds one layer of each model at a time. Raises BadInput for what
    is no output of surgeon; a broken promise is told in the result.
    """
    from surgeon.verification.ancestors import ancestry_of, check_ancestry
    from surgeon.verification.static import bytes_to_read, check_static

    listener = listener or Quiet()
    if unknown := set(dtypes) - {"auto", "float32", "bfloat16", "float16"}:
        raise BadInput(f"dtype {printable(unknown.pop())!r}: use auto, float32, bfloat16 or float16")
    base_folder = CheckpointFolder.open(Path(base), trust_remote_code=trust_remote_code)
    out_folder = CheckpointFolder.open(Path(out), trust_remote_code=trust_remote_code)
    manifest = manifest_of(out_folder)
    loaded = parse_plan(manifest.plan, source=f"{Path(out) / MANIFEST_FILE} (plan)")
    anatomy = dissect(base_folder.config, base_folder.tensors)
    if streamed and anatomy.family.encoder:
        raise BadInput(
            f"{printable(str(base))}: an encoder ({anatomy.family.model_type}), which is compared whole; leave out"
            " --streamed"
        )
    listener.begin("reading", bytes_to_read(base_folder, out_folder))
    checks: list[Check]
    if ancestry := ancestry_of(base_folder, out_folder, manifest):
        promise, trained, layer_of_base = ancestry.promise, ancestry.trained, ancestry.layer_of_base
        checks = check_ancestry(ancestry, manifest, base_folder, out_folder, advance=listener.advance)
    else:
        adapters = adapters_of(manifest, file=str(Path(out) / MANIFEST_FILE))
        blueprint = draw(loaded, anatomy, base_folder.config, adapters)
        promise, trained, layer_of_base = blueprint.promise, bool(manifest.training), blueprint.layer_of_base
        checks = check_static(blueprint, manifest, base_folder, out_folder, anatomy, advance=listener.advance)
    if not logits or not all(check.holds for check in checks):
        return Verification(promise, checks, trained=trained)

    from surgeon.verification.encoders import auto_class, compare_encoders
    from surgeon.verification.logits import compare_logits
    from surgeon.verification.streaming import compare_streamed
    from surgeon.verification.tokens import token_batches

    # Only code that is byte for byte what this version ships runs unasked; anything else was refused at opening.
    trust_remote_code = trust_remote_code or "shipped" in (base_folder.code, out_folder.code)
    device = devices.resolve(device)
    tokens = token_batches(Path(base), text=text, window=window, windows=windows, vocabulary=anatomy.sizes.vocabulary)
    compared = (Path(base), Path(out), tokens.ids)
    comparisons: list[LogitComparison | OutputComparison] = []
    layered: list[StreamedComparison] = []
    for dtype in dtypes:
        listener.say(f"comparing logits ({dtype}) on {tokens.source}")
        if anatomy.family.encoder:
            comparisons.append(
                compare_encoders(
                    *compared,
                    auto=auto_class(base_folder.config),
                    dtype=dtype,
                    device=device,
                    trust_remote_code=trust_remote_code,
                )
            )
        elif streamed:
            layer_by_layer = compare_streamed(
                *compared,
                dtype=dtype,
                device=device,
                layer_of_base=layer_of_base,
                trust_remote_code=trust_remote_code,
            )
            layered.append(layer_by_layer)
            comparisons.extend(layer_by_layer.logits)
        else:
            comparisons.extend(
                compare_logits(*compared, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
            )
    return Verification(promise, checks, comparisons, layered, tokens.source, trained=trained)


def diff(a: str | Path, b: str | Path, *, exact: bool = False, listener: Listener | None = None) -> Difference:
    """What became of the checkpoint `a` in `b`, tensor by tensor: added, removed, changed, moved, the same.

    Where the manifest of one says that the other is its base, that one is not read: names, config.json and lineage must
    fit, its digests are taken on trust. `exact` reads both. No code of either is run. Raises BadInput.
    """
    listener = listener or Quiet()
    # Code beside the weights is neither run nor copied here.
    opened = [CheckpointFolder.open(Path(folder), trust_remote_code=True) for folder in (a, b)]
    return compare(*opened, exact=exact, begin=listener.begin, advance=listener.advance)
