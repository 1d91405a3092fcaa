"""TransformersPass on a GPU, as far as a machine without one can show it.

On the meta device torch refuses to mix tensors with those of the CPU, and computes no numbers. The numbers are those of
an emulated device, whose tensors are on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import DeviceLost, PassOptions
from penstock.backend.passes.cpu.in_torch.paged_cache import make_kv_pages
from penstock.backend.passes.ops.interface import CPU_KV_DTYPES
from penstock.backend.passes.transformers_model import forward_pass, linear_attention, model
from penstock.backend.passes.transformers_model.forward_pass import TransformersPass
from tests.backend.passes.cuda.emulated_device import EmulatedDevice
from tests.backend.passes.decoder.driver import Driver
from tests.backend.passes.transformers_model.families import FAMILIES
from tests.backend.passes.transformers_model.test_transformers_pass import NUM_TOKENS, PROMPTS, checkpoint, generated

ON_GPU = PassOptions(device="cuda:0", dtype="fp32", max_running=8)
META = torch.device("meta")


def meta_device() -> EmulatedDevice:
    device = EmulatedDevice()
    device.torch_device = META
    return device


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    device = EmulatedDevice()
    monkeypatch.setattr(forward_pass, "open_gpu", lambda _name: device)
    return device


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_uses_no_tensor_of_the_cpu(name: str) -> None:
    """Uses bf16: torch's grouped product, which transformers uses for experts, supports nothing else on this device."""
    facts = model.read_facts(checkpoint(name), "bf16", None)
    loaded = model._model_without_memory(facts.config, facts.dtype)
    linear_attention.run_layers_by_row(loaded)
    spec = TransformersPass.describe(checkpoint(name), replace(ON_GPU, dtype="bf16"))
    made = TransformersPass(facts, loaded, spec, 8, meta_device())
    driver = Driver(made, num_pages=16, page_size=8, kv_dtype="bf16")
    first, second = (driver.add(PROMPTS[number]) for number in (0, 2))
    with torch.inference_mode():
        logits = made._logits(driver.build([(first, 1), (second, 41)]))
    assert (logits.device, logits.dtype, tuple(logits.shape)) == (META, torch.float32, (2, facts.vocab_size))


def test_a_tensor_that_stays_on_the_cpu_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_attention.SlotStates, "__init__", states_on_the_cpu(linear_attention.SlotStates))
    with pytest.raises(RuntimeError, match="device"):
        test_a_step_uses_no_tensor_of_the_cpu("olmo-hybrid")


def states_on_the_cpu(kind: type[linear_attention.SlotStates]) -> object:
    init = kind.__init__
    return lambda states, shapes, max_slots, _device: init(states, shapes, max_slots, torch.device("cpu"))


@pytest.mark.parametrize("kv_dtype", CPU_KV_DTYPES)
def test_pages_of_every_dtype_are_on_the_device(kv_dtype: str) -> None:
    pages = make_kv_pages((2, 3, 16, 64), kv_dtype, META)
    assert all(tensor.device == META for tensor in pages.tensors)
    index = torch.zeros(1, dtype=torch.int64, device=META)
    pages.write(index, index, torch.ones(1, 2, 64, device=META))
    assert pages.read(index).device == META


@pytest.mark.parametrize("name", ["arcee", "olmo-hybrid"])
def test_a_pass_for_a_gpu_continues_as_generate_does(name: str, gpu: EmulatedDevice) -> None:
    made = TransformersPass.load(checkpoint(name), ON_GPU)
    assert made.spec == TransformersPass.describe(checkpoint(name), ON_GPU)
    on_cpu = TransformersPass.describe(checkpoint(name), replace(ON_GPU, device="cpu"))
    assert made.spec.workspace_bytes > on_cpu.workspace_bytes
    assert made._gpu is gpu
    driver = Driver(made, num_pages=64, page_size=8)
    rows = [driver.add(prompt) for prompt in PROMPTS]
    driver.prefill(7)
    driver.decode(NUM_TOKENS - 1)
    assert [row.tokens[row.num_prompt_tokens :] for row in rows] == generated(name)
    made.close()


def test_an_error_on_a_broken_device_ends_the_process(gpu: EmulatedDevice) -> None:
    driver = Driver(TransformersPass.load(checkpoint("arcee"), ON_GPU), num_pages=4, page_size=8)
    beyond_the_vocabulary = driver.add([10_000])
    with pytest.raises(IndexError) as failed:
        driver.step([(beyond_the_vocabulary, 1)])
    assert failed.value.__notes__ == ["in a step of 1 tokens in 1 rows; last launch: none"]
    gpu.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceLost, match="a step of 1 tokens in 1 rows: CUDA error: an illegal memory access"):
        driver.step([(beyond_the_vocabulary, 1)])


def test_weights_that_do_not_fit_are_one_line(gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch.nn.Module, "to", fail)
    with pytest.raises(StartupError, match="its weights do not fit the GPU: CUDA out of memory"):
        TransformersPass.load(checkpoint("arcee"), ON_GPU)
