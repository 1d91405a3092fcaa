"""Answers to options of other servers: our option for the same purpose, or why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cyclopts import UnknownOptionError

if TYPE_CHECKING:
    from cyclopts import CycloptsError

_ALWAYS = "this is always so and needs no option"
_ONE_GPU = "a backend uses one GPU; start a server for each GPU"
_LORA = "use --lora-modules NAME=DIR for each, or --lora-dir DIR to load them later; requests name one as their model"
_LORA_LIMITS = "up to 256 adapters of ranks up to 512 need no option; --lora-budget limits those that are loaded later"
_DRAFTS = "there is no speculative decoding"
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
    ("--swap-space --cpu-offload-gb --kv-offloading-size --enable-hierarchical-cache", "use --host-kv-budget"),
    ("--prompt-cache-size --prompt-cache-bytes", "use --kv-budget"),
    ("--cache-ram -cram", "use --kv-budget on the CPU, --host-kv-budget on a GPU"),
    ("--kv-events-config", "use --kv-events"),
    ("--device --main-gpu -mg", "use --gpu"),
    ("--n-gpu-layers --gpu-layers -ngl", "use --gpu auto or --gpu none; a model is on one device as a whole"),
    ("--model-path --model-id -m --hf-repo -hf --hf-file -hff --model-url -mu", "use --model"),
    ("--alias -a", "use --served-model-name"),
    ("--chat-template-file --custom-chat-template", "use --chat-template"),
    ("--tokenizer --tokenizer-path --tokenizer-mode", "the tokenizer is tokenizer.json in the directory of --model"),
    ("--hf-overrides --rope-scaling --rope-freq-base --override-kv", "edit config.json in a copy of the model"),
    ("--trust-remote-code", "code in a checkpoint is never run; --forward-pass names code of your own"),
    ("--download-dir --load-format --huggingface-hub-cache", "set HF_HOME; weights are read from safetensors or GGUF"),
    ("--offline", "set HF_HUB_OFFLINE=1 in the environment"),
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
    ("--enable-log-requests --log-requests --log-requests-level", f"{_ALWAYS}; texts are never logged"),
    ("--log-file", "the log is on standard error"),
    ("--json-output", "use --log-json"),
    ("--otlp-traces-endpoint --enable-trace", "use --otlp-endpoint"),
    ("--prometheus-port", "/metrics is on --port"),
    ("--timeout -to", "use --hold-timeout-s, --resume-timeout-s or --drain-timeout-s"),
    ("--default-chat-template-kwargs --chat-template-kwargs", "send chat_template_kwargs with the request"),
    ("--structured-outputs-config --guided-decoding-backend --grammar-backend", _CHOSEN),
    ("--attention-backend --sampling-backend --flash-attn -fa --mlock --no-mmap --numa", _CHOSEN),
    ("--enable-prefix-caching --enable-chunked-prefill --cont-batching -cb --cache-prompt --auto-truncate", _ALWAYS),
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
    ("--draft-model --num-draft-tokens --lookup-cache-static --lookup-cache-dynamic", _DRAFTS),
    ("--limit-mm-per-prompt --mmproj -mm --media-path", "models read text only; images and sound are refused"),
)

ANSWER_OF = {spelling: answer for spellings, answer in _ANSWERS for spelling in spellings.split()}


def explain(error: CycloptsError) -> str | None:
    """Return what to do about an option that another server has; None for any other error."""
    if not isinstance(error, UnknownOptionError):
        return None
    given = (error.token.keyword or error.token.value).partition("=")[0]
    answer = ANSWER_OF.get(given) or ANSWER_OF.get(given.replace("_", "-"))
    return None if answer is None else f"Unknown option: {given}. Here: {answer}."
