"""A tiny random Qwen2, a plain Hugging Face model as its trainer, and the two together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from ppoctl.algorithms.stages.generation import stream_samples
from ppoctl.core.batch.records import State
from ppoctl.core.ports import OutputRequest, Sample, SampleRequest, SamplingParams, Stream
from ppoctl.engines.vllm.engine import Engine
from ppoctl.engines.vllm.generator import VllmGenerator
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.engines.weights.bucket import Bucket, bucket_of
from ppoctl.engines.weights.sending import NamedWeights, Part
from ppoctl.engines.weights.sync import EngineSide, TrainerSide
from ppoctl.models.convert.adapters import constant_names
from ppoctl.models.convert.checksum import SentChecksums, checksum_of
from ppoctl.models.model import Model
from ppoctl.models.shape_reader import read_shape
from ppoctl.models.trainable import Trainable
from ppoctl.recipe.schema import GeneratorTable
from vllm_in_process import Here, engines_are_guests
from vllm_prepared_once import prepare_once

END = 41
"""Ends a response: an ordinary token, not the end-of-sequence token of the model folder."""
FOLDER_EOS = 1
WINDOW = 320


def write_model(folder: Path, *, tied: bool) -> None:
    """Write a model of two layers with peaked outputs (standard deviation 0.2) and a byte-level tokenizer; 0.2M
    parameters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocab = {"<pad>": 0, "<eos>": FOLDER_EOS, "<bos>": 2}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    size = len(vocab) + 13  # 272: not a multiple of 64, so that the engine pads it
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,  # vLLM's CPU attention has no heads narrower than 32
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=2,
        eos_token_id=FOLDER_EOS,
        pad_token_id=0,
        initializer_range=0.2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


@dataclass
class HfTrainer:
    """A stand-in for the trainer: holds a Hugging Face model, moves it, sends its weights, and scores with it."""

    folder: Path
    dtype: str = "float32"
    traffic: list[str] = field(default_factory=list)
    """Names of all tensors that were sent."""
    updates: int = 0
    trainable: Trainable = field(default_factory=Trainable)
    """The parameters that `move` changes."""

    def __post_init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=getattr(torch, self.dtype)).eval()

    @property
    def state(self) -> State:
        return State(role="actor", step=self.updates, updates=self.updates, lineage=f"{id(self):x}-{self.updates}")

    def move(self, scale: float) -> State:
        """Move every weight by `scale` times a normal number, as an update."""
        self.updates += 1
        generator = torch.Generator().manual_seed(self.updates)
        constant = self.constant
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in constant:
                    continue
                noise = torch.randn(parameter.shape, generator=generator) * scale
                parameter.add_(noise.to(parameter.dtype))
        return self.state

    @property
    def constant(self) -> frozenset[str]:
        return constant_names(Model(read_shape(self.folder), "token", self.trainable))

    def weights(self, state: State) -> NamedWeights:
        named = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        constant = self.constant

        def buckets(parts: Sequence[Part]) -> Iterator[Bucket]:
            for part in parts:
                for name, tensor in named.items():
                    if (name in constant) == (part == "constant"):
                        self.traffic.append(name)
                        yield bucket_of([(name, tensor)])

        return NamedWeights(state, tuple(named), buckets, lambda: (), lambda parts: iter(()), constant)

    def export(self, folder: Path) -> SentChecksums:
        self.save(folder)
        return SentChecksums({name: checksum_of(tensor) for name, tensor in self.model.named_parameters()})

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    def logprobs(
        self, tokens: tuple[int, ...], output_request: OutputRequest | None = None, prompt_tokens: int = 1
    ) -> list[float]:
        """Return log-probs of tokens 1.. of a sequence, filtered as the Megatron trainer filters."""
        ids, output_request = torch.tensor([tokens]), output_request or OutputRequest()
        with torch.no_grad():
            if output_request.is_filtered or output_request.min_new_tokens:
                from ppoctl.engines.megatron.logit_blocks import ExcludedTokens, LogprobSettings
                from ppoctl.engines.megatron.output_logprobs import token_logprobs

                hidden = self.model.model(ids).last_hidden_state[0, :-1]
                # Tokens 1.. of the prompt come before the response's.
                early = torch.arange(len(hidden)) < prompt_tokens - 1 + output_request.min_new_tokens
                settings = LogprobSettings(
                    output_request,
                    8,
                    excluded=ExcludedTokens(early, torch.tensor([END, *output_request.stop_token_ids])),
                )
                return token_logprobs(hidden, self.model.lm_head.weight, ids[0, 1:], settings).outputs.tolist()
            logits = self.model(ids).logits[0, :-1].float() / output_request.temperature
        return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].tolist()

    def most_likely(self, tokens: tuple[int, ...]) -> int:
        with torch.no_grad():
            return int(self.model(torch.tensor([tokens])).logits[0, -1].argmax())

    def at(self, state: State) -> TrainerSide:
        """Return the trainer side of a generator. Methods are looked up at the call, so that a test can replace
        them."""
        return TrainerSide(
            weights=lambda: self.weights(state),
            score=lambda tokens: self.logprobs(tokens),
            export=lambda folder: self.export(folder),
        )


