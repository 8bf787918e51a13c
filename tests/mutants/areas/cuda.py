"""Mutants of the CUDA C++ kernels, which nvcc compiles to PTX for the executor. Their tests need nvcc, no GPU."""

from ..breaks import Group
from ..runs import EXECUTED

ATTEND = (
    *(*EXECUTED, "tests/executor/cuda_kernels.py"),
    *("-k", "float16-64 or padding or not_causal or splits or strides or hostile or long_positions"),
)
APPEND = (*EXECUTED, "tests/executor/cuda_kernels.py", "-k", "append_writes and 64")
# Only what these tests run is compiled, in a third of the time.
SMALLER = (
    (
        "csrc/decode.cu",
        "                      : p.head_dim == 128 ? launch_split<T, 128>(p, stream)\n"
        "                      : p.head_dim == 256 ? launch_split<T, 256>(p, stream)\n",
        "",
    ),
)

GROUPS = (
    Group(
        "cuda",
        "csrc/decode.cu",
        ATTEND,
        (
            (
                "queries are rotated one position off",
                "const int position = max(w.keys - p.seqlen_q + w.query(m) + shift, 0);",
                "const int position = max(w.keys - p.seqlen_q + w.query(m) + shift + 1, 0);",
            ),
            (
                "a slice begins at the cache's first slot",
                "place_of(p.layout, w.b, w.first + min(key0 + lane % SLICE, w.keys - 1));",
                "place_of(p.layout, w.b, min(key0 + lane % SLICE, w.keys - 1));",
            ),
            (
                "a page number is not clamped",
                "  place.page = clamp(place.page, 0, p.layout.pages - 1);\n",
                "",
            ),
            (
                "the second member of a pair takes the first's place",
                "b[e] = T::pack(low.x, high.x), c[e] = T::pack(low.y, high.y);",
                "b[e] = T::pack(low.x, high.x), c[e] = T::pack(low.x, high.x);",
            ),
            (
                "the window reaches one key too far",
                "if (key < w.keys && distance >= start && distance < stop) {",
                "if (key < w.keys && distance >= start && distance <= stop) {",
            ),
            (
                "a band that a slice only touches is skipped",
                "if (farthest < start || nearest >= stop) continue;",
                "if (farthest <= start || nearest >= stop) continue;",
            ),
            (
                "the accumulator is not rescaled",
                "state.acc[tile][2 * r] *= kept, state.acc[tile][2 * r + 1] *= kept;",
                "state.acc[tile][2 * r] *= kept;",
            ),
            (
                "the row sum is not rescaled",
                "    state.row_sum[r] *= kept;\n",
                "",
            ),
            (
                "warps are merged without their weights",
                "      const float weight = exp2_approx(stats[i * TILE_ROWS + m] - finite);\n",
                "      const float weight = stats[i * TILE_ROWS + m] > -INFINITY;\n",
            ),
            (
                "log n counts from 0",
                "p.log_n_factor * logf(max(queries.position[r], 0) + 1.0f);",
                "p.log_n_factor * logf(max(queries.position[r], 1));",
            ),
            (
                "the last split is left out",
                "    for (int split = 0; split < p.num_splits; ++split) {",
                "    for (int split = 0; split < p.num_splits - 1; ++split) {",
            ),
            (
                "lse is in base 2",
                "top == -INFINITY ? -INFINITY : LN_2 * (top + log2f(sum));",
                "top == -INFINITY ? -INFINITY : top + log2f(sum);",
            ),
            (
                "a split without keys leaves its lse as it is",
                "      p.partial_lse[row] = -INFINITY;\n",
                "",
            ),
        ),
        cut=SMALLER,
    ),
    Group(
        "cuda",
        "csrc/decode.cu",
        APPEND,
        (
            (
                "a new key overwrites the last",
                "const int slot = seqlen_of(p.layout, b) + t;",
                "const int slot = max(seqlen_of(p.layout, b) + t - 1, 0);",
            ),
            (
                "a new key goes to a full cache",
                "  if (slot >= p.layout.capacity) return;\n",
                "",
            ),
            (
                "a new key goes to a page that does not exist",
                "if (place.page < 0 || place.page >= p.layout.pages) return;",
                "if (place.page >= p.layout.pages) return;",
            ),
        ),
        cut=SMALLER,
    ),
    Group(
        "cuda",
        "csrc/positions.cuh",
        ATTEND,
        (
            (
                "a slot lies in the next page",
                "+ (slot >> layout.page_bits)];",
                "+ ((slot + 1) >> layout.page_bits)];",
            ),
            (
                "left padding outside the sequence is believed",
                "clamp(p.layout.leftpad[w.b], 0, end) : 0;",
                "p.layout.leftpad[w.b] : 0;",
            ),
            (
                "query heads of a group are mixed up",
                "return head_kv * group + row(m) % group;",
                "return head_kv * group + (row(m) + 1) % group;",
                "Queries are read and results written with the same numbers: each head is right in another row",
            ),
            (
                "a split begins one block late",
                "w.block = block0 + (w.split + p.num_splits - block0 % p.num_splits) % p.num_splits;",
                "w.block = block0 + (w.split + 1 + p.num_splits - block0 % p.num_splits) % p.num_splits;",
                "The splits only exchange their blocks, and all splits are merged",
            ),
            (
                "a split's blocks depend on where the window begins",
                "w.block = block0 + (w.split + p.num_splits - block0 % p.num_splits) % p.num_splits;",
                "w.block = block0 + w.split;",
            ),
            (
                "a tile's last keys are left out",
                "w.end_block = key1 > key0 ? (key1 + BLOCK - 1) / BLOCK : 0;",
                "w.end_block = key1 > key0 ? key1 / BLOCK : 0;",
            ),
            (
                "the first key of the window is left out",
                "const int key0 = max(0, w.first_position - farthest + 1);",
                "const int key0 = max(0, w.last_position - farthest + 1 + BLOCK);",
            ),
            (
                "the coarse row is one too early",
                "FINE_ROWS + position / FINE_ROWS), pair)",
                "FINE_ROWS + max(position / FINE_ROWS - 1, 0)), pair)",
            ),
            (
                "positions of queries before the first key are not shifted",
                "return sees_ahead ? max(0, p.seqlen_q - w.keys) : 0;",
                "return 0;",
            ),
            (
                "the odd pair takes the even one's angle",
                "t[1] = add_angles(CosSin{cos.y, sin.y}, CosSin{fine_cos.y, fine_sin.y});",
                "t[1] = add_angles(CosSin{cos.y, sin.y}, CosSin{fine_cos.x, fine_sin.x});",
            ),
        ),
        cut=SMALLER,
    ),
    Group(
        "cuda",
        "csrc/library.cpp",
        (*EXECUTED, "tests/executor/cuda_kernels.py", "-k", "library_checks"),
        (
            (
                "too short a table is accepted",
                "STD_TORCH_CHECK((table.size(1) - FINE_ROWS) * FINE_ROWS >= positions,",
                "STD_TORCH_CHECK(table.size(1) * FINE_ROWS >= positions,",
            ),
            (
                "too few partial results are accepted",
                'check_float32(partial_out, "partial_out", num_splits * rows * p.head_dim, q);',
                'check_float32(partial_out, "partial_out", rows * p.head_dim, q);',
            ),
        ),
        cut=SMALLER,
    ),
    Group(
        "cuda",
        "csrc/decode.cu",
        (*EXECUTED, "tests/executor/cuda_kernels.py", "-k", "by_length"),
        (
            (
                "the factor by length counts the slots of the padding",
                "fmaxf(0.1f * logf(max(w.keys, 1) / p.length_scale) + 1.0f, 1.0f);",
                "fmaxf(0.1f * logf(max(w.first + w.keys, 1) / p.length_scale) + 1.0f, 1.0f);",
            ),
        ),
        cut=SMALLER,
    ),
)
