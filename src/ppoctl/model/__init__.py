"""Numbers of a model, from its config.json: read once, here, for whoever loads, lays out, estimates or checks it.

    folder     where a model's files are on this machine; JSON of that folder
    carried    configurations of published models that ship with ppoctl
    config     config.json as transformers completes it
    fields     how fields of a configuration become fields of a `ModelShape`, and what is refused
    families   one table of fields per `model_type`
    rope       the numbers of rotary position embeddings
    shape      `ModelShape`
    reading    config.json -> `ModelShape`
    cost       parameters, and FLOPs of a token

Nothing here imports torch or transformers. Which tensors a family has is in `convert.tables`.
"""
