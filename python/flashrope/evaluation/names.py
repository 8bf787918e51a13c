"""The names of the schemes on the command line, and in tables. Loads nothing."""

NAMES = {
    "stock": "unchanged",
    "log-n": "log n",
    "ntk": "NTK",
    "yarn": "YaRN",
    "rerope": "ReRoPE",
    "rerope-plain": "ReRoPE without log n",
    "leaky": "Leaky ReRoPE",
    "hope": "HoPE",
    "cope": "CoPE",
    "self-extend": "Self-Extend",
    "self-extend-log-n": "Self-Extend with log n",
    "dual-chunk": "DCA",
    "dual-chunk-log-n": "DCA with log n",
}
