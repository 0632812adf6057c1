"""Loading a checkpoint to run it: without output, offline, strict about missing tensors, with aligned weights.

Only this module has transformers load anything, and always from a view (view.py) of a folder that was opened and
checked. The folder's own code runs only where its model is built from its own classes and the user trusts this folder.
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

# In bytes: no less than the widest vector registers (64 bytes) and the alignment of torch's own CPU allocator.
ALIGNMENT = 64
# The attention implementation of a whole model, or of each of its parts by name.
Attention = str | dict[str, str]
DECODERS = (CAUSAL, IMAGE_TEXT)
CLASSIFIER = "AutoModelForSequenceClassification"


@contextlib.contextmanager
def running(model: Any) -> Iterator[None]:
    """Raise BadInput for exceptions of a model's forward inside: a config may ask for what no code can compute."""
    try:
        yield
    except SurgeonError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        shown = printable(str(getattr(model, "name_or_path", "") or type(model).__name__))
        # `generate` raises this where it cannot sample from NaN probabilities.
        if "`nan`" in str(error):
            raise BadInput(f"{shown}: {why_nan(model)}") from error
        raise BadInput(
            f"{shown}: the model cannot be run ({first_line(error)}); is config.json its own, is memory short?"
        ) from error


def torch_dtype(name: str) -> torch.dtype:
    """Return the floating torch dtype called `name` ("bfloat16", "float32", …). Raises BadInput for any other name."""
    check_dtype(name)
    return _torch(name)


def stored_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a tensor that a checkpoint's header calls `name` ("BF16", …)."""
    return _torch(FLOAT_DTYPES[name].torch)


def _torch(name: str) -> torch.dtype:
    """Return the torch dtype called `name`."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


@dataclass(frozen=True)
class _Loader:
    """The functions that make a model: from a config only (`blank`), or with the weights of a view (`filled`)."""

    config: Any
    blank: Callable[..., Any]
    filled: Callable[..., Any]


def _loader(folder: CheckpointFolder, view: Path, auto: str) -> _Loader:
    """Return the loader by which transformers' class `auto` makes the model of `folder`, whose view is `view`."""
    import transformers

    if folder.classes == "shipped":
        # The class of the installed surgeon, which the folder's file equals byte for byte: transformers does not import
        # the file.
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
    """Return the class that surgeon ships for a grafted model of this config and that class `auto` would choose.

    Raises ValueError where there is none.
    """
    native = composition_of(config)
    found = native.class_of(auto) if native is not None else None
    if found is None:
        raise ValueError(f"{printable(str(config.get('model_type')))} has no class for {auto}")
    return getattr(import_bundle(config), found)


def shipped_config(kind: Any, config: Mapping[str, Any]) -> Any:
    """Return a config.json as the config object of a shipped class."""
    return config_of(config, kind.config_class)


def _shown_config(folder: CheckpointFolder) -> dict[str, Any]:
    """Return the config.json for the view of a folder; it has quantised weights loaded dequantised."""
    from transformers import CONFIG_MAPPING

    loading = _dequantising(folder.config)
    if folder.classes == "own":
        # Its own code may read any field. Fields that name another place are left out: code comes only from the folder.
        return {key: value for key, value in folder.config.items() if not key.endswith("name_or_path")} | loading
    try:
        kind = CONFIG_MAPPING[str(folder.config.get("model_type"))]
    except KeyError:
        kind = None
    return described(folder.config, kind) | loading


