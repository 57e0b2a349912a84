"""Checks before anything starts: the files that a recipe names, and the memory, disk and GPUs that it requires.

    check     all checks, as problems and notes; `validate`, `plan` and every start call it first
    model     configuration, headers of the weights, critic, end tokens, tokenizer
    prompts   rows of data, and the chat template on them
    preview   rows as the model receives them
    space     free disk
    fit       whether memory suffices
    gpus      whether several processes may use a GPU

Imports no torch, vLLM or transformers. The messages are the same as those of the conversion, the data and the engines
for the same problem.
"""
