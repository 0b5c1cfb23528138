"""What crosses between processes of ours, and how: plain data, never pickles.

`crossing` marks the classes that may cross. Knows nothing of what the messages mean or who sends them.
"""
