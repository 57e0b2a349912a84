"""Log files of vLLM (attention backend, cache size, fallbacks), one per engine."""

import logging
import os
from logging.handlers import MemoryHandler

from ppoctl.core.errors import quoted
from ppoctl.engines.child.output import write_into
from ppoctl.engines.vllm.vllm_settings import VllmSettings


def write_log(settings: VllmSettings, name: str) -> None:
    """Write vLLM's log of this process, including the kept lines, to `vllm-NAME.log` in the folder of the settings.
    Without a folder, only errors are printed. If the user exported vLLM's logging variables, the function changes
    nothing. This function or `keep_log` must be called before vLLM is imported.
    """
    if _is_exported():
        return
    # Otherwise vLLM replaces our log handler each time an engine starts.
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    logger = logging.getLogger("vllm")
    kept = [line for handler in logger.handlers if isinstance(handler, MemoryHandler) for line in handler.buffer]
    close_log()
    if settings.logs is not None:
        file = logging.FileHandler(settings.logs / f"vllm-{name}.log", encoding="utf-8", delay=True)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(file)
        logger.setLevel(logging.INFO)
    for line in kept:
        if logger.isEnabledFor(line.levelno):
            logger.handle(line)


def write_logs_alone(settings: VllmSettings, number: int) -> None:
    """Write vLLM's log of this process to its file, and other output of the process to a second file. The process
    contains only the engine with this index."""
    if settings.logs is not None:
        write_into(settings.logs / f"generator-{number}.log")  # Ray's processes use the same name
    write_log(settings, f"engine-{number}")


def keep_log() -> None:
    """Keep vLLM's log of this process in memory until `write_log` is called."""
    if _is_exported():
        return
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    close_log()
    logger = logging.getLogger("vllm")
    # Without a target, the handler keeps every line, whatever its capacity.
    logger.addHandler(MemoryHandler(capacity=1))
    logger.setLevel(logging.INFO)


def close_log() -> None:
    """Close the log file of an engine that has ended. Later errors of vLLM in this process are printed."""
    if _is_exported():
        return
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.ERROR)
    # Otherwise vLLM's lines would also reach the handlers of the root logger.
    logger.propagate = False


def _is_exported() -> bool:
    return "VLLM_LOGGING_LEVEL" in os.environ or "VLLM_LOGGING_CONFIG_PATH" in os.environ


def log_location(settings: VllmSettings) -> str:
    """Return the hint of an error with the location of vLLM's log."""
    if settings.logs is None:
        return "run the same command with VLLM_LOGGING_LEVEL=INFO in front to print vLLM's log"
    return f"vLLM's log: tail -n 50 {quoted(settings.logs)}/vllm-*.log"
