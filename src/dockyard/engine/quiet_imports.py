"""Hide warnings that torch and PEFT log at import about features that Dockyard does not use."""

import logging

logger = logging.getLogger(__name__)

_WARNINGS = {
    "bitsandbytes.backends.cpu.ops": "gemm_4bit_forward",  # a kernel for 4-bit weights on some CPUs
    "torch.utils.flop_counter": "triton not found",  # it counts the operations of Triton kernels
}
"""Name of the logger -> part of the message."""


def hide_import_warnings() -> None:
    """Hide these warnings, unless Dockyard logs at the level DEBUG. Call this before torch is imported.

    Other log lines and the settings of other loggers stay as they are.
    """
    for name in _WARNINGS:
        logging.getLogger(name).addFilter(_is_worth_showing)  # adding it again has no effect


def _is_worth_showing(record: logging.LogRecord) -> bool:
    return _WARNINGS[record.name] not in str(record.msg) or logger.isEnabledFor(logging.DEBUG)
