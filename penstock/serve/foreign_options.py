"""Answers to options and commands of other servers: ours for the same purpose, or why there is none."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cyclopts import ArgumentCollection, CycloptsError, UnknownCommandError, UnknownOptionError

_ALWAYS = "this is always so and needs no option"
_ONE_GPU = "a model is on one GPU as a whole; --gpu 0,1 runs a replica on each"
_LORA = "use --lora-modules NAME=DIR for each, or --lora-dir DIR to load them later; requests name one as their model"
_LORA_LIMITS = "up to 256 adapters of ranks up to 512 need no option; --lora-budget limits those that are loaded later"
_DRAFTS = "use --draft-model with a small model of the same family; --speculation guesses from the text itself too"
_CHOSEN = "the server chooses; no option is needed"
_REPLICAS = "use --replicas, or --gpu with several devices such as 0,1: each is a replica with all of the model"
_SAMPLING = "use --default-sampling, or send it with the request"

_ANSWERS: tuple[tuple[str, str], ...] = (
    # vLLM
    ("--max-model-len --context-length --ctx-size -c --max-input-length --max-seq-len", "use --max-context"),
    ("--gpu-memory-utilization --mem-fraction-static", "use --kv-budget with a size such as 6GB, or with auto"),
    ("--kv-cache-memory-bytes --num-gpu-blocks-override --pa-memory-mb", "use --kv-budget with a size such as 6GB"),
    ("--max-total-tokens", "use --max-context for one sequence, --kv-budget for the KV cache of all"),
    ("--tensor-parallel-size --tp-size --tp -tp --num-shard --split-mode -sm --tensor-split -ts", _ONE_GPU),
    ("--pipeline-parallel-size --pp-size -pp --nnodes --node-rank --dist-init-addr --enable-expert-parallel", _ONE_GPU),
    ("--data-parallel-size --dp-size --dp -dp --data-parallel-size-local", _REPLICAS),
    ("--enable-auto-tool-choice --jinja", f"{_ALWAYS}; --tool-parser none turns tools off"),
    ("--tool-call-parser", "use --tool-parser"),
    ("--enable-reasoning --reasoning-format", "use --reasoning-parser; auto reads the chat template"),
    ("--max-num-seqs --max-running-requests --parallel -np --max-batch-requests", "use --max-running"),
    ("--decode-concurrency --prompt-concurrency --max-seqs", "use --max-running"),
    ("--max-num-batched-tokens --chunked-prefill-size --max-prefill-tokens", "use --max-batch-tokens"),
    ("--batch-size -b --ubatch-size -ub --prefill-step-size", "use --max-batch-tokens"),
    ("--block-size", "use --page-size"),
    ("--quantization -q --load-in-8bit", "use --quantize; a checkpoint that is quantised already needs no option"),
    ("--kv-cache-dtype --cache-type-k --cache-type-v -ctk -ctv", "use --kv-dtype"),
    ("--swap-space --kv-offloading-size --enable-hierarchical-cache", "use --host-kv-budget"),
    (
        "--cpu-offload-gb --n-cpu-moe -ncmoe --cpu-moe -cmoe",
        "weights cannot stay on the host; --quantize makes them smaller",
    ),
    ("--prompt-cache-size --prompt-cache-bytes", "use --kv-budget"),
    ("--cache-ram -cram", "use --kv-budget on the CPU, --host-kv-budget on a GPU"),
    ("--kv-events-config", "use --kv-events"),
    ("--device --main-gpu -mg", "use --gpu"),
    ("--n-gpu-layers --gpu-layers -ngl", "use --gpu auto or --gpu none; a model is on one device as a whole"),
    ("--model-path --model-id -m --hf-repo -hf -hfr --model-url -mu", "use --model"),
    ("--hf-file -hff", "write ORG/REPO:FILE as --model"),
    ("--alias -a", "use --served-model-name"),
    ("--chat-template-file --custom-chat-template", "use --chat-template"),
    ("--tokenizer --tokenizer-path --tokenizer-mode", "the tokenizer is tokenizer.json in the directory of --model"),
    ("--hf-overrides --rope-scaling --rope-freq-base --override-kv", "edit config.json in a copy of the model"),
    ("--trust-remote-code", "code in a checkpoint is never run; --forward-pass names code of your own"),
    ("--download-dir --load-format --huggingface-hub-cache", "set HF_HOME; weights are read from safetensors or GGUF"),
    ("--hf-token", "set HF_TOKEN in the environment"),
    ("--seed --random-seed", "send seed with the request"),
    ("--override-generation-config --preferred-sampling-params --temp --temperature --top-k --top-p", _SAMPLING),
    ("--min-p --typical --repeat-penalty --presence-penalty --frequency-penalty", _SAMPLING),
    ("--generation-config --sampling-defaults", "the defaults are the model's; --default-sampling changes them"),
    ("--max-tokens --n-predict --predict -n", "send max_tokens with the request"),
    ("--reasoning-budget", "send thinking_budget with the request"),
    ("--default-prompt-name --default-prompt", "send prompt_name with the request; the default is the model's"),
    ("--api-server-count --max-concurrent-workers --threads-http", "use --workers"),
    ("--tokenizer-worker-num --tokenization-workers", "use --workers"),
    ("--threads -t --threads-batch -tb --cpu-threads", "set OMP_NUM_THREADS; the default is the cores of this machine"),
    ("--max-concurrent-requests", "use --max-open-requests"),
    ("--max-queue-size --max-num-queued-reqs --max-queued-requests", "use --max-waiting"),
    ("--scheduling-policy --schedule-policy --enable-priority-scheduling", "use --priority-step-s"),
    ("--enable-deterministic-inference", "use --deterministic"),
    ("--enable-sleep-mode --sleep-idle-seconds", "use --sleep-after-s"),
    ("--models-max", "use --models-memory"),
    ("--shutdown-timeout", "use --drain-timeout-s"),
    ("--sse-ping-interval", "use --keep-alive-interval-s"),
    ("--watchdog-timeout", "use --hang-timeout-s"),
    ("--crash-dump-folder", "a crash writes into --state-dir; --flight-recorder says how much"),
    ("--max-client-batch-size", "there is no such limit; use --max-body"),
    ("--payload-limit", "use --max-body"),
    ("--hostname", "use --host"),
    ("--uds-path", "use --uds"),
    ("--allowed-origins --allow-origins", "use --cors-allow-origin"),
    ("--allow-credentials --allowed-methods --allowed-headers", "use --cors-allow-origin alone; keys are headers"),
    ("--ssl-key-file", "use --ssl-keyfile"),
    ("--ssl-cert-file", "use --ssl-certfile"),
    ("--ssl-ca-certs --ssl-cert-reqs", "client certificates are not checked; use --api-key"),
    ("--root-path --api-prefix", "paths are fixed; a proxy in front can add a prefix"),
    ("--runner --convert", "use --task"),
    ("--is-embedding --embedding --embeddings", "use --task embed"),
    ("--reranking --rerank", "use --task rerank"),
    ("--pooling --pooler-config --dense-path", "pooling is read from the model's files; use --task"),
    ("--uvicorn-log-level --log-verbosity -lv --verbose -v", "use --log-level"),
    ("--disable-log-requests --disable-log-stats --log-disable", "use --log-level warning"),
    ("--config-file", "use --config"),
    ("--enable-log-requests --log-requests --log-requests-level", f"{_ALWAYS}; texts are never logged"),
    ("--log-file", "the log is on standard error"),
    ("--json-output", "use --log-json"),
    ("--otlp-traces-endpoint --enable-trace", "use --otlp-endpoint"),
    ("--prometheus-port", "/metrics is on --port"),
    ("--timeout -to", "use --hold-timeout-s, --resume-timeout-s or --drain-timeout-s"),
    ("--default-chat-template-kwargs --chat-template-kwargs", "send chat_template_kwargs with the request"),
    ("--structured-outputs-config --guided-decoding-backend --grammar-backend", _CHOSEN),
    ("--attention-backend --sampling-backend --flash-attn -fa --mlock --no-mmap --numa", _CHOSEN),
    ("--enable-prefix-caching --enable-chunked-prefill --cont-batching -cb --cache-prompt", _ALWAYS),
    ("--auto-truncate", "use --truncate-inputs"),
    ("--metrics --enable-metrics --enable-prompt-tokens-details --enable-cache-report --webui --ui", _ALWAYS),
    ("--slots --props", "/engine and `penstock top` show what runs, /v1/models the model"),
    ("--stream-interval", "each token is sent as it comes"),
    ("--async-scheduling --enable-mixed-chunk --kv-unified --warmup --enable-tokenizer-info-endpoint", _ALWAYS),
    (
        "--no-enable-prefix-caching --disable-radix-cache",
        "the prefix cache is always on; cache_salt in a request keeps its pages apart",
    ),
    ("--enforce-eager --disable-cuda-graph --compilation-config -O", "there is no slower mode to choose"),
    ("--enable-lora --lora-paths --lora --lora-adapters --adapter-path", _LORA),
    ("--lora-scaled", f"{_LORA}; its scale is lora_alpha / r in its adapter_config.json"),
    ("--max-loras --max-loras-per-batch --max-lora-rank --max-cpu-loras --lora-dtype", _LORA_LIMITS),
    ("--lora-target-modules --lora-backend --lora-extra-vocab-size --fully-sharded-loras", _CHOSEN),
    ("--speculative-config --speculative-model --model-draft -md --speculative-algorithm --draft-max", _DRAFTS),
    ("--num-draft-tokens --lookup-cache-static --lookup-cache-dynamic", _DRAFTS),
    ("--limit-mm-per-prompt", "a request has up to 64 pictures; sound and video are refused"),
    ("-mm", "use --mmproj"),
    ("--media-path --allowed-local-media-path", "no local file is read; send a data URI"),
    ("--allowed-media-domains", "use --allow-remote-images"),
)

FOREIGN_COMMANDS = {
    "bench latency": "use penstock bench load",
    "bench serve": "use penstock bench load",
    "bench throughput": "use penstock bench load",
    "benchmark": "use penstock bench",
    "collect-env": "use penstock doctor",
    "complete": "use penstock run MODEL PROMPT",
    "cp": "give a model another name with --served-model-name",
    "create": "there is no Modelfile; the options of penstock serve do the same",
    "download": "use penstock pull",
    "info": "use penstock show",
    "launch": "start the server with penstock serve, and the program with its address as OpenAI's base URL",
    "launch-server": "use penstock serve",
    "llama-bench": "use penstock bench load",
    "llama-cli": "use penstock run",
    "llama-server": "use penstock serve",
    "login": "set HF_TOKEN in the environment",
    "ls": "use penstock list",
    "models": "use penstock list",
    "ollama": "leave the word ollama out, as in penstock run",
    "push": "models are not published from here",
    "quantize": "use penstock serve --quantize",
    "remove": "use penstock rm",
    "run-batch": "there are no batch files; send the requests together, with a low priority",
    "search": "search on https://huggingface.co, then penstock pull ORG/REPO",
    "signin": "set HF_TOKEN in the environment",
    "start": "use penstock serve",
    "status": "use penstock ps",
    "stop": "end the server with Ctrl-C or SIGTERM (penstock ps shows its process); --sleep-after-s frees idle models",
    "update": "use penstock upgrade for a running server",
    "vllm": "leave the word vllm out, as in penstock serve",
}

ANSWER_OF = {spelling: answer for spellings, answer in _ANSWERS for spelling in spellings.split()}
_RENAMED = re.compile(r"use (--[a-z-]+)( [a-z]+)?(?:$|;| with a size)")
_TRANSLATED = {
    "--gpu-memory-utilization": "--kv-budget auto",
    "--mem-fraction-static": "--kv-budget auto",
    "--device": "--gpu auto",
}
"""Where our value has another unit."""
_WITHOUT_VALUE = re.compile(
    r"--(enable|disable|no|is|use)-|--(jinja|trust-remote-code|metrics|webui|ui|slots|props|verbose)$"
)


@dataclass(frozen=True, slots=True)
class _Word:
    """An option of a command line, with its values; or a word without one."""

    option: str
    values: tuple[str, ...]
    is_known: bool

    @property
    def answer(self) -> str | None:
        return ANSWER_OF.get(self.option) or ANSWER_OF.get(self.option.replace("_", "-"))

    def translated(self) -> list[str]:
        """The same in our options; nothing if there is none."""
        if self.is_known:
            return [*([self.option] if self.option else []), *self.values]
        option = self.option.replace("_", "-")
        if (ours := _TRANSLATED.get(option)) is not None:
            return ours.split()
        renamed = _RENAMED.match(self.answer or "")
        if renamed is None:
            return []
        return [renamed[1], *([renamed[2].strip()] if renamed[2] else self.values)]


def explain(error: CycloptsError) -> str | None:
    """Return what to do about options, or a command, that other servers have; None for any other error."""
    if isinstance(error, UnknownCommandError):
        return _explain_command(error)
    if not isinstance(error, UnknownOptionError) or error.token.source != "cli":
        return None
    tokens = list(error.root_input_tokens or ())
    chain = tuple(error.command_chain or ())
    words = list(_words(tokens[len(chain) :], error.argument_collection))
    unknown = [word for word in words if not word.is_known]
    if all(word.answer is None for word in unknown):
        return None
    command = shlex.join(["penstock", *chain, *(part for word in words for part in word.translated())])
    if len(unknown) == 1:
        (word,) = unknown
        example = f" Try: {command}" if chain and word.translated() else ""
        return f"Unknown option: {word.option}. Here: {word.answer}.{example}"
    names = [name for argument in error.argument_collection for name in argument.names]
    lines = [f"  {word.option}: {word.answer or _likely(word.option, names)}" for word in unknown]
    advice = [f"Try: {command}"] if chain else []  # without one the options are not all of a command's
    return "\n".join([f"{len(unknown)} options are unknown here:", *lines, *advice])


def _explain_command(error: UnknownCommandError) -> str | None:
    chain, words = tuple(error.command_chain or ()), error.unused_tokens or [""]
    answer = FOREIGN_COMMANDS.get(" ".join([*chain, words[0]]))
    return None if answer is None else f"Unknown command: {words[0]}. Here: {answer}."


def _likely(option: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(option, names, n=1, cutoff=0.6)
    return f"unknown; did you mean {close[0]}?" if close else "unknown"


def _words(tokens: Sequence[str], known: ArgumentCollection) -> Iterator[_Word]:
    """Take a command line apart. An unknown option has the next word as its value, unless that is an option."""
    names = {name for argument in known for name in (*argument.names, *argument.negatives)}
    rest = list(tokens)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if not option.startswith("-") or _is_number(option):
            yield _Word("", (option + equals + value,), is_known=True)
            continue
        is_known = option.replace("_", "-") in names
        values = [value] if equals else []
        takes_value = not equals and (is_known or not _WITHOUT_VALUE.match(option))
        if takes_value and rest and (not rest[0].startswith("-") or _is_number(rest[0])):
            values.append(rest.pop(0))
        yield _Word(option, tuple(values), is_known)


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d+)?", word) is not None