def settings_for(folder: Path, *, dtype: Literal["float32", "bfloat16"] = "float32", seats: int = 8) -> VllmSettings:
    return VllmSettings(
        model=str(folder),
        dtype=dtype,
        max_model_len=WINDOW,
        eos_token_ids=(END,),
        # Fewer concurrent sequences than most tests have requests, so that requests also wait, enter and leave.
        table=GeneratorTable(kv_cache_mib=64, max_concurrent_seqs=seats),
    )


@dataclass
class Bench:
    """A generator and the trainer that it follows."""

    trainer: HfTrainer
    generator: VllmGenerator
    hosts: EngineSide

    @staticmethod
    def start(folder: Path, *, dtype: Literal["float32", "bfloat16"] = "float32", seats: int = 8) -> "Bench":
        prepare_once()
        engines_are_guests()
        trainer = HfTrainer(folder, dtype)
        settings = settings_for(folder, dtype=dtype, seats=seats)
        hosts = EngineSide([Here(settings)], list)
        return Bench(trainer, VllmGenerator(settings, trainer.at, hosts, print), hosts)

    @property
    def host(self) -> Here:
        (host,) = self.hosts.engines
        assert isinstance(host, Here)
        return host

    @property
    def engine(self) -> Engine:
        """The running engine."""
        assert self.host.engine is not None
        return self.host.engine

    def generate(self, requests: list[SampleRequest], params: SamplingParams) -> dict[str, Sample]:
        self.generator.prepare(self.trainer.state)
        with stream_samples(self.generator, requests, params) as finished:
            return {sample.key: sample for together in finished for sample in together}

    def open(self, requests: list[SampleRequest], params: SamplingParams) -> Stream:
        """Start requests, and return their stream."""
        self.generator.prepare(self.trainer.state)
        stream = self.generator.open(params)
        stream.submit(requests)
        return stream

    def worst_gap(self, requests: list[SampleRequest], params: SamplingParams) -> float:
        """Return the largest difference between a sampled token's log-prob and a forward pass of the trainer's
        model."""
        worst = 0.0
        samples = self.generate(requests, params)
        for request in requests:
            sample = samples[request.key]
            filters = (params.top_p, params.top_k, params.min_p, params.min_new_tokens, params.stop_token_ids)
            output_request, prompt_tokens = (
                OutputRequest(params.temperature or 1.0, *filters),
                len(request.prompt_tokens),
            )
            whole = self.trainer.logprobs(request.prompt_tokens + sample.tokens, output_request, prompt_tokens)
            theirs = whole[len(request.prompt_tokens) - 1 :]
            worst = max(worst, max(abs(a - b) for a, b in zip(theirs, sample.logprobs, strict=True)))
        return worst


def prompts(count: int, *, length: int = 12, first_seed: int = 100) -> list[SampleRequest]:
    return [
        SampleRequest(
            key=f"p{i}",
            prompt_tokens=tuple(3 + (i * 31 + j * 7 + j * j) % 250 for j in range(length + i % 5)),
            seed=first_seed + i,
        )
        for i in range(count)
    ]
