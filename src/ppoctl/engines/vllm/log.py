"""What vLLM says of itself (attention backend, size of the cache, fallbacks), in a file of each engine."""

import logging
import os

from ppoctl.engines.vllm.settings import VllmSettings
from ppoctl.errors import quoted


def write_log(settings: VllmSettings, name: str) -> None:
    """Send vLLM's log of this process to `vllm-NAME.log` in the folder of the settings, if there is one, and not to
    the screen; unless a person exported how vLLM is to log. Call it before vLLM is imported."""
    level = os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")
    if settings.logs is None or level != "ERROR" or "VLLM_LOGGING_CONFIG_PATH" in os.environ:
        return
    # vLLM would put its own in place of our handler at each start.
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    file = logging.FileHandler(settings.logs / f"vllm-{name}.log", encoding="utf-8", delay=True)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.addHandler(file)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def where_it_says_more(settings: VllmSettings) -> str:
    """Hint that leads to what vLLM said."""
    if settings.logs is None:
        return "the same command with VLLM_LOGGING_LEVEL=INFO in front prints what vLLM says"
    return f"what vLLM said: tail -n 50 {quoted(settings.logs)}/vllm-*.log"
