"""The bodies of the endpoints. Decoding is validation: every bound is in a type.

Fields that would change the answer and that this server does not have are declared too, so that they are refused by
name instead of ignored. Any other unknown field is ignored, as OpenAI clients expect, or refused under --strict.
"""
