"""Values of `caching.policy` under which times decide nothing."""

# Of `caching.policy`: reading and writing take no time, so whatever can be kept is kept.
FREE = {
    "READ_ROW_S": 0.0,
    "READ_BYTES_PER_S": float("inf"),
    "SERVE_BATCH_S": 0.0,
    "RECORD_ROW_S": 0.0,
    "RECORD_BYTES_PER_S": float("inf"),
}
