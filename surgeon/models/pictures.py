"""A prompt with a picture, as a checkpoint's processor makes it: what a model that reads images is compared on.

The picture is drawn here, the same everywhere: gradients, waves, a disc and a frame, so that no two patches are alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgeon.common.library import LOAD_FAILURES, quiet_transformers

_QUESTION = "what is in this picture, and which colours does it have?"
# Height and width where the processor names none, and the most of each: a setting may ask for any size.
_SIZE = (224, 320)
_LARGEST = 1024


def drawn(height: int, width: int) -> Any:
    """The picture, in RGB. Raises ImportError where Pillow is not installed."""
    from PIL import Image

    rows, columns = np.mgrid[0:height, 0:width].astype(np.float64)
    down, across = rows / height, columns / width
    red, green, blue = 255 * across, 255 * down, 127.5 + 127.5 * np.sin((rows + 2 * columns) / 7)
    disc = (down - 0.4) ** 2 + (across - 0.6) ** 2 < 0.05
    frame = (abs(down - 0.5) > 0.45) | (abs(across - 0.5) > 0.46)
    pixels = np.stack([np.where(disc, 250, red), np.where(disc, 220, green), np.where(frame, 20, blue)], axis=-1)
    return Image.fromarray(pixels.astype(np.uint8))


def with_picture(processor: Any) -> dict[str, Tensor]:
    """The inputs of a model for one prompt with the picture: ids, pixels, and whatever else the processor makes.

    Raises what the processor does where no way to write such a prompt suits it.
    """
    # It runs in a fork, where torch's other threads are not.
    torch.set_num_threads(1)
    picture = drawn(*_wanted(processor))
    failure: BaseException = ValueError("it makes no pixels of a picture")
    with quiet_transformers():
        for number, text in enumerate(_prompts(processor)):
            try:
                made = processor(images=[picture], text=[text], return_tensors="pt")
            except LOAD_FAILURES as error:
                # The first way is the one that the processor was made for.
                failure = error if number == 0 else failure
                continue
            inputs = {name: value for name, value in made.items() if isinstance(value, Tensor)}
            if any(value.is_floating_point() for value in inputs.values()) and _has_placeholder(processor, inputs):
                return {name: value.contiguous() for name, value in inputs.items()}
    raise failure


def _wanted(processor: Any) -> tuple[int, int]:
    """Height and width that the processor makes of any picture, or those of ours."""
    size = getattr(processor.image_processor, "size", None)
    found = [size[key] for key in ("height", "width") if key in size] if isinstance(size, Mapping) else []
    if len(found) != 2 or not all(type(each) is int and 0 < each <= _LARGEST for each in found):
        return _SIZE
    return found[0], found[1]


def _prompts(processor: Any) -> Iterator[str]:
    """Texts to try, one after the other: the chat template's, the question behind a placeholder, the question alone."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
        rendered = None
        # A template may be made for texts alone, and fail.
        with contextlib.suppress(*LOAD_FAILURES):
            rendered = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        if isinstance(rendered, str):
            yield rendered
    for name in ("boi_token", "image_token"):
        if isinstance(token := getattr(processor, name, None), str):
            yield f"{token}{_QUESTION}"
    yield _QUESTION


def _has_placeholder(processor: Any, inputs: Mapping[str, Tensor]) -> bool:
    """Whether the prompt has the tokens in whose place the image comes, as far as the processor names them."""
    tokens = [token for token in getattr(processor, "image_token_ids", None) or () if isinstance(token, int)]
    return not tokens or bool(torch.isin(inputs["input_ids"], torch.tensor(tokens)).any())
