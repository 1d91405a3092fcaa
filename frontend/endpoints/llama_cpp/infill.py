"""POST /infill: code between a prefix and a suffix."""

from __future__ import annotations

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.llama_cpp.completion import answer_native
from penstock.frontend.endpoints.prompts import check_length, fill_in_model, fill_in_prompts
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.parsing.syntax.fill_in import FillInTokens
from penstock.frontend.pictures.placing import ChatPrompt
from penstock.frontend.schemas.completion import InfillBody
from penstock.frontend.schemas.decoding import decode_infill
from penstock.frontend.transport.exchange import Exchange

_REPOSITORY, _FILE = "myproject\n", "filename\n"
"""Names that llama.cpp gives to what the request does not name."""


async def infill(exchange: Exchange, context: EndpointContext) -> None:
    """POST /infill. Raises ApiError, ClientGoneError."""
    body, served, _ = await context.receive_body(exchange, decode_infill)
    served, tokens = fill_in_model(served, "input_suffix")
    await answer_native(exchange, body, served, lambda: _encoded(body, served, tokens))


async def _encoded(body: InfillBody, served: ServedModel, tokens: FillInTokens) -> list[ChatPrompt]:
    """Return the prompt: further files, then what is around the gap, then its beginning. Raises ApiError."""
    extra = [f"{each.filename}\n{each.text}\n" for each in body.input_extra]
    names = [_REPOSITORY, _FILE]
    if tokens.repository is None or tokens.file is None:
        extra, names = ["".join(each.text for each in body.input_extra)], []
    texts = [body.input_prefix, body.prompt, *names, *extra]
    check_length("input_prefix", [body.input_prefix], served)
    check_length("input_suffix", [body.input_suffix], served)
    check_length("prompt", [body.prompt], served)
    check_length("input_extra", extra, served)
    prefix, begun, *others = await served.tokenizer.encode_as_text(texts, tokens.spellings)
    (around,) = await fill_in_prompts([prefix], body.input_suffix, served, tokens)
    before: list[int] = []
    if not names:
        before = others[0]
    elif extra and tokens.repository is not None and tokens.file is not None:
        repository, file, *files = others
        before = [tokens.repository, *repository]
        for each in files:
            before += [tokens.file, *each]
        before += [tokens.file, *file]
    return [ChatPrompt([*before, *around, *begun])]
