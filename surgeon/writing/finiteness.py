"""A check for NaN or infinity, on the bytes that are read for digests anyway.

Nothing is decoded. In each of these formats the numbers that are not finite are those whose bits without the sign, read
as an integer, are at least the bits of infinity. So the positive ones exceed the largest finite number as signed
integers, and the negative ones as unsigned integers. Two maxima of a block in the cache cost about a tenth of hashing.
"""

from __future__ import annotations

from surgeon.checkpoint.header import FLOAT_DTYPES

# By dtype: its width in bytes, and the bits of infinity (F8_E4M3 has no infinity; here the bits of its NaN).
_INFINITY = {
    "F8_E4M3": (1, 0x7F),
    "BF16": (2, 0x7F80),
    "F16": (2, 0x7C00),
    "F32": (4, 0x7F80_0000),
    "F64": (8, 0x7FF0_0000_0000_0000),
}
assert _INFINITY.keys() > FLOAT_DTYPES.keys()


class FiniteCheck:
    """A check of a tensor's bytes, piece after piece; `finite` is whether all numbers so far are finite.

    A dtype without infinity (integers) always counts as finite.
    """

    def __init__(self, dtype: str) -> None:
        """Begin a check of numbers of this dtype."""
        self.finite = True
        self._width, self._infinity = _INFINITY.get(dtype, (0, 0))
        self._rest = b""

    def __call__(self, piece: bytes | bytearray | memoryview) -> None:
        """Check the next bytes, which may begin and end within a number."""
        if not self._width or not self.finite:
            return
        view = memoryview(piece)
        if self._rest:
            missing = self._width - len(self._rest)
            number = self._rest + bytes(view[:missing])
            view = view[missing:]
            if len(number) < self._width:
                self._rest = number
                return
            self._look(number)
        whole = len(view) // self._width * self._width
        self._rest = bytes(view[whole:])
        if whole:
            self._look(view[:whole])

    def _look(self, data: bytes | memoryview) -> None:
        """Set `finite` to False where a number is not finite; `data` holds whole numbers."""
        # Imported only where bytes are read back: preview and the command line need no numpy.
        import numpy as np

        unsigned = np.frombuffer(data, dtype=f"<u{self._width}")
        largest_positive = int(unsigned.view(f"<i{self._width}").max())
        largest_negative = int(unsigned.max()) - (1 << 8 * self._width - 1)
        if largest_positive >= self._infinity or largest_negative >= self._infinity:
            self.finite = False
