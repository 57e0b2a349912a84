"""Weights on their way from the trainer to the engines: who copies what, and who owns the bytes when.

    trainer's ranks                      driver                             engines' processes
    sending.SendingRank                  sync.Sync, sending.RankSource      receiving.ReceivingEngine

    gather a tensor from all ranks  <--  next_weights()
    checksum it, pack a bucket      -->  Bucket: checksums, places     -->  take_weights(bucket): copy, load in place
                                         checksum.require_equal        <--  end_weights(): what was read back
    score the canary                -->  canary.Canary.check           <--  score the canary
                                         sync.Published                -->  an engine that died: the same again

The driver gets checksums and where the bytes lie; the bytes only for an export. Four ways, of which `Sync` and
`RankSource` choose; `-->` is a copy, `==>` reads in place, and in brackets is who owns the bytes, and how long;
`Published`: until the next transfer.

    shared        parameters --> whole tensor --> shared memory [the rank, until two more buckets or its next work]
                    --> engine's own memory --> loaded
    store         parameters --> whole tensor --> host memory --> Ray's object store [Ray, while the driver refers to
                    it: Published] ==> loaded
    broadcast     parameters --> whole tensor --> flat piece [the rank, until it has arrived everywhere]
                    --> flat piece of each engine [the engine, until it is loaded] --> loaded
    export        as `store`, but it is the driver that reads, and writes safetensors files [the driver: Published]
                    --> loaded by an engine that starts on them

- shared (`cluster.weights = "shared"`, and whenever there is no Ray): CUDA IPC on GPUs, files in memory on CPUs; from
  a rank on the engine's node.
- store: engines on a node without a rank that can gather; all engines with `cluster.weights = "store"`.
- broadcast (`cluster.weights = "broadcast"`): NCCL on GPUs, gloo on CPUs; roles apart only.
- export: engines that cannot change weights in place (mixtures of experts) start anew on a folder.

An engine that dies is restored from what the last transfer published, and the trainer, which may be in the middle of
an update by then, is not asked. So one copy of the bytes lasts. In the object store and in the folder of an export
they last anyway (without Ray an export goes once it is loaded: an engine that dies then ends the job). Shared, the
rank next to the only node with engines keeps them in host memory, which an engine reads without asking it
(`sharing.Kept`; on a CPU that is the shared memory itself); for engines on several nodes one rank stores them as
well. After a broadcast they are gathered once more, to be kept or stored, while engines read back.

The files, from the bytes upwards:

    checksum    one number for a tensor, equal on every device; sent and loaded must be equal
    bucket      some tensors, their checksums, and the places where they lie; cutting and packing
    sharing     memory that one process fills and others of its machine read
    broadcast   the process group of one sender and all engines
    links       the driver's side of it: where members meet, whether they still are together
    calls       how the driver calls processes at both ends
    sending     the trainer's side: what its ranks do, and how the driver asks them
    receiving   the engines' side: what each process of an engine answers
    canary      a token sequence that both sides score
    sync        one transfer, as the driver goes through it: the file to begin with

What needs a third party stays with it: reading tensors out of Megatron's parameters (`engines.megatron.weights`),
loading into vLLM and reading back (`engines.vllm.weights`), Ray's object store (`engines.ray.worker.InStore`).
"""
