"""Checks that refuse what cannot work before anything starts: the files a recipe names, and the space it needs.

    check     all of it, as problems and notes: what `validate`, `plan` and every start ask first
    model     configuration, weights' headers, critic, end tokens, tokenizer
    prompts   rows of data, and the chat template on them
    space     free disk
    fit       whether memory suffices
    gpus      whether several processes may use a GPU

Nothing here imports torch, vLLM or transformers. Each file gives the sentence that the conversion, the data and the
engines give when they meet the same fault.
"""
