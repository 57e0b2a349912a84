"""Weight transfer from the trainer to the engines: which process copies what, and how long each copy is valid.

    trainer's ranks                      driver                             engines' processes
    sending.SendingRank                  sync.Sync, sending.RankSource      receiving.ReceivingEngine

    gather a tensor from all ranks  <--  next_weights()
    checksum it, pack a bucket      -->  Bucket: checksums, places     -->  take_weights(bucket): copy, load in place
                                         require_equal                 <--  end_weights(): weights read back
    score the canary                -->  canary.Canary.check           <--  score the canary
                                         sync.Published                -->  a restarted engine: the same again

The driver receives checksums and the locations of the bytes. It receives the bytes only for an export. `Sync` and
`RankSource` choose one of four methods. `-->` is a copy, and `==>` reads in place. Brackets name the process that
owns the bytes, and how long the bytes are valid. `Published` means until the next transfer.

    shared        parameters --> full tensor --> shared memory [the rank, until two more buckets or its next call]
                    --> engine's own memory --> loaded
    store         parameters --> full tensor --> host memory --> Ray's object store [Ray, while the driver refers to
                    it: Published] ==> loaded
    broadcast     parameters --> full tensor --> flat buffer [the rank, until all members have received it]
                    --> flat buffer of each engine [the engine, until it is loaded] --> loaded
    export        like `store`, but the driver reads and writes safetensors files [the driver: Published]
                    --> loaded by an engine that starts from them

- shared (`cluster.weights = "shared"`, and always without Ray): CUDA IPC on GPUs, memory files on CPUs. An engine
  reads from a rank on its node.
- store: for engines on a node without a rank that can gather, and for all engines with `cluster.weights = "store"`.
- broadcast (`cluster.weights = "broadcast"`): NCCL on GPUs, gloo on CPUs. It requires separate roles.
- export: for engines that cannot change weights in place (mixtures of experts). They restart from a folder.

Frozen weights are sent once; later transfers omit them if all engines still hold them (`sync`).

An engine that dies is restored from the last published weights. The trainer is not involved, because by then it may
be in the middle of an update. Therefore one copy of the bytes remains valid until the next transfer, and of frozen
weights until they are sent again. Weights in the
object store and in the folder of an export remain valid anyway. (Without Ray, an export is deleted once it is loaded.
If an engine dies later, the job ends.) If all engines are on one node, a rank on this node keeps shared weights in
host memory (`sharing.RetainedBuffers`; on a CPU, this is the shared memory itself). An engine reads them without
calling the rank. If the engines are on several nodes, one rank also stores the weights. After a broadcast, the ranks
gather the weights a second time, to keep or store them, while the engines read their weights back.

The files, from the bytes upwards:

    bucket             some tensors, their checksums and locations; splitting and packing
    sharing            memory that one process fills and other processes of its machine read
    broadcast          the process group of one sender and all engines
    broadcast_groups   the driver's side of these groups: where members meet, whether they are still connected
    engine_calls       how the driver calls processes on both sides
    sending            the trainer's side: what its ranks do, and how the driver calls them
    receiving          the engines' side: the methods of each engine process
    canary             a token sequence that both sides score
    sync               one transfer, from the driver's point of view: read this file first

Code that needs a third-party library is in the package for that library: reading tensors from Megatron's parameters
(`engines.megatron.parameter_shards`), loading into vLLM and reading back (`engines.vllm.vllm_weights`), Ray's object
store (`engines.ray.ray_worker.InStore`).
"""
