"""The API's own documentation: an OpenAPI 3.1 document at /openapi.json and its page at /docs.

`endpoint_docs` says what each endpoint takes and returns, `field_docs` explains the fields of bodies, and
`body_examples` has a body to try for each. `openapi` makes the document from them and the routes; `served_document`
serves it. The files of the page are in `page/`. Imports `routes`, `health` and the schemas.

Start reading at `openapi.py`.
"""
