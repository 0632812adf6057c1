"""A causal model whose weights are in memory only while the unit that owns them runs.

The model is built on the meta device. Hooks load the weights of one unit (a decoder layer, the embedding, the final
norm, the output head) from the shards just before it runs, and free them right after. Matrices outside the layers stay
in their file: embeddings read the rows they look up, the head a block of rows at a time (stored_matrix.py). The forward
is transformers' own, so masks, caches and scaling are those of the model type.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from surgeon.anatomy.dissect import dissect_folder
from surgeon.anatomy.names import as_loaded, made_of
from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.checkpoint.header import FLOAT_DTYPES
from surgeon.checkpoint.ranges import fill
from surgeon.checkpoint.weights import quantisation
from surgeon.common.library import first_line
from surgeon.errors import BadInput, SurgeonError, printable
from surgeon.models.load import (
    HEAD,
    HEADLESS,
    LACKS,
    Attention,
    build_model,
    check_doubled,
    stored_dtype,
    torch_dtype,
)
from surgeon.models.stored_matrix import StoredMatrix

# The bytes read at a time for casting to another dtype; a multiple of every number's width.
_CAST_BYTES = 8 * 1024 * 1024


class StreamedModel:
    """A causal language model whose weights are in memory only while the unit that owns them runs.

    `module` is the transformers model (call it as usual, in inference mode); `layers` are its decoder layers;
    `stored_as` gives for each tensor of the model the names of the stored tensors it is made from. The names and shapes
    of all stored tensors are checked before anything runs; it raises `failure` where they do not fit the config. `more`
    is the number of its token rows that the model it is compared with does not have; the head's blocks are cut before
    them.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "cpu",
        attention: Attention | None = None,
        failure: type[SurgeonError] = BadInput,
        more: int = 0,
    ) -> None:
        self.folder, self.device, self.failure = folder, torch.device(device), failure
        if quantisation(folder.config) is not None:
            raise failure(
                f"{self._shown}: a quantised model cannot be run layer by layer; compare it whole (without --streamed)"
            )
        self.module = build_model(
            folder, dtype=lambda config: self._chosen_dtype(dtype, config), attention=attention, failure=failure
        )
        # The model's tensors that are converted from stored ones.
        self._made: set[str] = set()
        self._stack = ""
        self.stored_as = self._stored_names()
        self.layers = self._decoder_layers()
        # Units (by id) whose weights are not loaded: layers that are left out.
        self.skipped: set[int] = set()
        self._more = more
        # How many first numbers of the residual stream digests cover; None: all of them.
        self.digest_width: int | None = None
        self._digests: list[bytes] = []
        self._move_buffers()
        self._hook_units()

    def take_digests(self) -> list[bytes]:
        """Return and clear the digests of the last forward: of the first layer's input, then of each layer's output."""
        taken, self._digests = self._digests, []
        return taken

    def _chosen_dtype(self, dtype: str | torch.dtype, config: Any) -> torch.dtype:
        """Set and return the dtype: the given one, else the config's, else the first stored tensor's (as
        transformers).
        """
        if isinstance(dtype, torch.dtype):
            self.dtype = dtype
        elif dtype != "auto":
            self.dtype = torch_dtype(dtype)
        elif config.dtype is not None:
            self.dtype = torch_dtype(str(config.dtype).removeprefix("torch."))
        else:
            floating = {name: info.dtype for name, info in self.folder.tensors.items() if info.dtype in FLOAT_DTYPES}
            self.dtype = stored_dtype(floating[min(floating)])
        return self.dtype

    @property
    def _shown(self) -> str:
        """Return the folder's path as printable text, for messages."""
        return printable(str(self.folder.path))

    def _stored_names(self) -> dict[str, tuple[str, ...]]:
        """Map every tensor of the model to the stored tensors that transformers would make it from, ties included."""
        check_doubled(self.folder, self.module, self.failure)
        try:
            anatomy = dissect_folder(self.folder)
        except BadInput as error:
            raise self.failure(f"{self._shown}: {error}") from error
        self._stack = anatomy.derivation.stack
        sources: dict[str, list[str]] = {}
        for stored, made in made_of(self.module, self.folder.tensors).items():
            self._made |= {*made.names} if made.converted else set()
            for name in made.names:
                sources.setdefault(name, []).append(stored)
        for name, other in self.module.all_tied_weights_keys.items():
            # A stored head is used although the config ties it.
            one, two = sources.get(name, []), sources.get(other, [])
            sources[name], sources[other] = one or two, two or one
        expected = self.module.state_dict(keep_vars=True)
        if HEAD in expected and not sources.get(HEAD):
            raise self.failure(f"{self._shown}: {LACKS.format(HEAD)}{HEADLESS}")
        return {name: tuple(sources[name]) for name in expected if sources.get(name)}

    def _decoder_layers(self) -> list[nn.Module]:
        """Return the layers of the decoder's main stack.

        It is not found by name (`layers`, `h`, …): names differ by model type.
        """
        if self._stack:
            return list(self.module.get_submodule(self._stack))
        stacks = [list(child) for child in self.module.get_decoder().children() if isinstance(child, nn.ModuleList)]
        if not stacks:
            raise self.failure(f"{self._shown}: {type(self.module).__name__} has no stack of decoder layers")
        return max(stacks, key=lambda stack: sum(value.numel() for layer in stack for value in layer.parameters()))

    def _move_buffers(self) -> None:
        """Move buffers to the device; stored buffers get their stored values, in the dtype of weights."""
        for prefix, owner in self.module.named_modules():
            for name, buffer in owner.named_buffers(recurse=False):
                full = f"{prefix}.{name}" if prefix else name
                if full in self.stored_as and buffer.is_floating_point():
                    (buffer,) = self.weights([full])
                elif full in self.stored_as:
                    (stored,) = self.stored_as[full]
                    buffer = self._stored([stored])[stored].clone()
                owner._buffers[name] = buffer.to(self.device)

    def _hook_units(self) -> None:
        """Hook every decoder layer as a whole, and every other module that owns parameters itself."""
        names = {id(module): name for name, module in self.module.named_modules()}
        inside = {id(part) for layer in self.layers for part in layer.modules()}
        for layer in self.layers:
            self._hook(layer, [(names[id(part)], part) for part in layer.modules()])
        for name, module in self.module.named_modules():
            if id(module) not in inside and module._parameters:
                # A model may ask a parameter for its device before the module runs (Llama 4), so set matrices now.
                for key, value in module._parameters.items():
                    full = f"{name}.{key}" if name else key
                    if value is not None and self._stays(full):
                        module._parameters[key] = self._in_file(full, value)
                self._hook(module, [(name, module)])
        # Registered after the hooks that load and free weights, so that the digest is taken when they are freed.
        self.layers[0].register_forward_pre_hook(self._digest_input, with_kwargs=True)
        for layer in self.layers:
            layer.register_forward_hook(self._digest_output)

    def _hook(self, unit: nn.Module, owners: list[tuple[str, nn.Module]]) -> None:
        """Have a unit's weights read before it runs and freed after it; `owners` are its modules by name."""
        slots = [
            (owner, key, f"{prefix}.{key}" if prefix else key, value)
            for prefix, owner in owners
            for key, value in owner._parameters.items()
            if value is not None and not isinstance(value, StoredMatrix)
        ]

        def fetch(_module: nn.Module, _args: Any) -> None:
            """Read the unit's weights, unless it is skipped."""
            if id(unit) in self.skipped:
                return
            values = self.weights([name for _, _, name, _ in slots])
            for (owner, key, _, _), value in zip(slots, values, strict=True):
                owner._parameters[key] = nn.Parameter(value, requires_grad=False)

        def drop(_module: nn.Module, _args: Any, _result: Any) -> None:
            """Free the unit's weights."""
            for owner, key, _, empty in slots:
                owner._parameters[key] = empty

        unit.register_forward_pre_hook(fetch)
        unit.register_forward_hook(drop, always_call=True)

    def weights(self, names: list[str]) -> list[Tensor]:
        """Return the weights called `names`, on the device and in the dtype of the computation."""
        values = {name: self._read(name) for name in names if name not in self._made}
        if made := [name for name in names if name in self._made]:
            values |= self._converted(made)
        return [values[name] for name in names]

    def _stays(self, name: str) -> bool:
        """Return whether a weight is a matrix that the model uses as stored, so that it may stay in its file."""
        info = self.folder.tensors[self.stored_as[name][0]]
        return name not in self._made and len(info.shape) == 2 and info.dtype in FLOAT_DTYPES

    def _in_file(self, name: str, like: Tensor) -> Any:
        """Return a matrix, read from its file when used, that replaces a parameter; modules do not notice."""
        (stored,) = self.stored_as[name]
        cut = self.folder.tensors[stored].shape[0] - self._more if self._more else 0
        return StoredMatrix.of(like.to(self._dtype_of(name)), partial(self.rows, stored), self.device, cut=cut)

    def _read(self, name: str) -> Tensor:
        """Read a weight that is stored in the model's form."""
        (stored,) = self.stored_as[name]
        info = self.folder.tensors[stored]
        if info.dtype not in FLOAT_DTYPES or not info.shape:
            return self._placed(self._stored([stored])[stored], name)
        if stored_dtype(info.dtype) == self._dtype_of(name) and self.device.type == "cpu":
            return self.rows(stored, 0, info.shape[0])
        value = torch.empty(info.shape, dtype=self._dtype_of(name), device=self.device)
        step = max(1, _CAST_BYTES * info.shape[0] // max(1, info.nbytes))
        for first in range(0, info.shape[0], step):
            value[first : first + step] = self.rows(stored, first, min(first + step, info.shape[0]))
        return value

    def rows(self, stored: str, first: int, behind: int) -> Tensor:
        """Read rows from `first` up to `behind` of a stored tensor, in its stored dtype, into aligned memory.

        They are read, not mapped, because mapped tensors are unaligned.
        """
        info = self.folder.tensors[stored]
        value = torch.empty((behind - first, *info.shape[1:]), dtype=stored_dtype(info.dtype))
        row = info.nbytes // info.shape[0] if info.shape[0] else 0
        try:
            handle = self.folder.open_shard(info.file)
            try:
                if value.numel():
                    fill(handle, value.view(-1).view(torch.uint8).numpy().data, info.begin + first * row)
            finally:
                os.close(handle)
        except (OSError, BadInput) as error:
            raise self.failure(f"{printable(str(self.folder.path / info.file))}: cannot be read: {error}") from error
        return value

    def _placed(self, stored: Tensor, name: str) -> Tensor:
        """Return a copy of a stored weight on the device, in the dtype of the computation."""
        # A new tensor: the mapped one is unaligned and would keep the file mapped.
        value = torch.empty(stored.shape, dtype=self._dtype_of(name), device=self.device)
        return value.copy_(stored)

    def _stored(self, names: list[str]) -> dict[str, Tensor]:
        """Return tensors as they are stored, memory-mapped."""
        found: dict[str, Tensor] = {}
        for file in dict.fromkeys(self.folder.tensors[name].file for name in names):
            with self._opened(file) as shard:
                for name in names:
                    if self.folder.tensors[name].file == file:
                        found[name] = shard.get_tensor(name)
        return found

    def _converted(self, names: list[str]) -> dict[str, Tensor]:
        """Return weights stored under other names, or as several tensors, converted as transformers does."""
        given = self._stored(list(dict.fromkeys(stored for name in names for stored in self.stored_as[name])))
        for name, value in as_loaded(self.module, given, names).items():
            given[name] = self._placed(value, name)
        return {name: given[name] for name in names}

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype that transformers gives this weight: some model types keep a few modules in float32."""
        kept = set(self.module._keep_in_fp32_modules_strict or ())
        if self.dtype == torch.float16:
            kept |= set(self.module._keep_in_fp32_modules or ())
        halved = self.dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if halved and any(part in name for part in kept) else self.dtype

    @contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
        """Yield an opened shard; an error while it is read becomes `failure`."""
        path = self.folder.path / file
        try:
            with safe_open(path, framework="pt") as shard:
                yield shard
        except (OSError, SafetensorError) as error:
            raise self.failure(f"{printable(str(path))}: cannot be read: {first_line(error)}") from error

    def _digest_input(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the digest of a layer's input."""
        self._take(args[0] if args else kwargs["hidden_states"])

    def _digest_output(self, _layer: nn.Module, _args: Any, result: Any) -> None:
        """Record the digest of a layer's output."""
        self._take(result[0] if isinstance(result, tuple) else result)

    def _take(self, hidden: Tensor) -> None:
        """Append the digest of hidden states, of their first `digest_width` numbers."""
        self._digests.append(_digest(hidden[..., : self.digest_width]))


def _digest(hidden: Tensor) -> bytes:
    """Return a digest that is equal for tensors that compare equal.

    Adding zero turns −0 into +0, as a branch that adds zero does.
    """
    values = (hidden + 0.0).cpu().contiguous()
    made = hashlib.blake2b(f"{values.dtype} {tuple(values.shape)}".encode(), digest_size=16)
    made.update(values.view(torch.uint8).numpy().data)
    return made.digest()
