"""Loading a checkpoint to run it: silent, offline, strict about missing tensors, weights aligned.

The only place where transformers loads anything, and all it gets is a view (view.py) of a folder that was opened and
judged. Code of the folder runs only where its model is built of its own classes, and the user trusts this folder.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surgeon.anatomy.anatomy import layer_of, places_of, without_a_place
from surgeon.anatomy.compressed import cannot_be_loaded
from surgeon.anatomy.names import made_of, stored_twice
from surgeon.anatomy.skeleton import CAUSAL, IMAGE_TEXT, auto_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import FLOAT_DTYPES, check_dtype
from surgeon.checkpoint.peft_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from surgeon.checkpoint.weights import COMPRESSED, QUANTISATION, quantisation
from surgeon.common.library import LOAD_FAILURES, config_of, described, first_line, quiet_transformers, why_nan
from surgeon.errors import BadInput, SurgeonError, printable
from surgeon.grafts.bundle import import_bundle
from surgeon.grafts.composition import composition_of
from surgeon.models.view import PROCESSOR_FILES, TOKENIZER_FILES, view_of_model, view_of_tokenizer

# Above the widest vector registers (64 bytes) and what torch's own CPU allocator gives.
ALIGNMENT = 64
# Of a whole model, or of each of its parts.
Attention = str | dict[str, str]
DECODERS = (CAUSAL, IMAGE_TEXT)
CLASSIFIER = "AutoModelForSequenceClassification"


@contextlib.contextmanager
def running(model: Any) -> Iterator[None]:
    """Raises BadInput for what a model's forward raises inside: a config may ask for what no code can compute."""
    try:
        yield
    except SurgeonError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        shown = printable(str(getattr(model, "name_or_path", "") or type(model).__name__))
        # `generate` cannot draw from such probabilities.
        if "`nan`" in str(error):
            raise BadInput(f"{shown}: {why_nan(model)}") from error
        raise BadInput(
            f"{shown}: the model cannot be run ({first_line(error)}); is config.json its own, is memory short?"
        ) from error


def torch_dtype(name: str) -> torch.dtype:
    """The floating torch dtype called `name` ("bfloat16", "float32", …). Raises BadInput for any other name."""
    check_dtype(name)
    return _torch(name)


def stored_dtype(name: str) -> torch.dtype:
    """The torch dtype of a tensor that a checkpoint's header calls `name` ("BF16", …)."""
    return _torch(FLOAT_DTYPES[name].torch)


