"""The generator: vLLM, in separate processes.

vllm_settings      how an engine is started; imports no vLLM
vllm_environment   environment variables that are read when vLLM is imported
arguments          arguments of vLLM's `EngineArgs`
engine             vLLM's engine behind a few methods
weights, loader    loading new weights into an engine
pooling            the engine of a reward model
engine_factories   how processes create engines
own_process        how a driver without Ray reaches its engine
fleet              engines that share one request queue
generator          the `Generator` port
tool_calls         tool calls in a response
log                vLLM's log files
"""
