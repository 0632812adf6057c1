"""`surgeon gguf`: write an output as a GGUF file for llama.cpp, by llama.cpp's own converter in a process of its own.

The converter knows a pre-tokenizer by a digest of the ids that a tokenizer gives for one text. A vocabulary that was
trimmed or grown gives other ids, though it splits text as its base's does: there the converter is shown the base's
tokenizer. Before it writes, the process also adds each layer's window where the converter has none, and refuses what
llama.cpp would run wrongly without a word.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from surgeon.anatomy.format_depth import other_scale
from surgeon.anatomy.grafted_config import is_grafted
from surgeon.checkpoint.folder import CONFIG_FILE, CheckpointFolder
from surgeon.checkpoint.strict_json import json_object
from surgeon.checkpoint.tokenizer_files import TOKENIZER_FILE
from surgeon.common.disk_space import check_room, writing
from surgeon.common.files import read_given
from surgeon.common.formatting import at_revision, size
from surgeon.common.json_results import plain_fields
from surgeon.common.library import LOAD_FAILURES, first_line
from surgeon.common.listener import Listener, Quiet
from surgeon.common.processes import start_python
from surgeon.errors import BadInput, printable
from surgeon.manifest.reading import manifest_of
from surgeon.models.gguf_file import base_headers

SCRIPT = "convert_hf_to_gguf.py"
# The types that converters write, and about how many bytes each needs for a number.
TYPES = {"bf16": 2.0, "q8_0": 34 / 32, "f16": 2.0, "f32": 4.0}
_LARGEST_SOURCE = 4 << 20
# The method by which every known version of the converter names a pre-tokenizer.
_NAMES_PRE = "get_vocab_base_pre"


@dataclass(frozen=True)
class WrittenGguf:
    """A GGUF file of an output: its `general.name`, its architecture in llama.cpp, and the type of its matrices.

    `pre` is llama.cpp's name of the pre-tokenizer, None where the vocabulary needs none.
    """

    path: Path
    name: str
    architecture: str
    type: str
    pre: str | None
    tensors: int
    nbytes: int

    def __repr__(self) -> str:
        return f"WrittenGguf({str(self.path)!r}, {self.architecture}, {self.type}, {self.tensors} tensors)"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`.

        Keys:
            `path`, `tensors`, `bytes`: the file, its number of tensors, and its size
            `name`, `architecture`, `type`: `general.name`; llama.cpp's name of the class; the type of matrices
            `pre`: `tokenizer.ggml.pre` (null: none)
        """
        return plain_fields(self)


def write_gguf(
    out: str | Path,
    file: str | Path,
    *,
    type: str = "bf16",
    converter: str | Path | None = None,
    base: str | Path | None = None,
    listener: Listener | None = None,
) -> WrittenGguf:
    """Write an output as a GGUF file, by llama.cpp's converter, whose code runs.

    Args:
        out: the output's folder
        file: the new file; its name, without the type, becomes `general.name`
        type: the type of matrices: bf16, q8_0, f16 or f32
        converter: a checkout of llama.cpp, or its convert_hf_to_gguf.py; default: the one on the PATH
        base: the base, whose tokenizer names the pre-tokenizer of a changed vocabulary
        listener: gets a note

    Returns:
        the file and what is in it

    Raises:
        BadInput: without a converter, where it or llama.cpp does not serve the output, and where it fails; `file` then
            stays absent
    """
    listener, target = listener or Quiet(), Path(file)
    if type not in TYPES:
        more = "; llama-quantize makes it of a bf16 file" if re.fullmatch(r"i?q\d_\w+", type.lower()) else ""
        raise BadInput(f"--type {printable(type)}: the converter writes {', '.join(TYPES)}{more}")
    _check_free(target)
    folder, script = CheckpointFolder.open(Path(out)), _found(converter)
    named = target.stem
    if named.lower().endswith(type):
        named = named[: -len(type)].rstrip("-_.") or named
    job: dict[str, Any] = {"out": str(folder.path.resolve()), "script": str(script.resolve()), "name": named}
    job |= {"type": type, "base": None, "told": "told.json", "file": "model.gguf"}
    job["instead"] = f"--base {at_revision((first := _bases(folder)[0]).id, first.revision)}"
    _check_served(folder, script)
    with writing(target):
        check_room(target.parent, int(sum(info.numel for info in folder.tensors.values()) * TYPES[type]))
        room = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent)).resolve()
        try:
            job |= {name: str(room / job[name]) for name in ("told", "file")}
            if base is not None:
                job["base"] = _tokenizer_of_base(folder, base, room / "base")
            listener.say(f"{script.name} writes {printable(str(target))}")
            told = _convert(job, room / "log")
            _check_free(target)
            Path(job["file"]).rename(target)
        finally:
            shutil.rmtree(room, ignore_errors=True)
    return WrittenGguf(path=target, name=named, type=type, nbytes=target.stat().st_size, **told)


