"""Generation engines behind one interface (`base.GenerationEngine`): `embedded` and `scripted`.

An engine turns token ids into token ids. It knows nothing of groups' rewards, buffers or trainers.
"""
