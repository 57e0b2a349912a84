"""Checks before anything starts: the files that a recipe names, and the memory, disk and GPUs that it requires.

    check            all checks, as problems and notes; `validate`, `plan` and every start call it first
    model_checks     configuration, headers of the weights, critic, end tokens, tokenizer
    prompt_checks    rows of data, and the chat template applied to the rows
    prompt_preview   rows as the model receives them
    resource_checks  GPUs, memory, disk and servers of this machine

The package imports no torch, vLLM or transformers. Its messages equal the messages that conversion, data loading and
engines raise for the same problem.
"""