def gguf_view(written: WrittenGguf) -> Text:
    """Return a line on the written file."""
    pre = f"pre-tokenizer {printable(written.pre)}, " if written.pre else ""
    what = f"{written.architecture}, {written.tensors} tensors, {pre}{written.type}, {size(written.nbytes)}"
    return Text.assemble(("done ", "bold green"), f"{printable(str(written.path))}: {what}", overflow="fold")


def _check_free(target: Path) -> None:
    """Raise BadInput where the file exists, or no folder can hold it."""
    if os.path.lexists(target):
        raise BadInput(f"{printable(str(target))}: already exists; choose another name, or move it away")
    if not target.parent.is_dir():
        raise BadInput(f"{printable(str(target.parent))}: no such folder; make it, or choose another")


def _found(given: str | Path | None) -> Path:
    """Return the converter's script. Raises BadInput where there is none."""
    given = given or shutil.which(SCRIPT)
    if given is None:
        raise BadInput(f"no {SCRIPT} on the PATH; give --converter, a checkout of llama.cpp that has it")
    script = Path(given) / SCRIPT if Path(given).is_dir() else Path(given)
    if not script.is_file():
        raise BadInput(f"{printable(str(script))}: no such file; give a checkout of llama.cpp, or its {SCRIPT}")
    return script


def _bases(out: CheckpointFolder) -> list[Any]:
    """Return the bases of an output's surgeries, the first one first. Raises BadInput where it is no output."""
    manifest = manifest_of(out)
    return [surgery.base for surgery in (*manifest.lineage, manifest)]


def _check_served(folder: CheckpointFolder, script: Path) -> None:
    """Raise BadInput for a class that the converter does not register, or that llama.cpp would run wrongly.

    The converter is read, not run: it is one file, or has a folder `conversion` beside it.
    """
    shown, config, named = printable(str(folder.path)), folder.config, printable(str(script))
    kind = (_text_config(config).get("architectures") or config.get("architectures") or ["no class"])[0]
    if is_grafted(config):
        way = "merge, fold or export them first (docs/how-to/sharing.md, engines)"
        raise BadInput(f"{shown}: {printable(str(kind))} has grafts, which llama.cpp does not know; {way}")
    if (scaled := other_scale(config)) is not None:
        raise BadInput(f"{shown}: {scaled}; give it another number of layers")
    listed: set[Any] = set()
    known = False
    for source in (script, *sorted((script.resolve().parent / "conversion").glob("*.py"))):
        text = read_given(source, what="converter", most=_LARGEST_SOURCE)
        known = known or f"def {_NAMES_PRE}(".encode() in text
        try:
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        except (SyntaxError, ValueError):
            raise BadInput(f"{printable(str(source))}: not Python; give llama.cpp's {SCRIPT}") from None
        registered = (each for each in calls if getattr(each.func, "attr", "") == "register")
        listed |= {name.value for each in registered for name in each.args if isinstance(name, ast.Constant)}
    if not known or not listed:
        raise BadInput(f"{named}: no converter that surgeon knows, as it lacks {_NAMES_PRE}; give llama.cpp's {SCRIPT}")
    if kind not in listed:
        way = "use a newer llama.cpp, if one has it"
        raise BadInput(f"{shown}: {printable(str(kind))} is none of the {len(listed)} classes of {named}; {way}")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model, which may be within another's."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def _tokenizer_of_base(out: CheckpointFolder, base: str | Path, to: Path) -> str:
    """Copy the base's tokenizer into the new folder `to`, and return the folder.

    Raises BadInput where it is that of no base of the output, or the output's splits text otherwise.
    """
    there, bases = base_headers(base, revision=None, trust_remote_code=False), _bases(out)
    own, theirs = (each.read_side_file(TOKENIZER_FILE) if _has(each) else b"{}" for each in (out, there))
    if hashlib.sha256(theirs).hexdigest() not in {each.files.get(TOKENIZER_FILE) for each in bases}:
        way = f"give the base that it was made of, {printable(bases[0].id)}"
        raise BadInput(f"{there.source.shown}: has no {TOKENIZER_FILE} of a base of {printable(str(out.path))}; {way}")
    splits = [[json_object(text).get(key) for key in ("normalizer", "pre_tokenizer")] for text in (own, theirs)]
    if splits[0] != splits[1]:
        what = "splits text otherwise than the base's, so the base's pre-tokenizer is not its own"
        raise BadInput(f"{printable(str(out.path / TOKENIZER_FILE))}: {what}; use the file as surgeon wrote it")
    to.mkdir()
    for name in (name for name in there.side_files if "/" not in name):
        (to / name).write_bytes(there.read_side_file(name))
    (to / CONFIG_FILE).write_text(json.dumps(there.config), encoding="utf-8")
    return str(to)


