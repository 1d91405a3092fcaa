"""Pictures in chats: from a client's part to pixels, and to the tokens that stand for them in the prompt.

`parts` finds a chat's pictures, `remote` fetches those that are elsewhere, `workshop` has them decoded and processed in
children (`child`, `decoding`), `families` says what each family of models writes around a picture, `placing` puts the
tokens into the prompt. Pillow and transformers are imported by the children only. Start with `placing`.
"""
