"""What vLLM says of itself (attention backend, size of the cache, fallbacks), in a file of each engine."""

import logging
import os
from logging.handlers import MemoryHandler

from ppoctl.engines.child.output import write_into
from ppoctl.engines.vllm.settings import VllmSettings
from ppoctl.errors import quoted

_MOST_KEPT = 10_000
"""Lines that `keep_log` keeps."""


def write_log(settings: VllmSettings, name: str) -> None:
    """Send vLLM's log of this process, and what was kept of it, to `vllm-NAME.log` in the folder of the settings;
    where there is none only its errors go to the screen. A person who exported how vLLM is to log decides alone. Call
    it, or `keep_log`, before vLLM is imported.
    """
    if _is_exported():
        return
    # vLLM would put its own in place of our handler at each start.
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


def write_logs_alone(settings: VllmSettings) -> None:
    """Send vLLM's log of this process, which has a job's only engine, to its file, and what else it prints to
    another."""
    if settings.logs is not None:
        write_into(settings.logs / "generator-0.log")  # as under Ray
    write_log(settings, "engine-0")


def keep_log() -> None:
    """Keep vLLM's log of this process until `write_log` knows where it goes."""
    if _is_exported():
        return
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    close_log()
    logger = logging.getLogger("vllm")
    logger.addHandler(MemoryHandler(_MOST_KEPT, flushLevel=logging.CRITICAL + 1, flushOnClose=False))
    logger.setLevel(logging.INFO)


def close_log() -> None:
    """Close the file of an engine that has ended: what is left of vLLM in this process says its errors to the
    screen."""
    if _is_exported():
        return
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.ERROR)
    logger.propagate = False


def _is_exported() -> bool:
    return "VLLM_LOGGING_LEVEL" in os.environ or "VLLM_LOGGING_CONFIG_PATH" in os.environ


def where_it_says_more(settings: VllmSettings) -> str:
    """Hint that leads to what vLLM said."""
    if settings.logs is None:
        return "the same command with VLLM_LOGGING_LEVEL=INFO in front prints what vLLM says"
    return f"what vLLM said: tail -n 50 {quoted(settings.logs)}/vllm-*.log"
