"""What crosses between processes of ours, and how: plain data, never pickles.

`crossing` marks the classes that may cross; `encoder` and `decoder` turn values into bytes and back (`tags` says how);
`objects` does so for instances of marked classes, `arrays` for numpy and torch; `framing` puts messages on sockets and
streams. Knows nothing of what the messages mean or who sends them.
"""