def _dequantising(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields by which transformers loads quantised weights dequantised; empty where none are quantised."""
    settings = quantisation(config)
    # Without this field embeddings are dequantised too; with it transformers would match every pattern of
    # `modules_to_not_convert`.
    kept = {key: value for key, value in (settings or {}).items() if key != "modules_to_convert"}
    return {QUANTISATION: kept | {"dequantize": True}} if kept else {}


@contextlib.contextmanager
def _loading(
    folder: CheckpointFolder, auto: str, failure: type[SurgeonError], doing: str
) -> Iterator[tuple[Path, _Loader]]:
    """Yield a view of the folder and the model's loader; exceptions of transformers become `failure`, in one line."""
    shown = printable(str(folder.path))
    with contextlib.ExitStack() as stack:
        try:
            view = stack.enter_context(view_of_model(folder, _shown_config(folder)))
        except BadInput as error:
            if isinstance(error.__cause__, OSError):
                # No room for temporary files, say: not the folder's fault.
                raise
            raise failure(str(error)) from error
        try:
            with quiet_transformers():
                yield view, _loader(folder, view, auto)
        except LOAD_FAILURES as error:
            words = first_line(error).replace(str(view), shown)
            raise failure(f"{shown}: {doing}: {words}") from error


def opened(folder: CheckpointFolder | Path, failure: type[SurgeonError] = BadInput) -> CheckpointFolder:
    """Return a checkpoint as it is, or open a folder as untrusted, so that its own code is refused.

    Raises `failure`.
    """
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
    """Load the model in `folder` by transformers' class `auto`, in eval mode; None: the class of a decoder.

    `attention` is the attention implementation (`attention_of` another model; None: transformers chooses). A tensor
    that is missing, without a place in a layer or of another shape raises `failure` (BadInput by default), naming the
    first one; transformers only warns, fills in random values and goes on. Tensors outside the layers for which the
    model has no place compute nothing; `say` gets a line that names them. Weights at unaligned addresses of a mapped
    file are copied to aligned ones, because BLAS kernels may round differently by alignment, and two files rarely have
    the same tensor at the same offset. For encoders, whose head may be missing, a tensor without a place in the model
    is not an error (layers are checked by name before), nor is a base model's missing pooler.
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


def load_gguf(file: Path) -> tuple[Any, list[str], Any]:
    """Return (model in bfloat16, names of missing tensors, tokenizer) of a GGUF file, by transformers' own loader.

    No code runs that is not transformers'. Raises what that loader raises.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model, info = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        # Otherwise tensors stay packed where there are kernels for them.
        quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
        dtype=torch.bfloat16,
        output_loading_info=True,
    )
    # Some versions keep the entry of a quantised model, whose weights are plain numbers by now.
    model.hf_quantizer, model.is_quantized = None, False
    vars(model.config).pop("quantization_config", None)
    return model, sorted(info["missing_keys"]), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def _unreadable(folder: CheckpointFolder) -> str:
    """Return why transformers cannot read the weights of a quantised folder; empty where it can."""
    settings = quantisation(folder.config)
    if settings is None or settings["quant_method"] != COMPRESSED:
        return ""
    from transformers.utils import is_compressed_tensors_available

    if not is_compressed_tensors_available():
        return f"transformers reads {COMPRESSED} with the package of that name (`pip install {COMPRESSED}`)"
    return cannot_be_loaded(folder.config, folder.tensors)


@contextlib.contextmanager
def _whole_blocks(folder: CheckpointFolder) -> Iterator[None]:
    """Have transformers dequantise FP8 matrices in the blocks of their quantisation, the last blocks smaller.

    transformers divides a matrix into equal blocks, which fails for 576 rows in five blocks of 128, and is wrong for
    192 rows in two.
    """
    if quantisation(folder.config) is None:
        yield
        return
    from torch.nn.functional import pad
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    original = Fp8Dequantize._dequantize_one

    def dequantised(self: Any, quantized: Any, scales: Any, output_dtype: Any = None) -> Any:
        """Dequantise a matrix padded to whole blocks, and cut the padding off again.

        Other matrices, and matrices with one scale, are left to transformers.
        """
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
    """Cast the tensors that a quantised checkpoint stores in half precision to the model's dtype.

    transformers leaves them as stored, next to dequantised weights, and two dtypes cannot be multiplied.
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
    """Build the model in `folder` on the meta device, in eval mode; `dtype` chooses its dtype from its config object.

    The class is transformers' `auto`; None: the class of a decoder. Buffers are real: those outside the checkpoint
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
    """Raise `failure` where transformers loads two stored tensors into one: it silently keeps the last."""
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
    """Return the layers from number `layers` on that predict further tokens (MTP).

    They hold other tensors than the stack's last layer.
    """
    held: dict[int, set[str]] = {}
    for _, index, suffix in places_of(names).values():
        held.setdefault(index, set()).add(suffix)
    above = (index for index in held if layers is not None and index >= layers)
    return frozenset(index for index in above if held[index] != held.get((layers or 0) - 1))


def _is_idle(name: str, further: Collection[int]) -> bool:
    """Return whether a tensor without a place in the model may be in its checkpoint: one outside the stack's layers."""
    place = layer_of(name)
    return place is None or place[1] in further


def attention_of(model: Any) -> Attention:
    """Return a model's attention implementation; for a model with several parts, one per part by its config name."""
    config = model.config
    parts = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", {})}
    each = {key: part._attn_implementation for key, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **each} if each else config._attn_implementation


def decoder_class(config: Mapping[str, Any]) -> str:
    """Return transformers' auto class for the decoder of a config: for text only, or for images and text."""
    native = composition_of(config)
    return native.auto if native is not None else auto_of(config) or CAUSAL


def find_tokenizer(folder: Path) -> tuple[Any, str]:
    """Return (tokenizer, "") for `folder`, or (None, the reason in words). Never runs code from the folder."""
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
    """Load the PEFT adapter of an opened folder onto a model, in eval mode. Raises BadInput where PEFT refuses it.

    PEFT gets only the two files that were checked, with tensors renamed by `called`: it silently leaves out tensors
    whose names it does not know.
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
    """Return (processor of images and text, "") for `folder`, or (None, the reason in words).

    Never runs the folder's code. The processor's part for videos, which needs packages that images do not need, is left
    out.
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
        """Accept a missing part for videos; let transformers check every other part."""
        return None if part is None and name == "video_processor" else check(self, name, part)

    AutoVideoProcessor.from_pretrained = classmethod(lambda cls, *_, **__: None)
    ProcessorMixin.check_argument_for_proper_class = checked
    try:
        yield
    finally:
        AutoVideoProcessor.from_pretrained = load
        ProcessorMixin.check_argument_for_proper_class = check
