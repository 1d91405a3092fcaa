"""`penstock bench`: a load generator for any OpenAI endpoint, and the measurements behind the figures in docs.

Start with `command`: it lists the subcommands and the module of each. `serving` and `encoders` hold the measurements
that send requests to a server over HTTP, `components` those that run one part of Penstock by itself, without a server.
All are built on `harness` (processes under test, tables, reports) and `load_generator` (an HTTP client with a clock);
the options that several measurements share are declared in `options`.
"""
