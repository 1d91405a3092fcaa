"""The contract suite: the engine's requirements on any forward pass. Needs only numpy and pytest.

python -m penstock.tools.forward_pass_contract package.module:Class --model DIR

`test_contract`, `test_pooling` and `test_lora` have the tests, `steps` builds the batches that they run, `options`
gives pytest its options and the `forward_pass` fixture. May import `penstock.backend.forward_pass` and
`penstock.backend.forward_pass.plugins`.
"""
