"""The EXL3 kernel stack: format, reference codec, encoder, routes and the op they hide behind.

This package imports nothing of `exl3eval`, reads no environment variable and logs nothing.
"""

if __name__ != "exl3_kernels":
    raise ImportError(f"import this package as exl3_kernels, not as {__name__}: two copies would count launches twice")
