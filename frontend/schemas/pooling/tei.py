"""The bodies of text-embeddings-inference (TEI): /embed, /embed_all, /embed_sparse, /predict, /rerank, /similarity,
/tokenize and /decode."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.frontend.schemas.decoding import decode_body, decode_without_gc
from penstock.frontend.schemas.generation import ABSENT, SchedulingBody, ShortText
from penstock.frontend.schemas.pooling.common import Dimensions, Inputs, check_number, listed_inputs
from penstock.frontend.schemas.pooling.rerank import Instruction, Query
from penstock.frontend.schemas.utilities import MAX_TOKENS
from penstock.frontend.transport.errors import empty_text, invalid
from penstock.shm.messages import TokenId

Direction: TypeAlias = Literal["left", "right", "Left", "Right"]
Pair: TypeAlias = tuple[str, str]


class TeiBody(SchedulingBody, kw_only=True):
    """model is ours: it chooses one of the server's models."""

    model: ShortText | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None

    @property
    def side(self) -> Literal["left", "right"]:
        return "left" if self.truncation_direction in ("left", "Left") else "right"


class EmbedBody(TeiBody, kw_only=True):
    """POST /embed, and /embed_sparse and /embed_all, which have no normalize and no dimensions."""

    inputs: Inputs
    normalize: bool | None = None
    dimensions: Dimensions | None = None
    prompt_name: ShortText | None = None

    def texts(self) -> list[str | list[int]]:
        return listed_inputs("inputs", self.inputs)


class EmbedPlainBody(TeiBody, kw_only=True):
    """POST /embed_all and /embed_sparse."""

    inputs: Inputs
    prompt_name: ShortText | None = None
    dimensions: Raw = ABSENT
    normalize: Raw = ABSENT

    def texts(self) -> list[str | list[int]]:
        return listed_inputs("inputs", self.inputs)


class PredictBody(TeiBody, kw_only=True):
    """A text; a pair of texts; or a batch, whose items are lists of one text or two."""

    inputs: str | Annotated[list[str | list[str]], Meta(min_length=1)]
    raw_scores: bool | None = None

    def is_batch(self) -> bool:
        return isinstance(self.inputs, list) and isinstance(self.inputs[0], list)

    def items(self) -> list[str | Pair]:
        """Return one text or pair per prediction. Raises ApiError."""
        if isinstance(self.inputs, str):
            return [_item("inputs", [self.inputs])]
        check_number("inputs", len(self.inputs))
        if not self.is_batch():
            return [_item("inputs", self.inputs)]
        return [_item(f"inputs[{index}]", item) for index, item in enumerate(self.inputs)]


class TeiRerankBody(TeiBody, kw_only=True):
    query: Query
    texts: Annotated[list[str], Meta(min_length=1)]
    raw_scores: bool | None = None
    return_text: bool | None = None
    instruction: Instruction | None = None


class SimilarityInputs(Struct):
    source_sentence: Query
    sentences: Annotated[list[str], Meta(min_length=1)]


class SimilarityParameters(Struct):
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: ShortText | None = None


class SimilarityBody(TeiBody, kw_only=True):
    """The parameters may also be beside inputs, as in the other bodies."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None
    prompt_name: ShortText | None = None


class TeiTokenizeBody(Struct, kw_only=True):
    inputs: str | Annotated[list[str], Meta(min_length=1)]
    model: ShortText | None = None
    add_special_tokens: bool | None = None
    prompt_name: ShortText | None = None


class DecodeBody(Struct, kw_only=True):
    ids: Annotated[list[TokenId | list[TokenId]], Meta(min_length=1, max_length=MAX_TOKENS)]
    model: ShortText | None = None
    skip_special_tokens: bool | None = None

    def lists(self) -> list[list[int]]:
        """Return one list per text. Raises ApiError."""
        if not isinstance(self.ids[0], list):
            return [_ids("ids", list(self.ids))]
        check_number("ids", len(self.ids))
        return [_ids(f"ids[{index}]", item) for index, item in enumerate(self.ids)]


_embed = msgspec.json.Decoder(EmbedBody)
_embed_plain = msgspec.json.Decoder(EmbedPlainBody)
_predict = msgspec.json.Decoder(PredictBody)
_rerank = msgspec.json.Decoder(TeiRerankBody)
_similarity = msgspec.json.Decoder(SimilarityBody)
_tokenize = msgspec.json.Decoder(TeiTokenizeBody)
_decode = msgspec.json.Decoder(DecodeBody)


class _Fields(Struct):
    inputs: Raw = ABSENT
    texts: Raw = ABSENT
    model: Any = None


_fields = msgspec.json.Decoder(_Fields)


def is_tei_rerank(data: bytes) -> bool:
    """Whether the body is TEI's rather than Cohere's, which has documents. A body that is not JSON is neither."""
    return bool(_field_of(data).texts)


def is_tei_tokenize(data: bytes) -> bool:
    """Whether the body is TEI's rather than vLLM's, which has a prompt or messages."""
    return bool(_field_of(data).inputs)


def named_model(data: bytes) -> str | None:
    """Return the model that a body names, before the endpoint that answers it is known."""
    model = _field_of(data).model
    return model if isinstance(model, str) else None


def _field_of(data: bytes) -> _Fields:
    try:
        return decode_without_gc(_fields, data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Fields()  # the decoder that reads all of it explains what is wrong


def decode_embed(data: bytes) -> EmbedBody:
    """Raises ApiError naming the field, its value and the limit; so do all of these."""
    body = decode_body(_embed, data)
    body.texts()
    return body


def decode_embed_plain(data: bytes) -> EmbedPlainBody:
    body = decode_body(_embed_plain, data)
    body.texts()
    return body


def decode_predict(data: bytes) -> PredictBody:
    body = decode_body(_predict, data)
    body.items()
    return body


def decode_tei_rerank(data: bytes) -> TeiRerankBody:
    body = decode_body(_rerank, data)
    check_number("texts", len(body.texts))
    return body


def decode_similarity(data: bytes) -> SimilarityBody:
    body = decode_body(_similarity, data)
    check_number("inputs.sentences", len(body.inputs.sentences) + 1)
    if "" in body.inputs.sentences:
        empty_text(f"inputs.sentences[{body.inputs.sentences.index('')}]")
    given = body.parameters
    if given is not None:
        body.truncate = given.truncate if body.truncate is None else body.truncate
        body.truncation_direction = body.truncation_direction or given.truncation_direction
        body.prompt_name = body.prompt_name or given.prompt_name
    return body


def decode_tei_tokenize(data: bytes) -> TeiTokenizeBody:
    body = decode_body(_tokenize, data)
    if isinstance(body.inputs, list):
        check_number("inputs", len(body.inputs))
    return body


def decode_decode(data: bytes) -> DecodeBody:
    body = decode_body(_decode, data)
    body.lists()
    return body


def _item(field: str, item: str | list[str] | list[str | list[str]]) -> str | Pair:
    texts = [text for text in item if isinstance(text, str)] if isinstance(item, list) else None
    if texts is None or len(texts) != len(item) or not 1 <= len(texts) <= 2:
        invalid(field, "must be a text or two, or lists of one text or two")
    if "" in texts[:1]:
        empty_text(field)
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def _ids(field: str, item: int | list[int] | list[int | list[int]]) -> list[int]:
    given = item if isinstance(item, list) else [[item]]
    ids = [token_id for token_id in given if isinstance(token_id, int)]
    if len(ids) != len(given):
        invalid(field, "must be token ids, or lists of token ids, not a mix")
    return ids
