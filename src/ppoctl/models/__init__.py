"""Numbers of a model, read from its config.json for the code that loads, shards, estimates or checks the model.

    folder            the folder of a model's files on this machine; JSON files of that folder
    bundled_configs   configurations of published models that ship with ppoctl
    config            config.json as transformers completes it
    shape_fields      how fields of a configuration become fields of a `ModelShape`, and which are rejected
    families          one table of fields per `model_type`
    rope              parameters of rotary position embeddings
    shape             `ModelShape`
    shape_reader      config.json -> `ModelShape`
    labels            labels of a reward model
    end_tokens        tokens that end a response
    cost              number of parameters, and FLOPs of a token

No module of this package imports torch or transformers. `convert.family_mappings` lists the tensors of each family.
"""
