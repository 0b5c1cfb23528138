"""Raises what no `except Exception` catches, with a text that no file takes."""


class Strange(BaseException):
    """Not an `Exception`."""


raise Strange("\ud800" + "x" * 100_000)
