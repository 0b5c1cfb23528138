"""From YAML and overrides to a `RunConfig`, and from what is wrong with them to a message that says what to do."""
