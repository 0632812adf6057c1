"""A GGUF file as a base: transformers' own loader makes a checkpoint of it, once, in the user's cache.

The checkpoint has the numbers and the tokenizer that the loader gives. `gguf.json` in it names the file, its digest and
what the loader changed; outputs keep it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from surgeon.checkpoint.card_metadata import block_of
from surgeon.checkpoint.folder import CARD_FILE, CheckpointFolder
from surgeon.checkpoint.hub import Located, locate, open_headers
from surgeon.checkpoint.source import GGUF_RECORD
from surgeon.common.cache import cache_folder
from surgeon.common.disk_space import check_room, writing
from surgeon.common.installation import lacking
from surgeon.common.library import LOAD_FAILURES, first_line, quiet_transformers
from surgeon.common.places import meant
from surgeon.errors import BadInput, printable

GGUF = ".gguf"
_MAGIC = b"GGUF"
# The bytes of a number of the checkpoint.
_BYTES = 2
# Pre-tokenizers that split text as the loader's plain byte-level one does.
_PLAIN = ("default", "gpt-2")
# What a header says of itself that a card has too, by the card's word.
_SAID = {"license": "general.license", "language": "general.languages"}


def locate_base(
    base: str,
    *,
    revision: str | None = None,
    code: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Located:
    """Find a base as `locate` does; a GGUF file becomes a checkpoint in the user's cache.

    `say` receives a line where that takes time. Raises BadInput as `locate` and `checkpoint_of` do.
    """
    file = Path(meant(base))
    if file.suffix.lower() == GGUF and file.is_file() and revision is None:
        return Located(checkpoint_of(file, say=say))
    return locate(base, revision=revision, code=code)


def base_headers(base: str | Path, *, revision: str | None, trust_remote_code: bool) -> CheckpointFolder:
    """Open a base for callers that read no weights, as `open_headers` does; a GGUF file becomes a checkpoint first."""
    if Path(meant(str(base))).is_file():
        base = locate_base(str(base), revision=revision).path
    return open_headers(base, revision=revision, trust_remote_code=trust_remote_code)


def checkpoint_of(file: Path, *, say: Callable[[str], None]) -> Path:
    """Return the folder of the checkpoint that transformers' loader makes of a GGUF file, in bfloat16.

    It is made once, in the user's cache, for each digest of a file and version of transformers. Raises BadInput for a
    file that is cut or not read by the loader, where a tensor of the model is missing, and without room.
    """
    shown = printable(str(file))
    tensors, fields = _read(file, shown)
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    import transformers

    kept = cache_folder("gguf")
    if kept is None:
        raise BadInput(f"{shown}: is read into the user's cache, which SURGEON_CACHE=off switches off; set a folder")
    folder = kept / f"{digest[:16]}-transformers-{transformers.__version__}" / file.name
    if folder.exists():
        return folder
    say(f"transformers reads {shown} (once; kept as {printable(str(folder))})")
    with writing(folder, kept="free some room"):
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_room(kept, _BYTES * sum(int(tensor.n_elements) for tensor in tensors))
        staged = Path(tempfile.mkdtemp(prefix=".", dir=kept))
        try:
            record = {
                "file": file.name,
                "sha256": digest,
                "types": dict(Counter(tensor.tensor_type.name for tensor in tensors)),
                "transformers": transformers.__version__,
                "notes": _convert(file, staged, fields, shown),
            }
            card = block_of({word: fields.get(name) for word, name in _SAID.items()})
            (staged / CARD_FILE).write_bytes(card.encode())
            (staged / GGUF_RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            for each in staged.iterdir():
                each.chmod(0o644)
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            if not folder.exists():
                staged.replace(folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return folder


def _read(file: Path, shown: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the tensors and metadata that a file's header lists. Raises BadInput where it cannot be whole."""
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise BadInput(f"{shown}: does not begin as a GGUF file does; is the download complete?")
    if find_spec("gguf") is None:
        raise BadInput(f"{shown}: {lacking('reading a GGUF file', 'gguf', 'gguf')}")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        wanted = ("tokenizer.ggml.pre", *_SAID.values())
        fields = {name: reader.fields[name].contents() for name in wanted if name in reader.fields}
        return list(reader.tensors), fields
    except LOAD_FAILURES as error:
        raise BadInput(f"{shown}: cut or damaged ({first_line(error)}); download it again") from None


def _convert(file: Path, to: Path, fields: dict[str, Any], shown: str) -> list[str]:
    """Save model and tokenizer as transformers loads them; return what the loader changed, a line each."""
    from surgeon.models.load import load_gguf

    # The loader's own bar is shown whatever transformers is asked.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        try:
            model, missing, tokenizer = load_gguf(file)
        except LOAD_FAILURES as error:
            raise BadInput(
                f"{shown}: transformers does not load it ({first_line(error)}); give the safetensors checkpoint that"
                " it was made from"
            ) from None
        if missing:
            raise BadInput(
                f"{shown}: has no {printable(missing[0])}"
                + (f" and {len(missing) - 1} more" if missing[1:] else "")
                + ", which the model needs; give the safetensors checkpoint that it was made from"
            )
        model.save_pretrained(to)
        tokenizer.save_pretrained(to)
    named = fields.get("tokenizer.ggml.pre")
    splits = json.loads((to / "tokenizer.json").read_text(encoding="utf-8"))["pre_tokenizer"] or {}
    if named in (None, *_PLAIN) or splits.get("type") != "ByteLevel":
        return []
    return [
        f"the file's pre-tokenizer is {printable(str(named), 40)}, the loader's a plain byte-level one: some text,"
        " digits above all, may become other tokens than the original's tokenizer gives"
    ]
