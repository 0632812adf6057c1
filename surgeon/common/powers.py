"""Numbers times a power of two: a step of their exponents, which leaves every digit as it is, or is none."""

from __future__ import annotations


def times_power_of_two(data: bytes | bytearray | memoryview, dtype: str, power: int) -> memoryview | None:
    """The bytes of numbers of torch's `dtype` times 2**power; None where a number loses a digit, at either end."""
    import torch

    numbers = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    made = numbers * 2.0**power
    if not torch.equal(made * 2.0**-power, numbers):
        return None
    found: memoryview = made.view(torch.uint8).numpy().data
    return found.cast("B")