def _has(folder: CheckpointFolder) -> bool:
    """Return whether a checkpoint has a tokenizer.json."""
    return TOKENIZER_FILE in folder.side_files


def _convert(job: Mapping[str, Any], log: Path) -> dict[str, Any]:
    """Run the converter in a process of its own, and return what it found in the file.

    Raises BadInput with what was refused, or with the last line of its log.
    """
    # No converter needs the Hub for a folder.
    environment, command = os.environ | {"HF_HUB_OFFLINE": "1"}, ["-m", "surgeon.share.gguf", json.dumps(job)]
    with log.open("wb") as to:
        process = start_python(command, python=[sys.executable], environment=environment, stdout=to, stderr=to)
        try:
            code = process.wait()
        finally:
            process.kill()
            process.wait()
    told: dict[str, Any] = json_object(Path(job["told"]).read_bytes()) if Path(job["told"]).exists() else {}
    if code or "refused" in told or not Path(job["file"]).is_file():
        said = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line for line in reversed(said) if line.strip()), "it said nothing")
        raise BadInput(printable(told.get("refused") or f"{job['script']}: ended with {code} ({last})", 600))
    return told


def _drive(job: Mapping[str, Any]) -> None:
    """Run the converter in this process, for `_convert`."""
    told: dict[str, Any] = {}
    script = Path(job["script"])
    sys.path.insert(0, str(script.parent))
    try:
        spec = importlib.util.spec_from_file_location(script.stem, script)
        assert spec is not None and spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kinds = [getattr(module, "ModelBase", None) or module.Model]
        for kind in kinds:
            kinds += kind.__subclasses__()
        _name_pre(next(kind for kind in kinds if _NAMES_PRE in vars(kind)), job)
        _complete(module.gguf.GGUFWriter, job, told)
        sys.argv = [str(script), job["out"], "--outfile", job["file"], "--outtype", job["type"]]
        sys.argv += ["--model-name", job["name"]]
        module.main()
    except BadInput as error:
        told = {"refused": str(error)}
    except LOAD_FAILURES as error:
        lacks = f"; install {error.name} here" if isinstance(error, ModuleNotFoundError) else ""
        told = {"refused": f"{script}: failed ({error.__class__.__name__}: {first_line(error)}){lacks}"}
    Path(job["told"]).write_text(json.dumps(told), encoding="utf-8")


