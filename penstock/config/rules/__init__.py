"""Rules between settings of different sections, each a line that names the keys, the reason and the way out."""