def _torch(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


@dataclass(frozen=True)
class _Loader:
    """How a model is made: of a config alone (`blank`), or with the weights of a view (`filled`)."""

    config: Any
    blank: Callable[..., Any]
    filled: Callable[..., Any]


def _loader(folder: CheckpointFolder, view: Path, auto: str) -> _Loader:
    """How transformers' class `auto` makes the model of `folder`, whose view this is."""
    import transformers

    if folder.classes == "shipped":
        # The installed package's, which the folder's file equals byte for byte: transformers imports nothing of it.
        kind = shipped_class(folder.config, auto)
        config = shipped_config(kind, {**folder.config, **_dequantising(folder.config)})
        return _Loader(config, kind._from_config, kind.from_pretrained)
    trusted = {"trust_remote_code": folder.classes == "own"}
    config = transformers.AutoConfig.from_pretrained(view, local_files_only=True, **trusted)
    made_by = getattr(transformers, auto)
    return _Loader(
        config,
        lambda config, **options: made_by.from_config(config, **trusted, **options),
        lambda view, **options: made_by.from_pretrained(view, **trusted, **options),
    )


def shipped_class(config: Mapping[str, Any], auto: str) -> Any:
    """The class that surgeon ships for a grafted model of this config, as transformers' class `auto` would choose it.

    Raises ValueError where there is none.
    """
    native = composition_of(config)
    found = native.class_of(auto) if native is not None else None
    if found is None:
        raise ValueError(f"{printable(str(config.get('model_type')))} has no class for {auto}")
    return getattr(import_bundle(config), found)


def shipped_config(kind: Any, config: Mapping[str, Any]) -> Any:
    """A config.json as the config object of a shipped class."""
    return config_of(config, kind.config_class)


def _shown_config(folder: CheckpointFolder) -> dict[str, Any]:
    """What the view of a folder says in its config.json; quantised weights are loaded dequantised, wherever."""
    from transformers import CONFIG_MAPPING

    loading = _dequantising(folder.config)
    if folder.classes == "own":
        # Its code may read any field; where code comes from is the folder alone.
        return {key: value for key, value in folder.config.items() if not key.endswith("name_or_path")} | loading
    try:
        kind = CONFIG_MAPPING[str(folder.config.get("model_type"))]
    except KeyError:
        kind = None
    return described(folder.config, kind) | loading


def _dequantising(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields by which transformers loads quantised weights dequantised; none where they are not quantised."""
    settings = quantisation(config)
    # Embeddings too: transformers would match every pattern of `modules_to_not_convert` for those left quantised.
    kept = {key: value for key, value in (settings or {}).items() if key != "modules_to_convert"}
    return {QUANTISATION: kept | {"dequantize": True}} if kept else {}


@contextlib.contextmanager
def _loading(
    folder: CheckpointFolder, auto: str, failure: type[SurgeonError], doing: str
) -> Iterator[tuple[Path, _Loader]]:
    """A view of the folder and the model's loader; whatever transformers raises becomes `failure`, in one line."""
    shown = printable(str(folder.path))
    with contextlib.ExitStack() as stack:
        try:
            view = stack.enter_context(view_of_model(folder, _shown_config(folder)))
        except BadInput as error:
            if isinstance(error.__cause__, OSError):
                # No room for temporary files, say, which says nothing of the folder.
                raise
            raise failure(str(error)) from error
        try:
            with quiet_transformers():
                yield view, _loader(folder, view, auto)
        except LOAD_FAILURES as error:
            words = first_line(error).replace(str(view), shown)
            raise failure(f"{shown}: {doing}: {words}") from error


def opened(folder: CheckpointFolder | Path, failure: type[SurgeonError] = BadInput) -> CheckpointFolder:
    """The checkpoint itself, or a folder opened as a stranger's: code of its own is refused. Raises `failure`."""
    if isinstance(folder, CheckpointFolder):
        return folder
    try:
        return CheckpointFolder.open(folder)
    except BadInput as error:
        raise failure(str(error)) from error


def load_model(
    folder: CheckpointFolder | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    attention: Attention | None = None,
    failure: type[SurgeonError] = BadInput,
    auto: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Any:
    """The model in `folder` as transformers' class `auto` loads it, in eval mode; None: that of a decoder.

    `attention` is the attention implementation (`attention_of` another model; None: the one transformers chooses). A
    tensor that is missing, without a place in a layer or of another shape raises `failure` (BadInput by default),
    naming the first: transformers only warns, fills in random values and goes on. Tensors outside the layers that the
    model has no place for compute nothing; `say` gets a line that names them. Weights at unaligned addresses of a
    mapped file are copied to aligned ones, because BLAS kernels may round differently by alignment and two files
    rarely have the same tensor at the same offset. For encoders, whose head may be missing, a tensor without a place
    in the model is not an error (layers are checked by name before), nor is a base model's missing pooler.
    """
    folder = opened(folder, failure)
    if why := _unreadable(folder):
        raise failure(
            f"{printable(str(folder.path))}: {why}; `dequantise` it first, or compare tensors alone (`surgeon verify"
            " --static`)"
        )
    auto = auto or decoder_class(folder.config)
    wanted = torch_dtype(dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if torch.device(device).type != "cpu":
        options["device_map"] = {"": device}
    with _loading(folder, auto, failure, "cannot be loaded with transformers") as (view, loader), _whole_blocks(folder):
        model, info = loader.filled(
            view,
            config=loader.config,
            dtype=wanted,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    if quantisation(folder.config) is not None:
        _one_dtype(model)
    model.name_or_path = model.config.name_or_path = str(folder.path)
    check_doubled(folder, model, failure)
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if hasattr(model, "surgery"):
        layers = model.surgery.trunk_layers
    _check_loaded(info, auto, _further(folder.tensors, layers), printable(str(folder.path)), failure, say)
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT:
            parameter.data = parameter.data.clone()
    return model.eval()


def _unreadable(folder: CheckpointFolder) -> str:
    """Why transformers cannot read the weights of a quantised folder, if it cannot."""
    settings = quantisation(folder.config)
    if settings is None or settings["quant_method"] != COMPRESSED:
        return ""
    from transformers.utils import is_compressed_tensors_available

    if not is_compressed_tensors_available():
        return f"transformers reads {COMPRESSED} with the package of that name (`pip install {COMPRESSED}`)"
    return cannot_be_loaded(folder.config, folder.tensors)


@contextlib.contextmanager
def _whole_blocks(folder: CheckpointFolder) -> Iterator[None]:
    """Have transformers dequantise FP8 matrices block by block as they were quantised, the last blocks smaller.

    It divides a matrix into equal blocks, which fails on 576 rows in five blocks of 128, and is wrong on 192 in two.
    """
    if quantisation(folder.config) is None:
        yield
        return
    from torch.nn.functional import pad
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    original = Fp8Dequantize._dequantize_one

    def dequantised(self: Any, quantized: Any, scales: Any, output_dtype: Any = None) -> Any:
        block = self.hf_quantizer.quantization_config.weight_block_size
        if quantized.dtype != torch.float8_e4m3fn or block is None or scales.numel() == 1:
            return original(self, quantized, scales, output_dtype)
        rows, columns = quantized.shape[-2:]
        whole = pad(quantized.float(), (0, -columns % block[1], 0, -rows % block[0]))
        return original(self, whole, scales, output_dtype)[..., :rows, :columns].contiguous()

    Fp8Dequantize._dequantize_one = dequantised
    try:
        yield
    finally:
        Fp8Dequantize._dequantize_one = original


def _one_dtype(model: Any) -> None:
    """Give what a quantised checkpoint stores in half precision the model's dtype.

    transformers leaves it as it is beside dequantised weights, and two dtypes cannot be multiplied.
    """
    wanted = model.config.get_text_config().dtype
    halves = (torch.float16, torch.bfloat16)
    for parameter in model.parameters() if wanted is not None else ():
        if parameter.dtype != wanted and parameter.dtype in halves:
            parameter.data = parameter.data.to(wanted)


def build_model(
    folder: CheckpointFolder,
    *,
    dtype: Callable[[Any], torch.dtype],
    attention: Attention | None = None,
    failure: type[SurgeonError] = BadInput,
    auto: str | None = None,
) -> Any:
    """The model in `folder` on the meta device, in eval mode; `dtype` chooses its dtype by its config object.

    It is of transformers' class `auto`; None: that of a decoder. Its buffers are real: the ones outside the checkpoint
    (rotary frequencies, embedding scales) could not be recovered from meta. Raises `failure` where it cannot be built.
    """
    from accelerate import init_empty_weights

    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    auto = auto or decoder_class(folder.config)
    with _loading(folder, auto, failure, "the model cannot be built") as (_, loader):
        chosen = dtype(loader.config)
        with init_empty_weights(include_buffers=False):
            module = loader.blank(loader.config, dtype=chosen, **options)
    module.config.name_or_path = str(folder.path)
    return module.eval()


def check_doubled(folder: CheckpointFolder, model: Any, failure: type[SurgeonError]) -> None:
    """Raise `failure` where transformers has loaded one tensor twice: the last one stays, and it says nothing."""
    if twice := stored_twice(model, made_of(model, folder.tensors)):
        first, second = map(printable, twice)
        raise failure(f"{printable(str(folder.path))}: {first} and {second} are one tensor to transformers; keep one")


LACKS = "the model has the tensor {}, the checkpoint lacks it"
HEAD = "lm_head.weight"
HEADLESS = (
    "; it was saved without its language-model head, which running it takes: add the head, or compare tensors alone"
    " (`surgeon verify --static`)"
)


def _check_loaded(
    info: dict[str, Any],
    auto: str,
    further: Collection[int],
    shown: str,
    failure: type[SurgeonError],
    say: Callable[[str], None] | None,
) -> None:
    """Raise `failure` naming the first tensor that is missing, without a place in a layer, or of another shape."""
    if auto not in DECODERS:
        info["unexpected_keys"] = ()
        info["missing_keys"] = [name for name in info["missing_keys"] if not name.startswith("pooler.dense.")]
    idle = [name for name in sorted(info["unexpected_keys"]) if _is_idle(name, further)]
    for found, words in (
        (sorted(info["missing_keys"]), LACKS),
        (
            sorted(set(info["unexpected_keys"]) - set(idle)),
            "the checkpoint has the tensor {}, the model has no place for it",
        ),
        (
            sorted(key[0] for key in info["mismatched_keys"]),
            "tensor {} has another shape than the config requires",
        ),
    ):
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            headless = HEADLESS if words == LACKS and found == [HEAD] else ""
            raise failure(f"{shown}: {words.format(printable(found[0]))}{more}{headless}")
    if idle and say is not None:
        say(f"{shown}: {without_a_place(idle)}")


def _further(names: Iterable[str], layers: int | None) -> frozenset[int]:
    """Layers above the stack's `layers` that predict further tokens: they hold other tensors than its last one does."""
    held: dict[int, set[str]] = {}
    for _, index, suffix in places_of(names).values():
        held.setdefault(index, set()).add(suffix)
    above = (index for index in held if layers is not None and index >= layers)
    return frozenset(index for index in above if held[index] != held.get((layers or 0) - 1))


def _is_idle(name: str, further: Collection[int]) -> bool:
    """Whether a tensor that a model has no place for may lie in its checkpoint: one outside the layers of its stack."""
    place = layer_of(name)
    return place is None or place[1] in further


def attention_of(model: Any) -> Attention:
    """The attention implementation of a model; of one with several parts, each part's, by its name in the config."""
    config = model.config
    parts = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", {})}
    each = {key: part._attn_implementation for key, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **each} if each else config._attn_implementation


def decoder_class(config: Mapping[str, Any]) -> str:
    """transformers' auto class for the decoder of a config: one for text alone, or for images and text."""
    native = composition_of(config)
    return native.auto if native is not None else auto_of(config) or CAUSAL


def find_tokenizer(folder: Path) -> tuple[Any, str]:
    """The tokenizer in `folder`, or None and the reason in words. Never runs code from the folder."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None, "there is no tokenizer in the folder"
    view = folder
    try:
        with view_of_tokenizer(folder) as view, quiet_transformers():
            found = AutoTokenizer.from_pretrained(view, trust_remote_code=False, local_files_only=True)
    except LOAD_FAILURES as error:
        words = first_line(error).replace(str(view), printable(str(folder)))
        return None, f"the tokenizer in the folder cannot be loaded ({words})"
    if not isinstance(found, PreTrainedTokenizerBase):
        return None, f"the tokenizer in the folder cannot be loaded ({type(found).__name__} is no tokenizer)"
    found.name_or_path = str(folder)
    return found, ""


def with_adapter(model: Any, adapter: Path, called: Callable[[str], str]) -> Any:
    """A model with the PEFT adapter of a folder that was opened, in eval mode. Raises BadInput where PEFT refuses it.

    PEFT sees the two files that were checked, and no other, with tensors as `called` renames them: those whose names it
    does not know, it leaves out in silence.
    """
    from peft import PeftModel
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory(prefix="surgeon-") as view:
        (Path(view) / ADAPTER_CONFIG).symlink_to((adapter / ADAPTER_CONFIG).resolve())
        tensors = {called(name): value for name, value in load_file(adapter / ADAPTER_WEIGHTS).items()}
        save_file(tensors, Path(view) / ADAPTER_WEIGHTS, {"format": "pt"})
        try:
            with quiet_transformers():
                return PeftModel.from_pretrained(model, view, local_files_only=True).eval()
        except LOAD_FAILURES as error:
            raise BadInput(f"{printable(str(adapter))}: PEFT cannot load it ({first_line(error)})") from error


def find_processor(folder: Path) -> tuple[Any, str]:
    """The processor of images and text in `folder`, or None and the reason in words. Never runs code from the folder.

    Its part for videos, which needs packages that images do not, is left out.
    """
    from transformers import AutoProcessor, ProcessorMixin

    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return None, f"there is no processor in the folder (neither {' nor '.join(PROCESSOR_FILES)})"
    view = folder
    try:
        with view_of_tokenizer(folder, images=True) as view, quiet_transformers(), _without_videos():
            found = AutoProcessor.from_pretrained(view, trust_remote_code=False, local_files_only=True)
    except LOAD_FAILURES as error:
        words = first_line(error).replace(str(view), printable(str(folder)))
        return None, f"the processor in the folder cannot be loaded ({words})"
    if not isinstance(found, ProcessorMixin) or not hasattr(found, "image_processor"):
        return None, f"the processor in the folder cannot be loaded ({type(found).__name__} reads no images)"
    return found, ""


@contextlib.contextmanager
def _without_videos() -> Iterator[None]:
    """Have transformers make processors whose part for videos is None."""
    from transformers import ProcessorMixin
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor

    load, check = AutoVideoProcessor.__dict__["from_pretrained"], ProcessorMixin.check_argument_for_proper_class

    def checked(self: Any, name: str, part: Any) -> Any:
        return None if part is None and name == "video_processor" else check(self, name, part)

    AutoVideoProcessor.from_pretrained = classmethod(lambda cls, *_, **__: None)
    ProcessorMixin.check_argument_for_proper_class = checked
    try:
        yield
    finally:
        AutoVideoProcessor.from_pretrained = load
        ProcessorMixin.check_argument_for_proper_class = check