def _name_pre(kind: Any, job: Mapping[str, Any]) -> None:
    """Let the converter's class `kind` name the base's pre-tokenizer where it does not know the output's ids.

    The vocabulary of a model that `upcycle_experts` made a GLM has none of GLM's tokens, which a GLM's own needs.
    """
    named = getattr(kind, _NAMES_PRE)

    def name(self: Any, tokenizer: Any) -> Any:
        """Return the name of the pre-tokenizer. Raises BadInput where the converter knows none."""
        try:
            return named(self, tokenizer)
        except NotImplementedError:
            if job["base"] is None:
                why = f"the converter knows no pre-tokenizer by its tokens; give {job['instead']}, if it knows those"
                raise BadInput(f"{job['out']}: {why}") from None
        from surgeon.models.load import find_tokenizer

        found, why = find_tokenizer(Path(job["base"]))
        try:
            if found is not None:
                return named(self, found)
        except NotImplementedError:
            why = f"{job['script']} does not know its pre-tokenizer; use a newer llama.cpp"
        raise BadInput(f"the base's tokenizer: {why}")

    setattr(kind, _NAMES_PRE, name)
    file = Path(job["out"]) / TOKENIZER_FILE
    if hasattr(kind, "_set_vocab_glm") and file.is_file() and b"[gMASK]" not in file.read_bytes():
        kind._set_vocab_glm = kind._set_vocab_gpt2


def _complete(kind: Any, job: Mapping[str, Any], told: dict[str, Any]) -> None:
    """Let the writer's class `kind` check and complete a file's settings before it writes anything."""
    wrote, out = kind.write_header_to_file, Path(job["out"])

    def write(self: Any, *given: Any, **more: Any) -> Any:
        """Write the header. Raises BadInput for what llama.cpp would run wrongly."""
        values = {name: each.value for part in self.kv_data for name, each in part.items()}
        types = _text_config(json_object((out / CONFIG_FILE).read_bytes())).get("layer_types") or []
        window = f"{self.arch}.attention.sliding_window"
        if types and window in values and f"{window}_pattern" not in values:
            self.add_sliding_window_pattern([each == "sliding_attention" for each in types])
        _check_tokens(values, out / TOKENIZER_FILE)
        tensors = {name: info for part in self.tensors for name, info in part.items()}
        half = next((name for name, info in tensors.items() if info.dtype.name == "F16"), None)
        if job["type"] == "q8_0" and half is not None:
            why = f"{half} has rows of {tensors[half].shape[-1]}, no multiple of 32, which Q8_0 needs"
            raise BadInput(f"--type q8_0: {why}; give --type bf16, or widen it first (`pad_to`)")
        told.update(architecture=self.arch, pre=values.get("tokenizer.ggml.pre"), tensors=len(tensors))
        return wrote(self, *given, **more)

    kind.write_header_to_file = write


def _check_tokens(values: Mapping[str, Any], file: Path) -> None:
    """Raise BadInput where a GGUF's tokens, or their order of merging, are not those of the output's tokenizer.json.

    A SentencePiece vocabulary is read from tokenizer.model, which knows no change of it; without that file all tokens
    get one score, and llama.cpp merges by scores.
    """
    if values.get("tokenizer.ggml.model") not in ("gpt2", "llama") or not file.is_file():
        return
    read = json_object(file.read_bytes())
    vocabulary, added = read["model"]["vocab"], {each["id"] for each in read.get("added_tokens", [])}
    # A Unigram lists its tokens in order, each with its score.
    ids = vocabulary if isinstance(vocabulary, dict) else {each[0]: number for number, each in enumerate(vocabulary)}
    tokens = values.get("tokenizer.ggml.tokens", [])
    there = {n: each.decode("utf-8", "replace") if isinstance(each, bytes) else each for n, each in enumerate(tokens)}
    scores = {*values.get("tokenizer.ggml.scores", [])}
    if any(there.get(n) != content for content, n in ids.items() if n not in added) or len(scores) == 1:
        raise BadInput(
            f"{printable(str(file))}: a vocabulary of SentencePiece, which the converter reads from its tokenizer.model"
            " alone, and that file is missing, or has not these tokens; serve this output by another engine"
        )


if __name__ == "__main__":
    _drive(json.loads(sys.argv[1]))
