"""Where a head's keys, values and queries lie, for the scripts that call `retrievald bench index`.

A SET is a folder as tests/data/qk/README.md describes it, with values.npy, or FOLDER/layerL_headH: one head of those that `retrievald eval dump --folder FOLDER` wrote.
"""
FOLDER = {"keys": "keys", "values": "values", "queries": "decode_q", "train-queries": "prefill_q", "train-positions": "prefill_q_pos", "key-positions": "key_pos"}
HEAD = {"keys": "keys", "values": "values", "queries": "queries", "train-queries": "train_queries"}


def files(where):
    """Flags of `bench index` and their files."""
    if where.is_dir():
        return {flag: where / f"{name}.npy" for flag, name in FOLDER.items()}
    return {flag: where.with_name(f"{where.name}_{name}.npy") for flag, name in HEAD.items()} | {"train-positions": where.with_name("train_positions.npy")}
