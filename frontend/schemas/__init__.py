"""The request bodies of the endpoints, and the shapes of their answers.

Decoding is validation: every bound is in a type, and `decoding` turns the codec's errors into errors that name the
field, its value and the limit. Known fields of other servers that would change the answer are declared too, and refused
by name. Any other unknown field is ignored, as OpenAI clients expect, or refused under --strict (`unknown_fields`).
`answers` only feeds /openapi.json. May import `access` and `transport`. Start with `generation`, the fields that all
endpoints share, then `chat`.
"""
