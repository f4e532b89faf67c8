"""Leave out a log line that bitsandbytes writes whenever PEFT is imported."""

import logging

logger = logging.getLogger(__name__)

_LOGGER = "bitsandbytes.backends.cpu.ops"
_KERNEL = "gemm_4bit_forward"


def hide_missing_kernel() -> None:
    """Hide the warning that a kernel for 4-bit weights on CPUs is missing. Call it before PEFT is imported.

    bitsandbytes writes it at import, whether such weights are used or not. It is shown if Dockyard logs at the level
    DEBUG. Other log lines and the settings of other loggers stay as they are.
    """
    logging.getLogger(_LOGGER).addFilter(_is_worth_showing)  # adding it again has no effect


def _is_worth_showing(record: logging.LogRecord) -> bool:
    return _KERNEL not in str(record.msg) or logger.isEnabledFor(logging.DEBUG)
