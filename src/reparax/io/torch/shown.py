"""What a file says, in error messages: cut where it is long or deep."""

import reprlib


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlong, self.maxother = 3, 80, 80, 80

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write very long numbers.
        return super().repr_int(x, level) if x.bit_length() < 256 else f"a number of {x.bit_length()} bits"


def shown(value: object) -> str:
    """The code of a value; Python's own may be as long as the file, or fail where lists are nested."""
    return _Shown().repr(value)
